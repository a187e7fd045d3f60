"""What a backward holds on to, so that it comes to each collective of the function that is differentiated.

Slots meet in a backward as they met before. Autograd comes only to what leads from the loss to the inputs, and that may
not be the same in all slots: one takes another branch, or does not use a result. So each collective takes one more
input, without elements, and has one more output. A backward that begins at these too, beside the loss, and ends at that
input too, comes to all collectives.
"""

import contextvars
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from fdp._placement.slot import AXES
from fdp._trees import torch_private

T = TypeVar("T")


@final
class Anchor:
    """One more input of a function that is differentiated, beside others, and what its collectives have made of it."""

    def __init__(self, start: Tensor | None, inputs: Sequence[Tensor] = ()) -> None:
        self.start, self.inputs = start, inputs  # no start where there is nobody to meet
        self._ends: list[Tensor] = []

    def ends(self) -> list[Tensor]:
        """What is made of it. Where a transform of torch.func inside the function wrapped it, what is inside."""
        return [torch_private.unwrap_if_dead(x) for x in self._ends]

    def add(self, end: Tensor) -> None:
        """Keep what a collective has made of it."""
        self._ends.append(end)

    def is_passed(self, made: Iterable[Tensor]) -> bool:
        """Whether something is made of a leaf outside of the function, which is not one of the inputs."""
        inputs = set(map(id, self.inputs if self.start is None else (*self.inputs, self.start, *starts())))
        todo: list[Any] = [tensor.grad_fn for tensor in made]
        seen: set[Any] = {None}
        for node in todo:  # which grows meanwhile
            if node in seen:
                continue
            seen.add(node)
            parents = node.next_functions
            for parent, _ in parents:
                todo.append(parent)
            if not parents:  # the nodes of leaves, and few others
                variable = getattr(node, "variable", None)
                if variable is not None and id(variable) not in inputs and not hasattr(variable, _STANDS_IN):
                    return True
        return False

    def within(self, call: Callable[[], T], *, around: bool = True) -> T:
        """What the function returns; `around`: its collectives belong to functions around it as well."""
        if torch.compiler.is_compiling():
            return call()
        before = None if self.start is None else ANCHORS.set((*(ANCHORS.get() if around else ()), self))
        outside = DIFFERENTIATED.set((*DIFFERENTIATED.get(), *self.inputs))
        try:
            return call()
        finally:
            if before is not None:
                ANCHORS.reset(before)
            DIFFERENTIATED.reset(outside)


ANCHORS: contextvars.ContextVar[tuple[Anchor, ...]] = contextvars.ContextVar("fdp_anchors", default=())
"""Of the gradient functions around this code, in its own slot: each slot has a graph of its own."""

DIFFERENTIATED: contextvars.ContextVar[tuple[Tensor, ...]] = contextvars.ContextVar("fdp_differentiated", default=())
"""What all gradient functions around this code differentiate in, those around its slot too: code may close over it."""


def are_from_outside(made: Sequence[Tensor]) -> Callable[[], bool]:
    """What says whether something is made of a leaf outside of the innermost function that is differentiated here."""
    anchors = ANCHORS.get()
    return partial(anchors[-1].is_passed, made) if anchors else lambda: True


_STANDS_IN = "stands_in_for_fdp"


def leaf_like(x: Tensor) -> Tensor:
    """A leaf with the values of a tensor that needs no gradient: where it stands, slots meet in a backward."""
    leaf = x.detach().requires_grad_()
    setattr(leaf, _STANDS_IN, True)
    return leaf


def no_elements() -> Tensor:
    """A tensor to begin with."""
    return torch.zeros(0, device="cpu")


def may_meet() -> bool:
    """Whether collectives here have somebody to meet: all slots of some call around this code are alive."""
    return any(axis.rendezvous is not None for axis in AXES.get())


def starts() -> list[Tensor]:
    """What a collective takes more, for each function that is differentiated here."""
    return [anchor.start for anchor in ANCHORS.get() if anchor.start is not None]


def add_ends(ends: Sequence[Tensor]) -> None:
    """Keep what a collective has made of it."""
    for anchor, end in zip(ANCHORS.get(), ends, strict=True):
        anchor.add(end)
