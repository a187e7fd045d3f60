"""What a plan says of each leaf, from what a call on tensors without data has shown."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdp._placement.partition import Partition
from fdp._placement.plan import PlannedLeaf
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.transfers import Transfer, nbytes_of
from fdp._trees.tree import Flat, flatten, leaves_up_to, tensors_in
from fdp._trees.types import Dims, Tree


def of_arguments(flat: Flat, shares: Partition, copies: Sequence[Transfer]) -> Iterator[PlannedLeaf]:
    for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
        path = flat.path(i)
        if isinstance(leaf, Slots):
            yield from _held(leaf, path, spec, shares)
        elif not isinstance(leaf, torch.Tensor) and spec != "items":
            yield PlannedLeaf(path, None, None, "by reference", None, (0,) * len(shares.slots), 0, 0)
        else:
            split = shares.sizes if spec is not None else None
            how = "whole" if split is None else "split by items" if spec == "items" else f"split along dim {spec}"
            yield _planned(path, leaf, how, split, _parts(leaf, spec, shares), copies)


def _parts(leaf: Any, spec: Any, shares: Partition) -> list[int]:
    """The bytes that each shard has of a leaf."""
    ranges = [shares.rows(i) for i in range(len(shares.slots))]
    if spec == "items":
        return [_nbytes(leaf if rows is None else leaf[rows.start : rows.stop]) for rows in ranges]
    whole = nbytes_of(leaf)
    if spec is None or shares.sizes is None:
        return [whole] * len(shares.slots)
    return [whole * size // max(1, leaf.shape[spec]) for size in shares.sizes]


def _held(slots: Slots, path: str, spec: Any, shares: Partition) -> Iterator[PlannedLeaf]:
    """The leaves of what is on its slots already."""
    shards = [slots.shards[slot] for slot in shares.slots]
    how = f"there, as a {type(slots).__name__}"
    rows = shares.sizes if isinstance(slots, Sharded) and spec is not None else None
    for leaf, *others in zip(*(_leaves(shard, path) for shard in shards), strict=True):
        values = [value for _, value in (leaf, *others)]
        yield _planned(leaf[0], values[0], how, rows, [_nbytes(value) for value in values], (), whole=rows is None)


def of_gradients(flat: Flat, shares: Partition, copies: Sequence[Transfer]) -> Iterator[PlannedLeaf]:
    for leaf in of_arguments(flat._replace(name=f"grad of {flat.name}"), shares, ()):
        how = _GRADIENTS.get(leaf.how, leaf.how.replace("split", "concatenated"))
        mine = _of_path(leaf.path, copies)
        yield dataclasses.replace(leaf, how=how, copies=len(mine), copied=sum(mine))


_GRADIENTS = {
    "whole": "sum",
    "there, as a Replicated": "sum, on each slot",
    "there, as a Sharded": "each slot its own",
}


def of_outputs(
    shards: Sequence[Tree], joined: Tree, dims: Dims, copies: Sequence[Transfer], name: str = "out"
) -> Iterator[PlannedLeaf]:
    choices = "aux_dims" if name == "aux" else "out_dims"
    flats = [flatten(shard, name, dims, choices, "explain") for shard in shards]
    for i, (whole, spec) in enumerate(zip(leaves_up_to(flats[0].structure, joined), flats[0].specs, strict=True)):
        values = [flat.leaves[i] for flat in flats]
        spec = (spec(values[0]) if isinstance(values[0], torch.Tensor) else 0) if callable(spec) else spec
        is_tensor = isinstance(values[0], torch.Tensor)
        rows = tuple(value.shape[spec] for value in values) if is_tensor and type(spec) is int else None
        how = (
            _JOINED.get(spec, f"concatenated along dim {spec}")
            if is_tensor or spec in ("list", "items")
            else "one for all"
        )
        yield _planned(flats[0].path(i), whole, how, rows, [_nbytes(value) for value in values], copies)


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


def _planned(
    path: str,
    leaf: Any,
    how: str,
    rows: tuple[int, ...] | None,
    nbytes: Sequence[int],
    copies: Sequence[Transfer],
    *,
    whole: bool = True,
) -> PlannedLeaf:
    mine = _of_path(path, copies)
    shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) and whole else None
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else None
    return PlannedLeaf(path, dtype, shape, how, rows, tuple(nbytes), len(mine), sum(mine))


def _of_path(path: str, copies: Sequence[Transfer]) -> list[int]:
    """The bytes of each copy of a leaf."""
    return [copy.nbytes for copy in copies if copy.path == path or copy.path.startswith((f"{path}[", f"{path}."))]


def _leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    flat = flatten(tree, name)
    return [(flat.path(i), leaf) for i, leaf in enumerate(flat.leaves)]


def _nbytes(tree: Tree) -> int:
    return sum(map(nbytes_of, tensors_in(tree)))
