"""What is called in place of a module with other tensors: a clone of it, or itself where no clone can stand for it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from fdp._execution.guards import refuse_beside
from fdp._execution.process_lock import exclusively
from fdp._placement.slot import IN_PLACE
from fdp._placement.transfer_log import differences
from fdp._transforms.batch_norm_warning import say_once, say_own
from fdp._trees import torch_private
from fdp.nn._clone import Clone, clone
from fdp.nn._recipe import Recipe
from fdp.nn._tree import Attributes

Tensors: TypeAlias = dict[str, Tensor]

_SAID: dict[int, Any] = {}
_WHAT_FOLLOWS = (
    "What forward writes to its attributes stays, and activation checkpointing in it would compute with the module's "
    "own tensors in the backward. Remove what leads back to the module, or keep that outside of it"
)


def stand_in(
    module: nn.Module, recipe: Recipe, states: Sequence[Attributes], given: dict[str, Any]
) -> contextlib.AbstractContextManager[Clone]:
    """As a context: what stands for the module with tensors under names of it; its own stand for those left out.

    Afterwards the dict has what is under the names of its buffers by then; other buffers are the module's.
    """
    if recipe.takes_own_statistics():
        say_own(module)
    if (why := recipe.in_place) is None:
        return _clone(recipe, states, given)
    refuse_beside(
        "a module that can only be called in place",
        f"because {why}, and others would call it meanwhile. Pass executor='sequential', or remove what leads back",
    )
    if differences() is None:
        text = f"Calls of this {type(module).__name__} run on the module itself, one at a time: {why}. {_WHAT_FOLLOWS}"
        say_once(_SAID, module, text, UserWarning)
    return _in_place(module, given)


@contextlib.contextmanager
def _clone(recipe: Recipe, states: Sequence[Attributes], given: dict[str, Any]) -> Iterator[Clone]:
    names, tensors = recipe.usual, {None: None, **given}
    if [*given] != [*names]:
        names = {recipe.names[name]: name for name in given}
        tensors = {None: None, **recipe.own(states), **{name: given[own] for name, own in names.items()}}
    elif recipe.unnamed:
        tensors |= {place: states[place[0]][place[1]][place[2]] for _, place in recipe.unnamed}
    made = clone(recipe, states, tensors)
    try:
        yield made
    finally:
        for name, i, key, is_first in recipe.buffer_slots:
            now = vars(made.modules[i])["_buffers"].get(key, _GONE)
            if name not in names:
                if now is not tensors[name] and now is not _GONE:
                    states[i]["_buffers"][key] = now
            elif is_first and now is _GONE:
                del given[names[name]]
            elif is_first:
                given[names[name]] = now


_GONE = object()


@contextlib.contextmanager
def _in_place(module: nn.Module, given: dict[str, Any]) -> Iterator[Clone]:
    """Tensors are swapped inside the user's module, under a lock. A thread that waits for others here waits forever."""
    # In the order of a stack: where one module has two names, what is put back last must be its own tensors.
    swap = torch_private.reparametrize_module(module, given, tie_weights=True, strict=False, stack_weights=True)
    with exclusively(), swap:
        token = IN_PLACE.set(True)
        try:
            yield Clone([module])
        finally:
            IN_PLACE.reset(token)
