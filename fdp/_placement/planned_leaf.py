"""One leaf as it is shown: by `explain`, with what a call does to it, and by `visualize`, with where it is."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._placement.check_outputs import JOINS
from fdp._placement.join import resolve_specs
from fdp._placement.transfer_log import Transfer, nbytes_of
from fdp._trees.printed import dtype_text
from fdp._trees.tree import flatten, leaves_up_to, tensors_in
from fdp._trees.types import AUTO, Dims, Tree


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One leaf of the arguments or the output of a call, or of a tree that `visualize` shows.

    Attributes:
        path: Where it stands: `"inputs[0]['x']"`.
        dtype: None if it is no tensor.
        shape: That of the whole. Of an output, when it is joined; None where it becomes a list, differs between slots
            that have one of their own, or is no tensor.
        how: What happens to it: `"split along dim 0"`, `"whole"`, `"concatenated along dim 0"`, `"mean"`, ...
        rows: Rows on each slot, None if it is not split.
        nbytes: Bytes on each slot. Slots that share a device share what is whole.
        copies: How many copies to other devices are made of it.
        copied: The bytes of these.
        kind: What it is, in words: `"float32[3, 2]"`, `"str"`.
        devices: The device of each slot.
    """

    path: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    how: str
    rows: tuple[int, ...] | None
    nbytes: tuple[int, ...]
    copies: int = 0
    copied: int = 0
    kind: str = ""
    devices: tuple[torch.device, ...] = ()

    def with_copies(self, copies: Sequence[Transfer]) -> "PlannedLeaf":
        """With those that are of it, or of what is inside it."""
        inside = f"{self.path}[", f"{self.path}."
        mine = [copy.nbytes for copy in copies if copy.path == self.path or copy.path.startswith(inside)]
        return dataclasses.replace(self, copies=len(mine), copied=sum(mine))

    def as_gradient(self) -> "PlannedLeaf":
        """What is said of the gradient of this leaf of the arguments."""
        how = _GRADIENTS.get(self.how, self.how.replace("split", "concatenated"))
        return dataclasses.replace(self, path=f"grad of {self.path}", how=how)


_GRADIENTS = {
    "whole": "sum",
    "there, as a Replicated": "sum, on each slot",
}


def planned(
    path: str,
    values: Sequence[Any],
    devices: tuple[torch.device, ...],
    how: str,
    rows: tuple[int, ...] | None = None,
    shape: Sequence[int] | None = None,
) -> PlannedLeaf:
    """A leaf of which each slot has a value; `shape` is that of the whole, if it is known."""
    nbytes = tuple([sum(map(nbytes_of, tensors_in(value))) for value in values])
    first = values[0]
    if not all(isinstance(value, Tensor) for value in values):
        return PlannedLeaf(path, None, None, how, rows, nbytes, kind=type(first).__name__, devices=devices)
    shapes = list(dict.fromkeys([tuple(value.shape) for value in values])) if shape is None else [tuple(shape)]
    kind = dtype_text(first.dtype) + " + ".join([str(list(each)) for each in shapes])
    known = shapes[0] if len(shapes) == 1 else None
    return PlannedLeaf(path, first.dtype, known, how, rows, nbytes, kind=kind, devices=devices)


def on_slots(
    shards: Sequence[Tree], devices: tuple[torch.device, ...], sizes: tuple[int, ...] | None, dims: Any, name: str
) -> Iterator[PlannedLeaf]:
    """The leaves of trees of which each slot has one."""
    flats = [flatten(shard, name, None if dims is AUTO else dims) for shard in shards]
    if any(flat.structure != flats[0].structure for flat in flats):  # what a function returned on each
        for i, (shard, device) in enumerate(zip(shards, devices, strict=True)):
            yield from on_slots([shard], (device,), None, AUTO, f"{name}[{i}]")
        return
    for i, spec in enumerate(flats[0].specs):
        values, path = [flat.leaves[i] for flat in flats], flats[0].path(i)
        first, shape = values[0], None
        if spec == "items":
            yield planned(path, values, devices, "split by items", sizes)
        elif isinstance(spec, int) and isinstance(first, Tensor) and first.ndim > 0:
            if sizes is not None:
                shape = list(first.shape)
                shape[spec] = sum(sizes)
            yield planned(path, values, devices, f"split along dim {spec}", sizes, shape)
        else:
            yield planned(path, values, devices, "each its own" if dims is AUTO else "whole")


def of_outputs(
    shards: Sequence[Tree], joined: Tree, dims: Dims, copies: Sequence[Transfer], name: str = "out"
) -> Iterator[PlannedLeaf]:
    """What shards have returned, and becomes the leaves of what is `joined`."""
    flats = [flatten(shard, name, dims, "aux_dims" if name == "aux" else "out_dims", "explain") for shard in shards]
    resolve_specs(flats[0])
    for i, (whole, spec) in enumerate(zip(leaves_up_to(flats[0].structure, joined), flats[0].specs, strict=True)):
        values = [flat.leaves[i] for flat in flats]
        is_tensor, rows = isinstance(values[0], Tensor), None
        how = "that of slot 0" if spec is None else JOINS.get(spec, f"concatenated along dim {spec}")
        if not is_tensor and spec not in ("list", "items"):
            how = "one for all"
        elif is_tensor and type(spec) is int:
            rows = tuple(value.shape[spec] for value in values)
        leaf = planned(flats[0].path(i), values, (), how, rows, whole.shape if isinstance(whole, Tensor) else None)
        if not isinstance(whole, Tensor):
            leaf = dataclasses.replace(leaf, dtype=None, shape=None, kind=type(whole).__name__)
        yield leaf.with_copies(copies)
