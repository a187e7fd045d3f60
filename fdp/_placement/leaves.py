"""What becomes of each leaf of the arguments: one class for each kind of leaf, all with the same methods.

A plan of a leaf holds no value. It is given the leaf of a call, or of another call with the same signature.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, final

import torch
from torch import Tensor

from fdp._placement.leaf_plan import Home, LeafPlan, Make, not_differentiable
from fdp._placement.moves import Memo, concat, copy, copy_once, split, to_device
from fdp._placement.packing import copy_all
from fdp._placement.partition import Partition
from fdp._placement.peers import ALONE
from fdp._placement.planned_leaf import PlannedLeaf, on_slots
from fdp._placement.replicate import replicate_on
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.split_dims import flatten_args, rows_of
from fdp._trees.tree import Flat, flatten, leaves_up_to, unflatten
from fdp._trees.types import AUTO, Dims, Tree


@final
class TensorPlan(LeafPlan):
    """A tensor: whole on every slot, or split along its dim."""

    def __init__(self, flat: Flat, index: int, value: Tensor, partition: Partition) -> None:
        super().__init__(flat, index, value, partition)
        self.moves = partition.devices.count(value.device) < len(partition.devices)
        self.is_cut = self.dim is not None and partition.sizes is not None
        self.how = f"split along dim {int(self.dim or 0)}" if self.is_cut else "whole"

    def parts(self, value: Tensor, partition: Partition) -> Sequence[Tensor]:
        sizes = partition.sizes
        return split(value, sizes, self.dim) if self.is_cut and sizes else super().parts(value, partition)

    def cut(self, value: Tensor, memo: Memo) -> Sequence[Tensor]:
        devices = self.partition.devices
        if not self.is_cut or len(devices) == 1:
            if not self.moves:
                return [value] * len(devices)
            return [copy_once(value, device, self.flat, self.index, memo) for device in devices]
        key = value, self.dim
        if key in memo:
            return memo[key]
        parts = self.parts(value, self.partition)
        if self.moves:
            pairs = zip(parts, devices, strict=True)
            parts = [copy(part, device, self.flat, self.index) for part, device in pairs]
        memo[key] = parts
        return parts

    def summed(self, value: Tensor) -> Sequence[tuple[Tensor, Flat, int]] | None:
        return [(value, self.flat, self.index)] if self.dim is None else None

    def gradient(self, value: Tensor, sums: Sequence[Tensor], parts: Sequence[Any], home: Home) -> Tree:
        if self.dim is None:
            return sums[0]
        if not parts:  # other processes have all rows
            return torch.zeros_like(value)
        return concat([home(part, value, self.flat, self.index) for part in parts], self.dim)

    def remade(self, value: Tensor, rows: int, make: Make, item: Callable[[Tree, int], Tree]) -> Any:
        return make(value, self.dim)


@final
class ItemsPlan(LeafPlan):
    """A list or tuple whose elements are rows."""

    is_cut, how = True, "split by items"

    def parts(self, value: Any, partition: Partition) -> Sequence[Any]:
        ranges = [partition.rows(i) or range(0) for i in range(len(partition.slots))]
        return [value[rows.start : rows.stop] for rows in ranges]

    def cut(self, value: Any, memo: Memo) -> Sequence[Any]:
        each, path, start = zip(self.parts(value, self.partition), self.partition.devices, strict=True), self.path, 0
        found: list[Any] = []
        for part, device in each:
            found.append(to_device(part, device, f"{path}[{start}:{start + len(part)}]", memo))
            start += len(part)
        return found

    def gradient(self, value: Any, sums: Sequence[Tensor], parts: Sequence[Any], home: Home) -> Tree:
        inner = flatten(value, self.path)
        grads = leaves_up_to(inner.structure, type(value)(chain.from_iterable(parts)))
        moved = [home(grad, inner.leaves[k], inner, k) for k, grad in enumerate(grads)]
        return unflatten(inner.structure, moved)

    def remade(self, value: Any, rows: int, make: Make, item: Callable[[Tree, int], Tree]) -> Any:
        return type(value)([item(value[i % len(value)], i) for i in range(rows)])


@final
class OpaquePlan(LeafPlan):
    """A value that is no tensor, which every shard gets as it is."""

    how = "by reference"


class SlotsPlan(LeafPlan):
    """What is on its slots already."""

    is_cut = True

    def inside(self, value: Slots) -> Tree:
        return value.shards

    def parts(self, value: Slots, partition: Partition) -> Sequence[Any]:
        return [value.shards[slot] for slot in partition.slots]

    def dims(self, value: Slots) -> Dims:
        """Which dims of its shards are split."""
        return self.dim if value.dims is AUTO else value.dims

    def planned(self, value: Slots, partition: Partition) -> Iterator[PlannedLeaf]:
        dims = None if self.dim is None else self.dims(value)
        for leaf in on_slots(self.parts(value, partition), partition.devices, partition.sizes, dims, self.path):
            yield dataclasses.replace(leaf, how=self.how)

    def remade(self, value: Any, rows: int, make: Make, item: Callable[[Tree, int], Tree]) -> Any:
        known = isinstance(value, Sharded) and (value.sizes is not None or self.dim is not None)
        flat = flatten(value.shards[0], "shard", self.dims(value) if known else None)
        plans = leaf_plans(flat, self.partition)
        own = [plan.remade(leaf, rows, make, item) for plan, leaf in zip(plans, flat.leaves, strict=True)]
        one = {"shards": (unflatten(flat.structure, own),), "devices": value.devices[:1], "peers": ALONE}
        return dataclasses.replace(value, **one, sizes=(rows,) if known else None)


@final
class ReplicatedPlan(SlotsPlan):
    """A `Replicated`: its gradient is one too, with the whole gradient on each slot."""

    how = "there, as a Replicated"

    def wrong(self, value: Slots, where: str) -> list[str]:
        return not_differentiable(value.shards[0], f"{self.path}[0]")

    def summed(self, value: Replicated) -> Sequence[tuple[Tensor, Flat, int]] | None:
        inner = flatten(value.shards[0], self.path)
        return [(tensor, inner, i) for i, tensor in enumerate(inner.leaves)]

    def gradient(self, value: Replicated, sums: Sequence[Tensor], parts: Sequence[Any], home: Home) -> Tree:
        tree, name = unflatten(flatten(value.shards[0], self.path).structure, sums), f"grad of {self.path}"
        return replicate_on(tree, value.devices, always=True, name=name, where="grad", peers=value.peers)


@final
class ShardedPlan(SlotsPlan):
    """A `Sharded`: each slot has its part."""

    how = "there, as a Sharded"

    def cut(self, value: Any, memo: Memo) -> Sequence[Any]:
        slots, partition = self.partition.slots, self.partition
        if partition.sizes is None or all(a != b for a, b in pairwise(slots)):
            return super().cut(value, memo)
        shards: list[Tree] = []
        for slot in dict.fromkeys(slots):  # in microbatches
            pieces = [i for i, s in enumerate(slots) if s == slot]
            each: Any = [tuple([of[i] for i in pieces]) for of in (slots, partition.devices, partition.sizes)]
            args = [(self.path, value.shards[slot], self.dims(value), "in_dims")]
            shards += place(flatten_args(args, "microbatches")[0], Partition(*each))
        return shards

    def wrong(self, value: Any, where: str) -> list[str]:
        # As parameters: each slot would get the gradient of its own rows, and they would drift apart unnoticed.
        raise ValueError(
            f"{where}: {self.path} is a Sharded, which is not differentiated in. If its shards are equal parameters, "
            "pass fdp.Replicated(x.shards, x.devices); if they are parts of the batch, pass fdp.gather(x), or call "
            "fdp.parallel_apply with a function that takes the gradient on each slot"
        )


def leaf_plans(
    flat: Flat, partition: Partition, by_rows: Mapping[int, Partition] | None = None
) -> tuple[LeafPlan, ...]:
    """The plans of all leaves. Where tensors differ in their rows, `by_rows` has the partition for each number."""
    paths = flat._replace(leaves=[])
    found: list[LeafPlan] = []
    for i, (value, dim) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
        own = partition if by_rows is None else by_rows.get(rows_of(value, dim), partition)
        found.append(_class_of(value, dim, own)(paths, i, value, own))
    return tuple(found)


def _class_of(value: Any, dim: Any, partition: Partition) -> type[LeafPlan]:
    if isinstance(value, Tensor):
        return TensorPlan
    if isinstance(value, Slots):
        return ReplicatedPlan if isinstance(value, Replicated) else ShardedPlan
    return ItemsPlan if dim == "items" and partition.sizes is not None else OpaquePlan


def put(plans: Sequence[LeafPlan], values: Sequence[Any], columns: Sequence[list[Any]], memo: Memo) -> None:
    """Put the parts of leaves into the shards. A tensor that stands in several places is moved once, and stays one."""
    if not columns:  # other processes have all shards
        return
    whole = [plan for plan in plans if plan.moves and not plan.is_cut]
    if whole:
        copy_all([(values[plan.index], plan.flat, plan.index) for plan in whole], whole[0].partition.devices, memo)
    for plan in plans:
        index = plan.index
        for column, part in zip(columns, plan.cut(values[index], memo), strict=True):
            column[index] = part


def place(
    flat: Flat, partition: Partition, memo: Memo | None = None, by_rows: Mapping[int, Partition] | None = None
) -> list[Tree]:
    """The tree of each shard. What has been placed before is in the `memo`."""
    columns = [flat.leaves.copy() for _ in partition.slots]
    plans = [plan for plan in leaf_plans(flat, partition, by_rows) if plan.is_cut or plan.moves]
    put(plans, flat.leaves, columns, {} if memo is None else memo)
    return [unflatten(flat.structure, column) for column in columns]
