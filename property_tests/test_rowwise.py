"""Laws of running a function: whatever the split, the numbers are those of one device."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_close, assert_same
from property_tests.functions import grads_of, row_wise, sines, summary
from property_tests.places import ACCELERATOR, generators
from property_tests.strategies import (
    EXACT,
    FLOATS,
    Case,
    Split,
    batches,
    cases,
    devices,
    executors,
    slot_counts,
    splits,
    tensors,
    weights,
)
from tests.common.containers import tensors_of


@given(st.data())
def test_l1_one_device_is_the_function(data: st.DataObject):
    rows = data.draw(st.sampled_from([3, 1, 0]))
    batch, params = data.draw(batches(rows, special=True, items=False)), data.draw(batches(rows)).tree
    x = sines(rows, 3)
    apply = row_wise(batch.tensor_dims)
    out_dim = data.draw(st.sampled_from([0, -1, None, "sum", "mean", "max", "min"] if rows else [0, None, "sum"]))

    returned: list[Any] = []

    def function(params: Any, x: torch.Tensor, tree: Any) -> Any:
        returned[:] = apply(params, x, tree), (params, tree)
        return tuple(returned)

    out = fdp.dp_apply(
        function,
        params,
        (x, batch.tree),
        data.draw(devices(1)),
        in_dims=(0, batch.dims),
        out_dims=(out_dim, None),
        executor=data.draw(executors()),
    )
    assert all(a is b for a, b in zip(tensors_of(out), tensors_of(returned), strict=True))  # not a copy
    assert_same(out, function(params, x, batch.tree))


@given(cases())
def test_l2_values(case: Case):
    assert_close(case.run(), case.oracle())


@given(cases(EXACT, extremes=False))  # equal maxima would share their gradient in another way
def test_l2_gradients(case: Case):
    case.inputs[0].requires_grad_()
    inputs = list({id(t): t for t in tensors_of((case.params, case.inputs, case.kwargs)) if t.requires_grad}.values())

    def first_and_second(out: Any) -> list[torch.Tensor]:
        first = grads_of(summary(out), inputs, create_graph=True)
        return first + grads_of(summary(first), inputs)

    assert_close(first_and_second(case.run()), first_and_second(case.oracle()))


@given(cases())
def test_l8_repeats_and_executors_agree(case: Case):
    first = case.run()
    for executor in ("sequential", "threads", "threads", "auto"):
        assert_same(case.run(executor=executor), first)


@given(splits(), st.integers(-(2**70), 2**70))
def test_l8_seeds_repeat(split: Split, seed: int):
    x = torch.zeros(split.rows, 2)

    def function(_: None, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, device=x.device) + torch.rand(())

    torch.manual_seed(1)
    states = [generator.get_state() for generator in generators()]
    first, second = (fdp.dp_apply(function, None, x, seed=seed, **split.options) for _ in range(2))
    assert_same(first, second)
    assert_same([generator.get_state() for generator in generators()], states)
    assert len(first.unique()) == first.numel()  # no two slots draw the same


@given(cases())
def test_shard_map_is_dp_apply(case: Case):
    split = case.split
    dims = {"in_dims": (None, *case.in_dims), "kwarg_dims": case.kwarg_dims, "out_dims": case.out_dims}
    run = fdp.shard_map(case.function, **split.options, **dims)
    assert_same(run(case.params, *case.inputs, **case.kwargs), case.run())


@given(cases())
def test_dp_apply_is_gather_of_parallel_apply(case: Case):
    split = case.split
    everything = (*case.inputs, case.kwargs["kept"])
    sharded = fdp.scatter(everything, split.devices, (*case.in_dims, case.kwarg_dims["kept"]), weights=split.weights)
    params = fdp.replicate(case.params, sharded.devices)

    def function(params: Any, batch: Any, name: str) -> Any:
        *inputs, kept = batch
        return [case.function(params, *inputs, kept=kept, name=name)]

    outputs = fdp.parallel_apply(function, params, sharded, kwargs={"name": "text"}, executor=split.executor)
    assert isinstance(outputs, fdp.Sharded)
    for i, output in enumerate(outputs.shards):
        assert_same(output, function(params[i], sharded[i], "text"))
    out_dims = getattr(case.function, "out_dims", case.out_dims)
    assert_same(fdp.gather(outputs, [out_dims], weights=sharded.sizes if split.rows else None)[0], case.run())


@given(cases(extremes=False), st.data())  # there is no maximum of an empty shard
def test_slots_stand_for_arguments(case: Case, data: st.DataObject):
    """Any of the arguments may be on the slots already, with some of them empty."""
    split = case.split
    trees = (*case.inputs, case.kwargs["kept"])
    dims: list[Any] = [*case.in_dims, case.kwarg_dims["kept"]]
    keep = data.draw(st.booleans())
    sharded = fdp.scatter(trees, split.devices, tuple(dims), weights=split.weights, keep_empty=keep).unzip()
    placed = [0, *data.draw(st.sets(st.sampled_from([1, 2])))]  # one of them has rows
    args: list[Any] = list(trees)
    for i in placed:
        args[i], dims[i] = sharded[i], 0
    where = sharded[0].devices if ACCELERATOR else split.devices
    params = fdp.replicate(case.params, where, copy=data.draw(st.booleans()))
    out = fdp.dp_apply(
        case.function,
        data.draw(st.sampled_from([params, case.params])),
        tuple(args[:2]),
        data.draw(st.sampled_from([None, where])),
        in_dims=tuple(dims[:2]),
        kwargs={"kept": args[2], "name": "text"},
        kwarg_dims={"kept": dims[2]},
        out_dims=case.out_dims,
        executor=split.executor,
    )
    assert_same(out, case.run())


@given(splits(at_least=2), st.data())
def test_outputs_that_differ_are_named(split: Split, data: st.DataObject):
    x = torch.arange(split.rows)
    differing = {
        "other": lambda x: int(x[0]),
        "keys": lambda x: {int(x[0]): x},
        "structure": lambda x: [x] * (1 + int(x[0])),
        "shape": lambda x: torch.zeros(len(x), 1 + int(x[0])),
        "dtype": lambda x: x if x[0] == 0 else x.double(),
        "ndim": lambda x: x[None] if x[0] == 0 else x,
        "kind": lambda x: x if x[0] == 0 else "text",
    }
    make = differing[data.draw(st.sampled_from(list(differing)))]

    def function(_: None, x: torch.Tensor) -> Any:
        return {"same": x, "differs": [x, make(x)]}

    sizes = fdp.scatter(x, split.devices, weights=split.weights).sizes
    if len(sizes or ()) > 1:
        with pytest.raises(ValueError, match=r"dp_apply: .*out\['differs'\]\[1\]"):
            fdp.dp_apply(function, None, x, **split.options)
    else:
        assert_same(fdp.dp_apply(function, None, x, **split.options), function(None, x))


@given(st.data())
def test_gather_reduces_as_one_device_does(data: st.DataObject):
    slots = data.draw(slot_counts())
    x = data.draw(tensors(slots, 0, scalars=False, special=True))
    out_dims = {None: x[0], "list": list(x), "stack": x}
    out_dims |= {dim: torch.cat(list(x), dim) for dim in range(1 - x.ndim, x.ndim - 1)}
    if not x.is_complex():
        out_dims |= {"max": x.amax(0), "min": x.amin(0)}
    if x.dtype in (torch.float64, torch.int64, torch.int8):
        out_dims["sum"] = x.sum(0, dtype=x.dtype)
    shards = fdp.scatter(x, data.draw(devices(slots))).map(lambda shard: {"x": shard[0], "name": "text"})
    for dim, want in out_dims.items():
        got = fdp.gather(shards, {"x": dim, "name": 0})
        assert got["name"] == "text"
        if dim == "sum":
            torch.testing.assert_close(got["x"].cpu(), want, rtol=0, atol=1e-12, equal_nan=True)
        else:
            assert_same(got["x"], want)


@given(st.data())
def test_gather_takes_weighted_means(data: st.DataObject):
    slots = data.draw(slot_counts())
    x = data.draw(tensors(slots, 0, FLOATS, scalars=False))
    shares = data.draw(weights(slots))
    numbers = torch.tensor(shares, dtype=torch.float64)
    numbers = (numbers / numbers.sum()).reshape(-1, *[1] * (x.ndim - 1))
    exact = x.to(torch.complex128 if x.is_complex() else torch.float64)
    want = (exact * numbers).sum(0).to(x.dtype)
    tolerance = 4 * torch.finfo(x.dtype).eps
    shards = fdp.scatter(x, data.draw(devices(slots))).map(lambda shard: shard[0])
    assert_close(fdp.gather(shards, "mean", weights=shares), want, tolerance)
    poisoned = iter([part if share else part * float("nan") for part, share in zip(x, shares, strict=True)])
    without = fdp.gather(shards.map(lambda _: next(poisoned)), "mean", weights=shares)  # what weighs nothing has no say
    assert_close(without, want, tolerance)


@given(splits(at_least=1))
def test_gather_weighs_by_rows(split: Split):
    x = sines(split.rows, 2)
    sharded = fdp.scatter(x, split.devices, weights=split.weights)
    means = fdp.Sharded(tuple(shard.mean(0) for shard in sharded.shards), sharded.devices, sharded.sizes)
    assert_close(fdp.gather(means, "mean"), x.mean(0), 1e-12)
