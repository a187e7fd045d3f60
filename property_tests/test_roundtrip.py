"""Laws of placement: splitting and joining undo each other, and the plan is fair."""

import pickle
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_same, ties_of
from property_tests.places import ACCELERATOR, CPU, memory_of, moved
from property_tests.strategies import (
    Split,
    batches,
    devices,
    row_counts,
    slot_counts,
    sources,
    splits,
    weights,
)
from tests.common.containers import Point, tensors_of
from tests.common.hard_trees import VALUES

STATES = ("plain", "grad", "parameter", "result", "inference")


def assert_same_slots(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    assert (got.devices, got.sizes) == (want.devices, want.sizes)
    for one, other in zip(got.shards, want.shards, strict=True):
        assert_same(one, other)


# ---- L3, L4


@given(st.data())
def test_l3_gather_inverts_scatter(data: st.DataObject):
    split, keep = data.draw(splits()), data.draw(st.booleans())
    batch = data.draw(batches(split.rows, special=True, states=STATES))
    sharded = fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights, keep_empty=keep)
    assert len(sharded) == split.slots or not keep
    joined = fdp.gather(sharded)
    assert_same(joined, batch.tree)
    apart = fdp.scatter(batch.tree, [CPU] * split.slots, batch.dims, weights=split.weights, keep_empty=keep)
    assert [ties_of(shard) for shard in sharded.shards] == [ties_of(shard) for shard in apart.shards]
    # What two slots had of a list is two tensors, if they are on two devices.
    assert ACCELERATOR or ties_of(joined) == ties_of(batch.tree)
    assert [t.requires_grad for t in tensors_of(joined)] == [t.requires_grad for t in tensors_of(batch.tree)]


@given(st.data())
def test_l3_gather_takes_the_dims_of_scatter(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, functions=False, scalars=False))
    sharded = fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights)
    assert_same(fdp.gather(sharded, batch.dims), batch.tree)


@given(splits(), st.sampled_from([fdp.scatter, fdp.replicate]))
def test_l3_ties(split: Split, place: Any):
    """A tensor in several places is one tensor on each slot, and afterwards; along another dim it is another."""
    tensor, other = torch.zeros(split.rows, split.rows), torch.zeros(split.rows)
    tree = [tensor, {"a": tensor, "b": (tensor, other)}, Point(other, tensor)]
    if place is fdp.replicate:
        ties, placed = ties_of(tree), fdp.replicate(tree, split.devices)
    else:
        dims = [0, {"a": 0, "b": (0, 0)}, Point(0, 1)]
        placed = fdp.scatter(tree, split.devices, dims, weights=split.weights)
        ties = ties_of(tree) if len(placed) == 1 else [0, 0, 0, 3, 3, 5]
    assert [ties_of(shard) for shard in placed.shards] == [ties] * len(placed)
    assert ties_of(fdp.gather(placed)) == ties


@given(st.data())
def test_l3_shards_are_slices(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, items=False))
    sharded = fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights)
    starts = [0, *accumulate(sharded.sizes or [0] * len(sharded))]
    for shard, (start, end) in zip(sharded.shards, pairwise(starts), strict=True):
        for part, whole, dim in zip(tensors_of(shard), tensors_of(batch.tree), batch.tensor_dims, strict=True):
            assert_same(part, whole if dim is None else whole.narrow(dim, start, end - start))
            if part.numel() > 0 and part.device == whole.device:
                assert memory_of(part) == memory_of(whole)  # a view


@given(st.data())
def test_l4_scatter_inverts_gather(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, special=True))
    keep = data.draw(st.booleans())
    sharded = fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights, keep_empty=keep)
    again = fdp.scatter(fdp.gather(sharded), split.devices, sharded.dims, weights=split.weights, keep_empty=keep)
    assert_same_slots(again, sharded)


@given(st.data())
def test_unreplicate_inverts_replicate(data: st.DataObject):
    slots = data.draw(slot_counts())
    tree = moved(data.draw(batches(2, special=True, states=STATES)).tree, data.draw(sources()))
    copy = data.draw(st.booleans())
    replicated = fdp.replicate(tree, data.draw(devices(slots)), copy=copy)
    slot = data.draw(st.integers(-slots, slots - 1))
    assert_same(fdp.unreplicate(replicated, slot=slot), tree)
    assert_same(fdp.gather(replicated), tree)
    storages = [ties_of([shard]) for shard in replicated.shards]
    assert all(ties == ties_of(tree) for ties in storages)
    filled = [{memory_of(t) for t in tensors_of(shard) if t.numel()} for shard in replicated.shards]
    whole = {memory_of(t) for t in tensors_of(tree) if t.numel()}
    if copy:
        assert all(not one & other for one in filled for other in filled if one is not other)
        assert all(not one & whole for one in filled)
    else:
        on = {t.device for t in tensors_of(tree)}
        assert all(one == whole for one, device in zip(filled, replicated.devices, strict=True) if on == {device})


@given(st.data())
def test_pickling_keeps_everything(data: st.DataObject):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, others=VALUES))
    for slots in (
        fdp.scatter(batch.tree, split.devices, batch.dims, weights=split.weights),
        fdp.replicate(batch.tree, split.devices),
    ):
        again = pickle.loads(pickle.dumps(slots))
        assert_same_slots(again, slots)
        assert_same(fdp.gather(again), fdp.gather(slots))


# ---- the plan


def sizes_of(rows: int, slots: int, shares: Any) -> tuple[int, ...]:
    many = torch.zeros(1).expand(rows)  # takes no memory
    sizes = fdp.scatter(many, fdp.virtual_devices(slots), weights=shares, keep_empty=True).sizes
    assert sizes is not None
    return sizes


@given(slot_counts(), st.integers(0, 50), st.sampled_from([None, 1, 0.1, 7, 1e-300, 1e300]))
def test_plan_is_balanced(slots: int, rows: int, share: float | None):
    sizes = sizes_of(rows, slots, share and [share] * slots)
    assert len(sizes) == slots
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.data())
def test_plan_is_proportional(data: st.DataObject):
    slots = data.draw(slot_counts())
    rows = data.draw(st.one_of(row_counts(slots), st.integers(10**15, 10**18)))
    shares = data.draw(weights(slots))
    sizes = sizes_of(rows, slots, shares)
    whole = sum(map(Fraction, shares))
    assert sum(sizes) == rows
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - rows * Fraction(share) / whole) < 1
        assert size == 0 or share > 0
    for (one, more), (other, less) in combinations(zip(sizes, shares, strict=True), 2):
        # More weight never means fewer rows, and of equals the first has more.
        assert one >= other if more >= less else one <= other


@given(splits())
def test_plan_leaves_out_slots_without_rows(split: Split):
    full = sizes_of(split.rows, split.slots, split.weights)
    sharded = fdp.scatter(torch.arange(split.rows), split.devices, weights=split.weights)
    assert sharded.sizes == (tuple(size for size in full if size > 0) or (0,))
    assert len(sharded) == len(sharded.devices) == len(sharded.sizes or ())


@given(st.data())
def test_rows_that_differ_are_named(data: st.DataObject):
    split = data.draw(splits())
    other = data.draw(st.integers(0, 50).filter(lambda rows: rows != split.rows))
    tree = {"a": torch.zeros(split.rows), "b": [torch.zeros(other, 2)]}
    with pytest.raises(ValueError, match=rf"tree\['a'\] has {split.rows} .*tree\['b'\]\[0\] has {other} "):
        fdp.scatter(tree, split.devices)
