"""Leaves as tables: what a call does to each, and where each lives."""

import dataclasses
from collections.abc import Callable, Sequence

from fdp._placement.planned_leaf import PlannedLeaf
from fdp._trees.printed import Drawn, runs_text, size_text, table

_NUMBERS = ("bytes per slot", "copies")
_COLUMNS: dict[str, Callable[[PlannedLeaf], str]] = {
    "leaf": lambda leaf: leaf.path or "(all)",
    "tensor": lambda leaf: leaf.kind,
    "how": lambda leaf: leaf.how,
    "rows": lambda leaf: "" if leaf.rows is None else runs_text(leaf.rows),
    "on": lambda leaf: "" if leaf.dtype is None and leaf.rows is None else runs_text(leaf.devices),
    "bytes per slot": lambda leaf: runs_text(map(size_text, leaf.nbytes)) if leaf.dtype or any(leaf.nbytes) else "",
    "copies": lambda leaf: f"{leaf.copies} ({size_text(leaf.copied)})" if leaf.copies else "",
}


def table_of(title: str, leaves: Sequence[PlannedLeaf], but: str = "") -> str:
    """What is said of leaves, `but` for one column."""
    columns = {name: say for name, say in _COLUMNS.items() if name != but}
    return table(title, list(columns), [[say(leaf) for say in columns.values()] for leaf in leaves], _NUMBERS)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Picture(Drawn):
    """What `visualize` returns: it prints itself.

    Attributes:
        title: What it shows, in a line.
        leaves: Each leaf, as a `PlannedLeaf`.
    """

    title: str
    leaves: tuple[PlannedLeaf, ...]

    def __str__(self) -> str:
        return table_of(self.title, self.leaves)
