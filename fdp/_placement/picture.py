"""Leaves as tables: what a call does to each, and where each lives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp._placement.planned_leaf import PlannedLeaf
from fdp._trees.table import Drawn, bar, colors, runs_text, size_text, table

_WIDEST = 36  # a bar that is wider than this is written as numbers


def table_of_plan(title: str, leaves: Sequence[PlannedLeaf]) -> Any:
    """What a call does to leaves."""
    numbers = ["bytes per slot", "copies"]
    return table(title, ["leaf", "tensor", "how", "rows", *numbers], map(_planned, leaves), numbers)


def _planned(leaf: PlannedLeaf) -> list[str]:
    kind = leaf.kind if leaf.dtype is not None else ""
    rows = "" if leaf.rows is None else runs_text(leaf.rows)
    nbytes = runs_text(map(size_text, leaf.nbytes)) if any(leaf.nbytes) else ""
    copies = f"{leaf.copies} ({size_text(leaf.copied)})" if leaf.copies else ""
    return [leaf.path, kind, leaf.how, rows, nbytes, copies]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Picture(Drawn):
    """What `visualize` returns: it prints itself.

    Attributes:
        title: What it shows, in a line.
        leaves: Each leaf, as a `PlannedLeaf`.
    """

    title: str
    leaves: tuple[PlannedLeaf, ...]

    def drawing(self) -> Any:
        color_of = colors(device for leaf in self.leaves for device in leaf.devices)
        rows = [_placed(leaf, color_of) for leaf in self.leaves]
        return table(self.title, ["leaf", "tensor", "where", "bytes"], rows, ["bytes"])


def _placed(leaf: PlannedLeaf, color_of: Callable[[torch.device], str]) -> list[Any]:
    from rich.text import Text

    path, how = leaf.path or "(all)", leaf.how.removeprefix("split along ").removeprefix("split by ")
    if leaf.rows is not None:
        where = bar([(i, n, d) for i, (n, d) in enumerate(zip(leaf.rows, leaf.devices, strict=True))], color_of)
        if where.cell_len > _WIDEST:
            where = Text(f"rows {runs_text(leaf.rows)} along")
        where.append(f" {how}")
        nbytes = sum(leaf.nbytes)
        return [path, leaf.kind, where, "" if leaf.dtype is None and nbytes == 0 else size_text(nbytes)]
    if leaf.dtype is None:
        return [path, leaf.kind, how, ""]
    where = Text(how + " on " * bool(how))
    for i, device in enumerate(dict.fromkeys(leaf.devices)):
        count = leaf.devices.count(device)
        where.append(", " * (i > 0)).append(f"{device}" + f" x {count}" * (count > 1), style=color_of(device))
    return [path, leaf.kind, where, runs_text(map(size_text, leaf.nbytes))]
