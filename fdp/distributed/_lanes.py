"""What is sent in one step of a known plan: sums, and a note of every process, in the same buffers.

A lane is a group of torch.distributed in which buffers of one layout are added up, and nothing else. gloo ends a
process that receives more than it expects, and takes less for all of it: so what differs in size must not meet.

Invariant: all processes begin as many steps in each lane. Who has nothing to add, since it has failed, has to talk, or
is elsewhere, takes part with zeros. Zeros are no note: so all see that it did not come, and meet where they agree in
full. Who is elsewhere learns that others wait in a lane from the store of the group: who waits longer than a second
writes there for which operation, and looks whether it owes one (`Lanes.help`). There is no lock: one thread of a
process is in a call, and only that waits.
"""

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from fdp._placement.moves import bytes_of
from fdp.distributed._buckets import Packing
from fdp.distributed._communicator import Communicator
from fdp.distributed._underway import begun_in, leave, where_others_wait

_MOST = 8  # lanes of a group; the oldest goes first
_FORM = struct.Struct("<Qddd")
_PIECES = {torch.bfloat16: torch.int8, torch.float32: torch.int16, torch.float64: torch.int32}
"""As which integers a note travels among sums of floats: each is exact, and the other processes add zero to it."""


class Header(NamedTuple):
    """What a process says in a step: its call, what it counts in the loss and in aux, and its part of the value."""

    call: int
    weight: float
    aux_weight: float
    value: float


@final
class Lane:
    """A group for buffers of one layout."""

    def __init__(self, comm: Communicator, packing: Packing) -> None:
        self.comm: Communicator = comm
        self.is_open: bool = True
        self._zeros = packing.zeros
        self._begun = 0

    @property
    def begun(self) -> int:
        """How many operations: so many buffers a step, also where Ctrl-C came between two of them."""
        return self._begun if self.comm.group is None else begun_in(self.comm.group) or self._begun

    def begin_sum(self, flat: Tensor, name: str) -> Callable[[], None]:
        """Add up a buffer, the next one of a step."""
        self._begun += 1
        return self.comm.begin_sum(flat, name)

    def begin(
        self, name: str, note: Header, flats: Sequence[Tensor], room: Tensor, waits: Sequence[Callable[[], None]] = ()
    ) -> Callable[[], list[Header]]:
        """Add up buffers, in which there is `room` for notes; what is returned waits for those of all processes.

        The first are on their way if there is something that `waits` for them.
        """
        form = _PIECES[room.dtype]
        own = torch.frombuffer(bytearray(_FORM.pack(*note)), dtype=form)
        room.view(len(self.comm.ranks), -1)[self.comm.position].copy_(own)
        rest = [self.begin_sum(flat, name) for flat in flats[len(waits) :]]

        def finish() -> list[Header]:
            for wait in (*waits, *rest):
                wait()
            return [Header(*each) for each in _FORM.iter_unpack(bytes_of(room.to("cpu", form)))]

        return finish

    def begin_with_nothing(self, name: str) -> None:
        """Take part in a step, or in the rest of one that has been left, so that nobody waits for this process."""
        zeros = self._zeros()
        for flat in zeros[self.begun % len(zeros) :]:
            self.begin_sum(flat, name)


@final
class Lanes:
    """The lanes between some processes."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._open: dict[Any, Lane] = {}

    def lane(self, packing: Packing) -> Lane:
        """That of a layout; all processes ask for it together."""
        key = tuple(packing.sizes)
        if key not in self._open:
            if len(self._open) == _MOST:
                oldest = self._open.pop(next(iter(self._open)))
                oldest.is_open = False
                if oldest.comm is not self._comm:
                    leave(oldest.comm.group)
            self._open[key] = Lane(self._comm.beside(), packing)
            self._open[key].comm.meanwhile = self.help
        return self._open[key]

    def begun(self) -> list[int]:
        """How many operations this process has begun in each lane."""
        return [begun_in(lane.comm.group) for lane in self._open.values() if lane.comm is not self._comm]

    def catch_up(self, counts: Sequence[Sequence[int]]) -> None:
        """Take part in what others have begun in lanes and nobody waits for, such as their part in a call that failed.

        All processes do so together, with the counts of all.
        """
        lanes = [lane for lane in self._open.values() if lane.comm is not self._comm]
        for lane, each in zip(lanes, zip(*counts, strict=True), strict=True):
            while begun_in(lane.comm.group) < max(each):
                lane.begin_with_nothing("another call")

    def help(self) -> None:
        """Take part in what others wait for in lanes, and this process has not begun."""
        lanes = [lane for lane in self._open.values() if lane.comm is not self._comm]
        for i in where_others_wait([lane.comm.group for lane in lanes], self._comm.ranks, self._comm.rank):
            lanes[i].begin_with_nothing("another call")


def room_for_notes(count: int) -> int:
    """Bytes that the notes of so many processes take."""
    return 2 * _FORM.size * count


_LANES: "weakref.WeakKeyDictionary[Any, Lanes]" = weakref.WeakKeyDictionary()


def lanes_of(comm: Communicator) -> Lanes:
    """Those of a group: all meshes on it have the same."""
    lanes = _LANES.setdefault(comm.group or dist.group.WORLD, Lanes(comm))
    comm.meanwhile, comm.begun, comm.catch_up = lanes.help, lanes.begun, lanes.catch_up
    return lanes
