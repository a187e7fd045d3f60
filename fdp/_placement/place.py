"""From arguments to shards: the tree of each slot."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from fdp._placement.moves import Memo, accumulator, copy, copy_once, split, to_device
from fdp._placement.partition import Partition
from fdp._placement.plan import PlannedArgument
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Slots
from fdp._placement.split_dims import flatten_args, rows_of
from fdp._trees.tree import Flat, unflatten
from fdp._trees.types import AUTO, Tree


def planned(flat: Flat, plan: Partition) -> PlannedArgument:
    """How an argument is placed."""
    places = [
        i
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if spec is not None or isinstance(leaf, Slots) or _moves(leaf, plan)
    ]
    name = "replicate" if all(spec is None for spec in flat.specs) else "scatter"
    are_whole = all(spec is None for spec in flat.specs) and _TENSORS.issuperset(map(type, flat.leaves))
    gradients = [_gradient(leaf) for leaf in flat.leaves] if are_whole else None
    return PlannedArgument(name, flat.specs, places, any(_moves(leaf, plan) for leaf in flat.leaves), gradients)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def _gradient(leaf: torch.Tensor) -> tuple[Any, ...] | None:
    """What the gradient of a leaf usually is."""
    is_same = accumulator(leaf.dtype) is leaf.dtype
    return (leaf.dtype, leaf.device, torch.strided, False) if is_same else None


def _moves(leaf: Any, plan: Partition) -> bool:
    return isinstance(leaf, torch.Tensor) and any(device != leaf.device for device in plan.devices)


def place(
    flat: Flat,
    plan: Partition,
    memo: Memo,
    by_rows: Mapping[int, Partition] | None = None,
    how: PlannedArgument | None = None,
) -> list[Tree]:
    """The tree of each shard. A tensor that stands in several places is moved once and stays one tensor.

    Where tensors differ in their rows, `by_rows` has the plan for each number of them. `how` is what was planned.
    """
    leaves = flat.leaves
    places = range(len(leaves)) if how is None else how.places
    if not places:
        return [unflatten(flat.structure, leaves) for _ in plan.slots]
    stays, columns = how is not None and not how.moves, []
    for i in places:
        leaf, spec = leaves[i], flat.specs[i]
        part = plan if by_rows is None else by_rows.get(rows_of(leaf, spec), plan)
        columns.append(_cut(leaf, spec, part, flat, i, memo, stays))
    if len(columns) == len(leaves):
        return [unflatten(flat.structure, own) for own in zip(*columns, strict=True)]
    shards = [leaves.copy() for _ in plan.slots]
    for i, column in zip(places, columns, strict=True):
        for shard, value in zip(shards, column, strict=True):
            shard[i] = value
    return [unflatten(flat.structure, own) for own in shards]


def _cut(leaf: Any, spec: Any, plan: Partition, flat: Flat, index: int, memo: Memo, stays: bool) -> Sequence[Any]:
    """What each shard gets of a leaf, which may be known to stay on its device."""
    if isinstance(leaf, torch.Tensor):
        if spec is None or plan.sizes is None or len(plan.slots) == 1:
            return [copy_once(leaf, device, flat, index, memo) for device in plan.devices]
        if torch.compiler.is_compiling():
            return _pieces(leaf, spec, plan, flat, index, stays)  # an id would become a guard on this very tensor
        key = (id(leaf), spec)
        found = memo.get(key)
        if found is None:
            found = memo[key] = _pieces(leaf, spec, plan, flat, index, stays)
        return found
    if isinstance(leaf, Slots):
        return _cut_slots(leaf, spec, plan, flat.path(index))
    if spec == "items" and plan.sizes is not None:
        path = flat.path(index)
        ranges = [rows for rows in map(plan.rows, range(len(plan.slots))) if rows is not None]
        return [
            to_device(leaf[rows.start : rows.stop], device, f"{path}[{rows.start}:{rows.stop}]", memo)
            for rows, device in zip(ranges, plan.devices, strict=True)
        ]
    return [leaf] * len(plan.slots)


def _pieces(
    tensor: torch.Tensor, dim: int, plan: Partition, flat: Flat, index: int, stays: bool
) -> Sequence[torch.Tensor]:
    assert plan.sizes is not None
    parts = split(tensor, plan.sizes, dim)
    if stays or plan.devices.count(tensor.device) == len(plan.devices):
        return parts
    return [copy(part, device, flat, index) for part, device in zip(parts, plan.devices, strict=True)]


def _cut_slots(slots: Slots, spec: Any, plan: Partition, path: str) -> list[Tree]:
    whole = all(a != b for a, b in pairwise(plan.slots))
    if whole or isinstance(slots, Replicated) or plan.sizes is None:
        return [slots.shards[slot] for slot in plan.slots]
    dims = spec if slots.dims is AUTO else slots.dims
    shards: list[Tree] = []
    for slot in dict.fromkeys(plan.slots):
        pieces = [i for i, s in enumerate(plan.slots) if s == slot]
        part = Partition(
            tuple(plan.slots[i] for i in pieces),
            tuple(plan.devices[i] for i in pieces),
            tuple(plan.sizes[i] for i in pieces),
        )
        shards += place(flatten_args([(path, slots.shards[slot], dims, "in_dims")], "microbatches")[0], part, {})
    return shards
