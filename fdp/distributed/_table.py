"""Which process has which rows, and the slots of this process among all."""

from typing import Any, NamedTuple, final

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
    def rows(self) -> int:
        """Those of all processes."""
        return sum(map(sum, self.sizes))

    @property
    def before(self) -> tuple[int, int]:
        """The shards and the rows of the processes before this one."""
        return sum(self.counts[: self.rank]), sum(map(sum, self.sizes[: self.rank]))


@final
class MeshSlot(Slot):
    """A slot that asks the other processes when its place among all slots is wanted: most steps do not want it."""

    def __init__(self, own: Slot, most: int, rank: int, call: Any) -> None:
        known = {"device": own.device, "axis_name": own.axis_name, "piece": own.piece}
        vars(self).update(known, _own=own, _most=most, _rank=rank, _call=call)

    def __getattr__(self, name: str) -> Any:  # what is not there yet
        if name not in ("index", "count", "rows"):
            raise AttributeError(name)
        own, table = vars(self)["_own"], vars(self)["_call"].asked()
        first, row = table.before
        rows = None if own.rows is None else range(row + own.rows.start, row + own.rows.stop)
        vars(self).update(index=first + own.index, count=sum(table.counts), rows=rows)
        return vars(self)[name]

    @property
    def here(self) -> int:
        return vars(self)["_own"].index

    @property
    def at_most(self) -> int:
        return vars(self)["_most"]

    def __str__(self) -> str:
        known = vars(self)
        has_place = "index" in known or known["_call"].is_known
        return super().__str__() if has_place else f"{known['_own']}, of process {known['_rank']}"
