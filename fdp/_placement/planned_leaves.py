"""What a plan says of each leaf, from what a call on tensors without data has shown."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from fdp._placement.leaf_plan import LeafPlan, PlannedLeaf
from fdp._placement.partition import Partition
from fdp._placement.transfers import Transfer, nbytes_of
from fdp._trees.tree import flatten, leaves_up_to, tensors_in
from fdp._trees.types import Dims, Tree


def of_arguments(
    leaves: Sequence[LeafPlan], values: Sequence[Any], shares: Partition, copies: Sequence[Transfer]
) -> Iterator[PlannedLeaf]:
    """What becomes of leaves of the arguments, with the copies that are made of them."""
    for leaf, value in zip(leaves, values, strict=True):
        for planned in leaf.planned(value, shares):
            yield _with_copies(planned, copies)


def of_gradients(
    leaves: Sequence[LeafPlan], values: Sequence[Any], shares: Partition, copies: Sequence[Transfer]
) -> Iterator[PlannedLeaf]:
    """The gradients of leaves."""
    for leaf in of_arguments(leaves, values, shares, ()):
        how = _GRADIENTS.get(leaf.how, leaf.how.replace("split", "concatenated"))
        yield _with_copies(dataclasses.replace(leaf, path=f"grad of {leaf.path}", how=how), copies)


_GRADIENTS = {
    "whole": "sum",
    "there, as a Replicated": "sum, on each slot",
    "there, as a Sharded": "each slot its own",
}


def _with_copies(leaf: PlannedLeaf, copies: Sequence[Transfer]) -> PlannedLeaf:
    inside = f"{leaf.path}[", f"{leaf.path}."
    mine = [copy.nbytes for copy in copies if copy.path == leaf.path or copy.path.startswith(inside)]
    return dataclasses.replace(leaf, copies=len(mine), copied=sum(mine)) if mine else leaf


def of_outputs(
    shards: Sequence[Tree], joined: Tree, dims: Dims, copies: Sequence[Transfer], name: str = "out"
) -> Iterator[PlannedLeaf]:
    choices = "aux_dims" if name == "aux" else "out_dims"
    flats = [flatten(shard, name, dims, choices, "explain") for shard in shards]
    for i, (whole, spec) in enumerate(zip(leaves_up_to(flats[0].structure, joined), flats[0].specs, strict=True)):
        values = [flat.leaves[i] for flat in flats]
        spec = (spec(values[0]) if isinstance(values[0], Tensor) else 0) if callable(spec) else spec
        is_tensor = isinstance(values[0], Tensor)
        rows = tuple(value.shape[spec] for value in values) if is_tensor and type(spec) is int else None
        how = (
            _JOINED.get(spec, f"concatenated along dim {spec}")
            if is_tensor or spec in ("list", "items")
            else "one for all"
        )
        shape = tuple(whole.shape) if isinstance(whole, Tensor) else None
        dtype = whole.dtype if isinstance(whole, Tensor) else None
        nbytes = tuple([sum(map(nbytes_of, tensors_in(value))) for value in values])
        yield _with_copies(PlannedLeaf(flats[0].path(i), dtype, shape, how, rows, nbytes, 0, 0), copies)


_JOINED = {
    None: "that of slot 0",
    "items": "lists joined",
    "mean": "mean by rows",
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "stack": "stacked",
    "list": "a list",
}
