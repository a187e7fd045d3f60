"""Which process has which rows, once all have agreed on a call."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from fdp._placement.slot import Slot


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
