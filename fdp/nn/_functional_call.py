"""Calling a module with other tensors in place of its own, from any number of threads."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fdp._execution.guards import refuse_beside, stand_in_for_functional_call
from fdp._execution.process_lock import exclusively
from fdp._placement.slot import IN_PLACE
from fdp._transforms.own_statistics import say_own
from fdp._trees import torch_private
from fdp.nn._bound_clone import Skeleton

Tensors: TypeAlias = dict[str, Tensor]

_POOLS: dict[int, tuple[weakref.ref[nn.Module], tuple[list[Skeleton], list[Skeleton]]]] = {}


@stand_in_for_functional_call
def functional_call(
    module: nn.Module,
    params_and_buffers: Tensors | Sequence[Tensors],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with other tensors in place of its own, from any number of threads.

    `functional_call(module, tensors, args) == torch.func.functional_call(module, tensors, args)`.

    >>> import torch
    >>> from fdp import functional_call
    >>> functional_call(torch.nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, torch.ones(2))
    tensor([3.])

    Args:
        module: The module; it keeps its own tensors throughout.
        params_and_buffers: Tensors by name, in one dict or several. The module's own stand for those left out. Buffers
            are written in place, and an only dict gets what forward puts under its names.
        args: Positional arguments. What is not a tuple is the only one.
        kwargs: Keyword arguments.
        tie_weights: One name of a tied tensor stands for all of its names.
        strict: Missing and unexpected names are errors.

    Returns:
        What the module returns.

    Raises:
        TypeError: Not a module, or a value that is not a tensor.
        ValueError: Not dicts, a name in several dicts, or different values for names that are tied.
        RuntimeError: A scripted module, a `DataParallel`, or names that do not fit when `strict`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional_call: expected a torch.nn.Module, got {kind(module)}")
    options = {"tie_weights": tie_weights, "strict": strict}
    if torch.compiler.is_compiling():
        return torch.func.functional_call(module, params_and_buffers, args, kwargs, **options)
    given, kwargs = _merge(params_and_buffers), kwargs or {}
    args = () if args is None else args if isinstance(args, tuple) else (args,)
    skeleton = take(pool_of(module), module)
    if skeleton.has_own_statistics:
        say_own(module)
    if not skeleton.trusted or torch_private.has_any_global_hook() or torch_private.get_tracing_state():
        with in_place():
            try:
                return call_in_place(module, given, args, kwargs, **options)
            finally:
                forget(skeleton.original_ids)
                keep(skeleton, module)
    held = False
    try:
        if tie_weights and skeleton.slots.takes(given, strict):
            out = _call_clone(skeleton, given, args, kwargs)
        else:
            skeleton.slots.bind({})
            out = call_in_place(skeleton.root, given, args, kwargs, **options)
        held = is_held(skeleton)
        return out
    finally:
        skeleton.write_back(module, given)
        if not held:
            keep(clear(skeleton), module)


def _call_clone(skeleton: Skeleton, given: Tensors, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    skeleton.slots.bind(given)
    try:
        return skeleton.root(*args, **kwargs)
    finally:
        given.update(skeleton.slots.bound(given))


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Held while tensors are swapped inside a user's module. A thread that waits for others here would wait forever."""
    refuse_beside("a module that can only be called in place", _IN_PLACE)
    with exclusively():
        token = IN_PLACE.set(True)
        try:
            yield
        finally:
            IN_PLACE.reset(token)


_IN_PLACE = (
    "because something in it leads back to it (a hook that closes over the module, a compiled module, ...), and others "
    "would call it meanwhile. Pass executor='sequential', or remove what leads back"
)


def call_in_place(
    module: nn.Module,
    given: Tensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    if torch_private.get_tracing_state() or isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError("The stateless API can't be used with Jitted modules")
    if isinstance(module, nn.DataParallel):
        raise RuntimeError("The stateless API can't be used with nn.DataParallel module")
    # In the order of a stack: where one module has two names, what is put back last must be its own tensors.
    with torch_private.reparametrize_module(module, given, tie_weights=tie_weights, strict=strict, stack_weights=True):
        return module(*args, **kwargs)


def take(pool: list[Skeleton], module: nn.Module) -> Skeleton:
    """A skeleton of the module as it is now, for this call alone."""
    skeleton = _reusable(pool, module) or Skeleton(module)
    if torch_private.is_parametrize_caching():
        refuse_beside(
            "torch.nn.utils.parametrize.cached()", "whose cache is one for all threads. Pass executor='sequential'"
        )
        forget(skeleton.ids | skeleton.original_ids)
    return skeleton


def _reusable(pool: list[Skeleton], module: nn.Module) -> Skeleton | None:
    while pool:
        try:
            skeleton = pool.pop()
        except IndexError:  # another thread was faster
            return None
        if skeleton.is_current(module):
            return skeleton
    return None


def is_held(skeleton: Skeleton) -> bool:
    """Whether the skeleton must stay as it is: a checkpoint will run it again in the backward, with these tensors."""
    forget(skeleton.ids)
    return skeleton.is_held()


def clear(skeleton: Skeleton) -> Skeleton:
    forget(skeleton.ids)
    skeleton.reset()
    return skeleton


def forget(modules: frozenset[int]) -> None:
    """Drop what a call has left elsewhere, keyed by these modules: it has seen the tensors of that call.

    A functional_call inside forward leaves skeletons, and `parametrize.cached()` the weights it has computed.
    """
    for module in modules.intersection(list(_POOLS)):  # at once: other threads write to it
        _POOLS.pop(module, None)
    if torch_private.parametrize_cache():
        for key in [key for key in list(torch_private.parametrize_cache()) if key[0] in modules]:
            torch_private.parametrize_cache().pop(key, None)


def pool_of(module: nn.Module, *, of_replicas: bool = False) -> list[Skeleton]:
    """The skeletons of functional_call, or those that are replicas. They go when the module goes."""
    key = id(module)
    entry = _POOLS.get(key)
    if entry is None or entry[0]() is not module:
        entry = _POOLS[key] = (weakref.ref(module, lambda _: _POOLS.pop(key, None)), ([], []))
    return entry[1][of_replicas]


def keep(skeleton: Skeleton, module: nn.Module, *, of_replicas: bool = False) -> None:
    if not skeleton.cyclic:
        pool_of(module, of_replicas=of_replicas).append(skeleton)


def _merge(given: Tensors | Sequence[Tensors]) -> Tensors:
    """One dict of several; the messages are torch's."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, Sequence):
        expected = "Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts"
        raise ValueError(f"{expected}, but got {type(given)}")
    if not all(isinstance(tensors, dict) for tensors in given):
        raise ValueError("Expected all elements of parameter_and_buffer_dicts to be dictionaries")
    repeated = [name for name, count in Counter(chain.from_iterable(given)).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated} appeared in multiple dictionaries; behavior of functional call is ambiguous")
    return {name: tensor for tensors in given for name, tensor in tensors.items()}


def kind(value: object) -> str:
    return f"the class {value.__name__}; make an instance" if isinstance(value, type) else type(value).__name__
