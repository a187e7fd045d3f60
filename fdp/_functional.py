"""Modules as functions: parameters and buffers go in, the output and new buffers come out."""

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module

from fdp._skeleton import Skeleton

Tensors: TypeAlias = dict[str, Tensor]
State: TypeAlias = tuple[Tensors, Tensors]

_IN_PLACE = threading.RLock()  # held while tensors are swapped inside a user's module
_POOLS: dict[int, tuple[weakref.ref[nn.Module], list[Skeleton]]] = {}


class Apply(Protocol):
    """A module as a function of its parameters and buffers."""

    out_dims: tuple[int, str]

    def __call__(self, state: State, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]: ...


def functional(module: nn.Module, *, detach: bool = True) -> tuple[Apply, State]:
    """Split a module into a pure function and its state.

    With `apply, state = functional(module)`: `apply(state, x) == (module(x), buffers after that call)`.

    >>> import torch
    >>> from fdp import functional
    >>> apply, (params, buffers) = functional(torch.nn.BatchNorm1d(2))
    >>> out, new_buffers = apply((params, buffers), torch.ones(3, 2))
    >>> buffers["num_batches_tracked"], new_buffers["num_batches_tracked"]
    (tensor(0), tensor(1))

    Every call reads the module anew, so `module.eval()`, a plain attribute, a hook or another submodule shows in the
    next one. What forward writes shows in the new buffers only; objects of other classes that the module holds are
    shared with it. Calls may run side by side in threads.

    They run on clones of the module. Where a clone cannot follow, because a hook closes over the module or an object
    inside refers to it, they run on the module itself, one at a time, and activation checkpointing in it would see the
    module's own tensors in the backward.

    Args:
        module: Any module whose parameters have shapes. Its tensors and attributes are left as they are.
        detach: False gives the module's parameters themselves, by default aliases that do not require gradients.

    Returns:
        `apply(state, *args, **kwargs) -> (output, new_buffers)` and `state`, the pair of dicts `(params, buffers)` by
        name. They share the module's memory. `apply.out_dims` is `(0, "mean")`: join outputs, average buffers.

    Raises:
        TypeError: Not a module, or one that cannot be called with other tensors. From `apply`: not a pair of dicts.
        ValueError: A lazy module that has not seen an input. From `apply`: names are missing or unexpected.
        RuntimeError: From `apply`: forward wrote in place to a tensor that is neither a parameter nor a buffer.
    """
    _check_module(module)
    pool: list[Skeleton] = []

    def apply(state: State, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        params, buffers = _as_state(state)
        if torch.compiler.is_compiling():  # the compiler traces torch's own
            _check_names(params, buffers, dict(module.named_parameters()), dict(module.named_buffers()))
            bound = _with_copies(params, buffers)
            out = torch.func.functional_call(module, bound, args, kwargs)
            return out, {name: bound[name] for name in buffers}
        skeleton = _take(pool, module)
        if skeleton.trusted and not _has_any_global_hook():
            return _apply_clone(skeleton, pool, params, buffers, args, kwargs)
        return _apply_module(module, skeleton, pool, params, buffers, args, kwargs)

    apply.out_dims = (0, "mean")  # pyright: ignore[reportFunctionMemberAccess]
    params: Tensors = dict(module.named_parameters())
    buffers: Tensors = dict(module.named_buffers())
    if detach:
        params = {name: tensor.detach() for name, tensor in params.items()}
        buffers = {name: tensor.detach() for name, tensor in buffers.items()}
    return cast(Apply, apply), (params, buffers)


def _apply_clone(
    skeleton: Skeleton, pool: list[Skeleton], params: Tensors, buffers: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    held = False
    try:
        _check_names(params, buffers, skeleton.params, skeleton.buffers)
        versions = skeleton.versions()
        skeleton.bind(_with_copies(params, buffers))
        out = skeleton.root(*args, **kwargs)
        new_buffers = skeleton.bound(buffers)
        held = _is_held(skeleton)
        _check_versions(versions, skeleton.versions())
        return out, new_buffers
    finally:
        if not held:
            pool.append(_clear(skeleton))


def _apply_module(
    module: nn.Module,
    skeleton: Skeleton,
    pool: list[Skeleton],
    params: Tensors,
    buffers: Tensors,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Tensors]:
    with _IN_PLACE:
        if not skeleton.is_current(module):  # another call in place may have been under way
            skeleton = Skeleton(module)
        _check_names(params, buffers, skeleton.params, skeleton.buffers)
        versions, bound = skeleton.versions(), _with_copies(params, buffers)
        try:
            out = _call_in_place(module, bound, args, kwargs)
        finally:
            _forget(skeleton.original_ids)
            skeleton.restore()
            pool.append(skeleton)
        _check_versions(versions, skeleton.versions())
        # Where forward has deleted a buffer, torch leaves a mark of its own.
        return out, {name: bound[name] for name in buffers if isinstance(bound[name], Tensor | None)}


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
        raise TypeError(f"functional_call: expected a torch.nn.Module, got {_kind(module)}")
    options = {"tie_weights": tie_weights, "strict": strict}
    if torch.compiler.is_compiling():
        return torch.func.functional_call(module, params_and_buffers, args, kwargs, **options)
    given, kwargs = _merge(params_and_buffers), kwargs or {}
    args = () if args is None else args if isinstance(args, tuple) else (args,)
    skeleton = _take(_pool_of(module), module)
    if not skeleton.trusted or _has_any_global_hook() or torch._C._get_tracing_state():
        with _IN_PLACE:
            try:
                return _call_in_place(module, given, args, kwargs, **options)
            finally:
                _forget(skeleton.original_ids)
                _keep(skeleton, module)
    held = False
    try:
        if tie_weights and skeleton.takes(given, strict):
            out = _call_clone(skeleton, given, args, kwargs)
        else:
            out = _call_in_place(skeleton.root, given, args, kwargs, **options)
        held = _is_held(skeleton)
        return out
    finally:
        skeleton.write_back(module, given)
        if not held:
            _keep(_clear(skeleton), module)


def _call_clone(skeleton: Skeleton, given: Tensors, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    skeleton.bind(given)
    try:
        return skeleton.root(*args, **kwargs)
    finally:
        given.update(skeleton.bound(given))


def _call_in_place(
    module: nn.Module,
    given: Tensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    if torch._C._get_tracing_state() or isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError("The stateless API can't be used with Jitted modules")
    if isinstance(module, nn.DataParallel):
        raise RuntimeError("The stateless API can't be used with nn.DataParallel module")
    # In the order of a stack: where one module has two names, what is put back last must be its own tensors.
    with _reparametrize_module(module, given, tie_weights=tie_weights, strict=strict, stack_weights=True):
        return module(*args, **kwargs)


def _take(pool: list[Skeleton], module: nn.Module) -> Skeleton:
    """A skeleton of the module as it is now, for this call alone."""
    while pool:
        try:
            skeleton = pool.pop()
        except IndexError:  # another thread was faster
            break
        if skeleton.is_current(module):
            return skeleton
    return Skeleton(module)


def _is_held(skeleton: Skeleton) -> bool:
    """Whether the skeleton must stay as it is: a checkpoint will run it again in the backward, with these tensors."""
    _forget(skeleton.ids)
    return skeleton.is_held()


def _clear(skeleton: Skeleton) -> Skeleton:
    _forget(skeleton.ids)
    skeleton.reset()
    return skeleton


def _forget(modules: frozenset[int]) -> None:
    """Drop what a functional_call inside forward has kept: it has seen the tensors of the call outside."""
    if not _POOLS.keys().isdisjoint(modules):
        for module in modules:
            _POOLS.pop(module, None)


def _pool_of(module: nn.Module) -> list[Skeleton]:
    """The skeletons of functional_call, which go when the module goes."""
    key = id(module)
    entry = _POOLS.get(key)
    if entry is None or entry[0]() is not module:
        entry = _POOLS[key] = (weakref.ref(module, lambda _: _POOLS.pop(key, None)), [])
    return entry[1]


def _keep(skeleton: Skeleton, module: nn.Module) -> None:
    if not skeleton.cyclic:
        _pool_of(module).append(skeleton)


def _with_copies(params: Tensors, buffers: Tensors) -> Tensors:
    return {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}


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


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: expected a torch.nn.Module, got {_kind(module)}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("functional: a scripted module cannot be called with other tensors; pass the Python module")
    if isinstance(module, nn.DataParallel):
        raise TypeError("functional: expected the module inside DataParallel; pass .module")
    named = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"functional: {lazy} have no shape yet; run a dummy forward first: module(example)")


def _kind(value: object) -> str:
    return f"the class {value.__name__}; make an instance" if isinstance(value, type) else type(value).__name__


def _as_state(state: Any) -> State:
    if isinstance(state, tuple | list) and len(state) == 2 and all(isinstance(tree, Mapping) for tree in state):
        return state[0], state[1]
    raise TypeError(
        f"apply: the first argument must be the pair (params, buffers) that functional(module) returned, got "
        f"{_kind(state)}. Call apply((params, buffers), *args)"
    )


def _check_names(params: Tensors, buffers: Tensors, expected_params: Any, expected_buffers: Any) -> None:
    if params.keys() == expected_params.keys() and buffers.keys() == expected_buffers.keys():
        return
    problems = []
    for what, tree, expected in (("params", params, expected_params), ("buffers", buffers, expected_buffers)):
        missing = [name for name in expected if name not in tree]
        unexpected = [name for name in tree if name not in expected]
        problems += [f"{what} lacks {missing}"] if missing else []
        problems += [f"{what} has unexpected {unexpected}"] if unexpected else []
    raise ValueError(f"apply: {'; '.join(problems)}. Pass (params, buffers) with the names functional(module) returns")


def _check_versions(before: dict[str, int], after: dict[str, int]) -> None:
    written = [path for path, version in after.items() if before.get(path, version) != version]
    if written:
        raise RuntimeError(
            f"apply: forward wrote in place to {written}, plain tensor attributes that all calls share. Register them "
            f"as buffers, register_buffer(name, tensor): apply works on copies of those and returns them"
        )
