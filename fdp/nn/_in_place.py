"""A module that is called itself, with other tensors put into it, because no clone can stand for it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fdp._execution.guards import refuse_beside
from fdp._execution.process_lock import exclusively
from fdp._placement.slot import IN_PLACE
from fdp._placement.transfers import differences
from fdp._transforms.own_statistics import say_once
from fdp._trees import torch_private
from fdp.nn._recipe import Recipe

Tensors: TypeAlias = dict[str, Tensor]

_SAID: dict[int, Any] = {}


def runs_in_place(recipe: Recipe) -> bool:
    """Whether a call is one of the module itself. A hook on all modules may know the user's, and no clone."""
    return recipe.in_place is not None or torch_private.has_any_global_hook()


@contextlib.contextmanager
def in_place(module: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Held while tensors are swapped inside a user's module. A thread that waits for others here would wait forever."""
    why = recipe.in_place or "there is a hook on all modules"
    refuse_beside(
        "a module that can only be called in place",
        f"because {why}, and others would call it meanwhile. Pass executor='sequential', or remove what leads back",
    )
    if recipe.in_place and differences() is None:
        text = f"Calls of this {type(module).__name__} run on the module itself, one at a time: {why}. {_WHAT_FOLLOWS}"
        say_once(_SAID, module, text, UserWarning)
    with exclusively():
        token = IN_PLACE.set(True)
        try:
            yield
        finally:
            IN_PLACE.reset(token)


_WHAT_FOLLOWS = (
    "What forward writes to its attributes stays, and activation checkpointing in it would compute with the module's "
    "own tensors in the backward. Remove what leads back to the module, or keep that outside of it"
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
    """The module called with other tensors in it."""
    with swapped(module, given, tie_weights=tie_weights, strict=strict):
        return module(*args, **kwargs)


@contextlib.contextmanager
def swapped(module: nn.Module, given: Tensors, *, tie_weights: bool = True, strict: bool = False) -> Iterator[None]:
    """As a context: other tensors are in the module; what it puts in their place is in the dict afterwards."""
    if torch_private.is_tracing() or isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError("The stateless API can't be used with Jitted modules")
    if isinstance(module, nn.DataParallel):
        raise RuntimeError("The stateless API can't be used with nn.DataParallel module")
    # In the order of a stack: where one module has two names, what is put back last must be its own tensors.
    with torch_private.reparametrize_module(module, given, tie_weights=tie_weights, strict=strict, stack_weights=True):
        yield
