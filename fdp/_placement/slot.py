"""A slot: the place of a running shard, and the axes that the code in it can ask about.

A shard runs in a copy of its caller's context, so what is noted in context variables ends with it, and reaches the
threads that run nested calls. A thread that the function starts itself has none of it, unless it copies the context.
"""

import contextvars
import dataclasses
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a running shard: which one of how many, its rows, its device, and which piece of it runs."""

    index: int
    count: int
    rows: range | None
    device: torch.device
    axis_name: str
    piece: int | None = None

    @property
    def here(self) -> int:
        """Its number in this process."""
        return self.index

    @property
    def at_most(self) -> int:
        """How many there are at most, which other processes are not asked."""
        return self.count

    def __str__(self) -> str:
        piece = "" if self.piece is None else f", microbatch {self.piece}"
        rows = "" if self.rows is None else f", rows {self.rows.start}:{self.rows.stop}"
        axis = "" if self.axis_name == "data" else f" of axis {self.axis_name!r}"
        return f"in shard {self.index} of {self.count}{axis}{piece}{rows}, on {self.device}"


IN_PLACE = contextvars.ContextVar("fdp_in_place", default=False)  # a user's module has other tensors than its own


class Axis(NamedTuple):
    """A named set of slots that this code runs in one of, the run in which they meet, and the thread of this slot."""

    slot: Slot
    run: Any
    thread: int


AXES: contextvars.ContextVar[tuple[Axis, ...]] = contextvars.ContextVar("fdp_axes", default=())  # the innermost last


def current_slot() -> Slot | None:
    """The slot that this code runs in, innermost call first; None outside of mapped functions."""
    # A traced function cannot read context variables.
    axes = () if torch.compiler.is_dynamo_compiling() else AXES.get()
    return axes[-1].slot if axes else None
