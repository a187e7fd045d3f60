"""What all processes have agreed on for a plan: which of them has which rows, and how what they add up is sent."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from fdp._placement.slot import Slot
from fdp.distributed._buckets import Packing
from fdp.distributed._communicator import Communicator
from fdp.distributed._described import Digest
from fdp.distributed._lanes import Lane, lanes_of

_MOST = 64  # plans of a mesh; what was agreed on first goes first
_CHANGES = 4  # after which a plan is agreed on in full each time: a step that is begun anew takes twice as long


class Table(NamedTuple):
    """The rows of every shard of every process."""

    sizes: list[list[int]]
    rank: int

    @property
    def counts(self) -> list[int]:
        """The shards of each process."""
        return [len(each) for each in self.sizes]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that have shards."""
        return tuple(rank for rank, each in enumerate(self.sizes) if each)

    @property
    def is_whole(self) -> bool:
        """Whether all processes have shards."""
        return all(self.sizes)

    @property
    def before(self) -> tuple[int, int]:
        """The shards and the rows of the processes before this one."""
        return sum(self.counts[: self.rank]), sum(map(sum, self.sizes[: self.rank]))

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        """The places of the shards of this process, counted over all."""
        count, (first, row) = sum(self.counts), self.before
        return [
            dataclasses.replace(
                slot,
                index=first + slot.index,
                count=count,
                rows=None if slot.rows is None else range(row + slot.rows.start, row + slot.rows.stop),
            )
            for slot in own
        ]

    def pieces(self, cut: Callable[[int], Sequence[int]]) -> list[int]:
        """The rows of all shards, each cut into pieces."""
        return [piece for each in self.sizes for size in each for piece in cut(size)]


@dataclasses.dataclass
class Agreed:
    """What all processes know of a plan since a call of it in full, which had this number.

    `kind` is what shards return. `whole` is what the loss was a mean over the last time, 1 for a sum.
    """

    call: int
    table: Table
    lane: Lane
    packing: Packing
    kind: Any
    whole: float
    _places: tuple[Any, Sequence[Slot]] = (None, ())

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        """The places of the shards of this process, counted over all."""
        if self._places[0] is not own:
            self._places = own, self.table.places(own)
        return self._places[1]


@final
class AgreedPlans:
    """What has been agreed on, by the digest of a plan: it changes in all processes at once."""

    def __init__(self, comm: Communicator) -> None:
        self._lanes = lanes_of(comm)
        self._plans: dict[Digest, Agreed] = {}
        self._changes: Counter[Digest] = Counter()

    def find(self, digest: Digest) -> Agreed | None:
        found = self._plans.get(digest)
        return found if found is not None and found.lane.is_open else None

    def add(self, digest: Digest, call: int, table: Table, packing: Packing, kind: Any, whole: float) -> Agreed:
        """Keep what all processes have just agreed on, unless it is something else again and again."""
        agreed = Agreed(call, table, self._lanes.lane(packing), packing, kind, whole)
        old = self._plans.pop(digest, agreed)
        self._changes[digest] += (old.kind, old.table.counts) != (kind, table.counts)
        self._plans = {key: each for key, each in self._plans.items() if each.lane.is_open}  # others hold connections
        for first in list(self._plans)[: 1 - _MOST]:
            del self._plans[first]
        if self._changes[digest] < _CHANGES:
            self._plans[digest] = agreed
        return agreed

    def forget(self, digest: Digest) -> None:
        """A call of this plan needs others before its end."""
        self._changes[digest] += self._plans.pop(digest, None) is not None
