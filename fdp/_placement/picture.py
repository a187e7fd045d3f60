"""Where the leaves of trees live, as tables."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.transfers import nbytes_of
from fdp._trees.table import Drawn, bar, colors, dtype_text, runs_text, size_text, table
from fdp._trees.tree import Flat, flatten, tensors_in
from fdp._trees.types import AUTO, Tree

_WIDEST = 36  # a bar that is wider than this is written as numbers


class Row(NamedTuple):
    """One leaf: how it is split, if that is known, and what each slot has of it."""

    path: str
    values: tuple[Any, ...]
    split: str
    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Picture(Drawn):
    """What `visualize` returns: it prints itself.

    Attributes:
        title: What it shows, in a line.
        rows: One for each leaf: its path, its value on every slot, how it is split, the device of every slot, and the
            rows on every slot where it is split.
    """

    title: str
    rows: tuple[Row, ...]

    def drawing(self) -> Any:
        color_of = colors(device for row in self.rows for device in row.devices)
        return table(
            self.title, ["leaf", "tensor", "where", "bytes"], [_cells(row, color_of) for row in self.rows], ["bytes"]
        )


def _cells(row: Row, color_of: Callable[[torch.device], str]) -> list[Any]:
    from rich.text import Text

    tensors = [value for value in row.values if isinstance(value, torch.Tensor)]
    path = row.path or "(all)"
    if len(tensors) < len(row.values) and row.sizes is None:
        return [path, type(row.values[0]).__name__, row.split, ""]
    if row.sizes is not None:
        where = bar([(i, n, d) for i, (n, d) in enumerate(zip(row.sizes, row.devices, strict=True))], color_of)
        if where.cell_len > _WIDEST:
            where = Text(f"rows {runs_text(row.sizes)} along")
        where.append(f" {row.split}")
    else:
        where = Text(row.split + " on " * bool(row.split))
        for i, device in enumerate(dict.fromkeys(row.devices)):
            count = row.devices.count(device)
            where.append(", " * (i > 0)).append(f"{device}" + f" x {count}" * (count > 1), style=color_of(device))
    if not tensors:  # lists, split by their items
        within = sum(map(nbytes_of, tensors_in(row.values)))
        return [path, type(row.values[0]).__name__, where, size_text(within) if within else ""]
    sizes = [nbytes_of(tensor) for tensor in tensors]
    nbytes = runs_text(map(size_text, sizes)) if row.sizes is None else size_text(sum(sizes))
    return [path, f"{dtype_text(tensors[0].dtype)}{shape_of(row, tensors)}", where, nbytes]


def shape_of(row: Row, tensors: Sequence[torch.Tensor]) -> str:
    """The shape of the whole, where that is known, else those of the slots."""
    shape = list(tensors[0].shape)
    if row.sizes is not None and row.split.startswith("dim "):
        shape[int(row.split.removeprefix("dim "))] = sum(row.sizes)
        return str(shape)
    return " + ".join(dict.fromkeys(str(list(tensor.shape)) for tensor in tensors))


def rows_of_slots(
    shards: Sequence[Tree],
    devices: tuple[torch.device, ...],
    sizes: tuple[int, ...] | None,
    dims: Any,
    name: str,
) -> Iterator[Row]:
    """The leaves of a tree that each slot has one of."""
    known = dims is not AUTO
    flats = [flatten(shard, name, dims if known else None) for shard in shards]
    if any(flat.structure != flats[0].structure for flat in flats):  # what a function returned on each
        for i, (shard, device) in enumerate(zip(shards, devices, strict=True)):
            yield from rows_of_slots([shard], (device,), None, AUTO, f"{name}[{i}]")
        return
    for i, spec in enumerate(flats[0].specs):
        values = tuple(flat.leaves[i] for flat in flats)
        has_rows = isinstance(values[0], torch.Tensor) and values[0].ndim > 0
        if spec == "items" or (isinstance(spec, int) and has_rows):
            split = "items" if spec == "items" else f"dim {spec}"
            yield Row(flats[0].path(i), values, split, devices, sizes)
        else:
            yield Row(flats[0].path(i), values, "whole" if known else "each its own", devices)


def rows_of_tree(flat: Flat) -> Iterator[Row]:
    """The leaves of a tree that is in one piece."""
    for i, leaf in enumerate(flat.leaves):
        yield Row(flat.path(i), (leaf,), "", (leaf.device,) if isinstance(leaf, torch.Tensor) else ())
