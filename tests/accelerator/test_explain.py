"""L14: the copies between devices that a call makes are those that `explain` planned."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fdp
from property_tests.strategies import batches, parameters, row_counts, weights
from tests.common.containers import Point
from tests.common.numbers import numbers
from tests.common.virtual import record_copies, traffic

CPU, *VIRTUAL = [torch.device("cpu"), *(torch.device("virtual", i) for i in range(4))]


def assert_planned(fn: Any, params: Any, inputs: Any, devices: Any = None, **options: Any) -> fdp.Plan:
    plan = fdp.explain(fn, params, inputs, devices, **options)
    assert plan.problem is None
    with record_copies() as real, fdp.transfers() as log:
        fdp.dp_apply(fn, params, inputs, devices, **options)
    assert list(plan.copies) == log
    assert traffic(plan.copies) == traffic(real)
    leaves = [*plan.arguments, *(plan.outputs or ())]
    of_leaves = sum(leaf.copies for leaf in leaves), sum(leaf.copied for leaf in leaves)
    own = [copy for copy in log if copy.path.startswith(("params", "inputs", "kwargs", "out"))]
    assert of_leaves == (len(own), sum(copy.nbytes for copy in own))
    return plan


slots = st.lists(st.sampled_from([CPU, *VIRTUAL]), min_size=1, max_size=5)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_l14_the_copies_of_any_tree(data: st.DataObject):
    devices = data.draw(slots)
    rows = data.draw(row_counts(len(devices)))
    batch, params = data.draw(batches(rows, scalars=False)), data.draw(parameters())
    reduction = data.draw(st.sampled_from([None, "sum", "stack", "list", *(["mean"] if rows else [])]))
    options: dict[str, Any] = {"in_dims": (batch.dims,), "out_dims": (batch.dims, reduction)}
    options["weights"] = data.draw(st.none() | weights(len(devices)))
    options["output_device"] = data.draw(st.none() | st.sampled_from([CPU, VIRTUAL[1]]))
    assert_planned(lambda params, tree: (tree, params), params, (batch.tree,), devices, **options)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_l14_what_shards_exchange(data: st.DataObject):
    devices = data.draw(slots)
    rows, width = data.draw(row_counts(len(devices), 1)), data.draw(st.sampled_from([3, 10_000]))

    def fn(params: Tensor, x: Tensor) -> Any:
        everything = fdp.all_gather(x)
        total = fdp.psum({"mean": x.mean(0), "wide": params * x.sum()})
        return x * total["mean"], fdp.pmean(everything.mean(), weight="rows"), total["wide"].sum()

    plan = assert_planned(fn, numbers(width), numbers(rows, 3), devices, out_dims=(0, None, "mean"))
    active = min(rows, len(devices))
    assert [entry.name for entry in plan.collectives] == (["all_gather", "psum", "pmean"] if active > 1 else [])


def test_a_module_with_buffers():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    apply, state = fdp.functional(net)
    plan = assert_planned(apply, state, numbers(10, 4).float(), VIRTUAL, seed=3)
    assert plan.outputs is not None
    shapes = {leaf.path: leaf.shape for leaf in plan.outputs}
    assert shapes["out[0]"] == (10, 2)
    assert shapes["out[1]['1.running_mean']"] == (6,)


def test_recurrent_and_attention_layers():
    rnn, state = fdp.functional(nn.RNN(3, 4, batch_first=True))
    assert_planned(rnn, state, numbers(5, 6, 3).float(), VIRTUAL[:2], out_dims=((0, 1), "mean"))
    layer, state = fdp.functional(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert_planned(layer, state, numbers(5, 6, 8).float(), VIRTUAL[:3])


def test_what_is_on_its_slots_is_not_copied():
    params, batch = fdp.replicate(numbers(3), VIRTUAL), fdp.scatter({"x": numbers(6, 3)}, VIRTUAL)
    plan = assert_planned(lambda w, batch: (batch["x"] * w).sum(1), params, batch)
    assert [leaf.how for leaf in plan.arguments] == ["there, as a Replicated", "there, as a Sharded"]
    assert plan.sizes == (2, 2, 1, 1)
    assert [copy.path for copy in plan.copies] == ["out"] * 3


def test_gradients_inside_and_tied_tensors():
    w = numbers(3).requires_grad_()

    def fn(params: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (x * w).sin().sum())(params.x) * params.y

    plan = assert_planned(fn, Point(w, w), numbers(6, 3), VIRTUAL[:2], out_dims="sum")
    assert [leaf.copies for leaf in plan.arguments] == [2, 0, 2]  # a tied tensor moves once


def test_nothing_moves_and_nothing_is_computed():
    x, w = numbers(6, 3), numbers(3, 2)
    seen: list[type] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        seen.append(type(x))
        return x @ w

    state = torch.get_rng_state()
    with record_copies() as real:
        fdp.explain(fn, w, x, VIRTUAL, seed=1)
    assert real == []
    assert torch.Tensor not in seen
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_short_batches(rows: int):
    plan = assert_planned(lambda w, x: x * w, numbers(3), numbers(rows, 3), VIRTUAL)
    assert len(plan.devices) == max(1, rows)


def test_a_function_that_mixes_devices_is_told_before_it_runs():
    plan = fdp.explain(lambda w, x: x * w.to(VIRTUAL[0]), numbers(3), numbers(4, 3), VIRTUAL[:2])
    assert plan.outputs is None
    assert plan.problem is not None
    assert "virtual:1" in plan.problem
    assert "virtual:0" in plan.problem


def assert_planned_gradient(step: Any, params: Any, inputs: Any) -> fdp.Plan:
    plan = fdp.explain(step, params, inputs)
    assert plan.problem is None
    with record_copies() as real, fdp.transfers() as log:
        step(params, *inputs)
    assert list(plan.copies) == log
    assert traffic(plan.copies) == traffic(real)
    leaves = [*plan.arguments, *(plan.outputs or ())]
    own = [copy for copy in log if copy.path.startswith(("args", "loss", "aux", "grad of"))]
    assert sum(leaf.copies for leaf in leaves) == len(own)
    assert sum(leaf.copied for leaf in leaves) == sum(copy.nbytes for copy in own)
    return plan


def mean_loss(params: Any, x: Tensor) -> tuple[Tensor, Any]:
    out = torch.tanh(x @ params["w"] + params["b"])
    return out.square().mean(), {"mean": out.mean(0), "rows": len(x) * 0}


GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in pieces": {"microbatches": 2},
    "to the inputs": {"argnums": (0, 1), "in_dims": (None, 0)},
    "by count": {"count": lambda params, x: x.abs().sum(), "aux_weight": "count"},
    "to one device": {"output_device": VIRTUAL[1], "weights": [1, 2, 1, 0, 1]},
    "as a sum": {"reduction": "sum", "executor": "threads", "seed": 3},
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("function", ["value_and_grad", "grad"])
@pytest.mark.parametrize("home", [CPU, VIRTUAL[0]])
def test_l14_the_copies_of_a_gradient(name: str, function: str, home: torch.device):
    params = {"w": numbers(3, 2).to(home), "b": numbers(2)}
    step = getattr(fdp, function)(mean_loss, has_aux=True, aux_dims="mean", devices=[CPU, *VIRTUAL], **GRADIENTS[name])
    plan = assert_planned_gradient(step, params, (numbers(11, 3),))
    assert plan.sizes == ((2, 5, 2, 2) if name == "to one device" else (3, 2, 2, 2, 2))


def test_the_copies_of_a_gradient_with_collectives_and_state():
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w - fdp.pmean((x @ w).mean(), weight="rows")).square().mean()

    w = numbers(3)
    plan = assert_planned_gradient(fdp.value_and_grad(loss, devices=VIRTUAL[:2]), w, (numbers(7, 3),))
    assert "pmean" in [entry.name for entry in plan.collectives]
    slots = VIRTUAL[:2]
    on_slots = fdp.replicate(w, slots), (fdp.scatter(numbers(7, 3), slots),)
    assert_planned_gradient(fdp.value_and_grad(lambda w, x: (x @ w).square().mean()), *on_slots)
