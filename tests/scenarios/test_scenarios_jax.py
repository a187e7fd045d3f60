"""A JAX training loop, ported: state on every slot, batches split, gradients and metrics by collectives."""

import re
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.containers import tensors_of
from tests.common.depth import few
from tests.common.numbers import numbers

DEVICES = fdp.virtual_devices(8)
EXECUTORS: Any = ("auto", "sequential", "threads")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
RATE = 0.5


# ---- the program


class OptState(NamedTuple):
    step: Tensor  # ()
    momentum: Any  # a tree like params


def initial_state() -> dict[str, Any]:
    params: Any = {
        "encoder": {"w": numbers(5, 8), "b": numbers(8)},
        "head": {"w": numbers(8, 3), "b": numbers(3)},
    }
    return {"params": params, "opt": OptState(torch.tensor(0), optree.tree_map(torch.zeros_like, params))}


def batch_of(rows: int, start: int = 0) -> dict[str, Tensor]:
    x = numbers(start + rows, 5)[start:]
    return {"x": x, "y": (x.sum(1) > 0).long() + (x[:, 0] > 0).long()}


def dropout_mask(like: Tensor, rate: float, rng: int | None) -> Tensor:
    """What is kept: drawn from the slot's own numbers under `seed=`, or from a key, as in JAX."""
    if rng is None:
        return F.dropout(torch.ones_like(like), rate)
    generator = torch.Generator().manual_seed(fdp.fold_in(rng, fdp.axis_index()))
    return (torch.rand(like.shape, generator=generator) >= rate).to(like.dtype) / (1 - rate)


def loss_fn(params: Any, batch: Any, rate: float, rng: int | None) -> Any:
    hidden = torch.tanh(batch["x"] @ params["encoder"]["w"] + params["encoder"]["b"])
    mask = dropout_mask(hidden, rate, rng) if rate else torch.ones_like(hidden)
    logits = (hidden * mask) @ params["head"]["w"] + params["head"]["b"]
    loss = F.cross_entropy(logits, batch["y"])
    return loss, ({"loss": loss, "accuracy": (logits.argmax(1) == batch["y"]).double().mean()}, mask)


def update(state: Any, grads: Any) -> dict[str, Any]:
    step, momentum = state["opt"]
    momentum = optree.tree_map(lambda m, g: 0.9 * m + g, momentum, grads)
    rate = 0.1 / (1 + 0.01 * step)
    params = optree.tree_map(lambda p, m: p - rate * m, state["params"], momentum)
    return {"params": params, "opt": OptState(step + 1, momentum)}


def train_step(state: Any, batch: Any, *, rng: int | None = None, rate: float = 0.0) -> Any:
    """One slot's part of a step: new state, metrics of the whole batch, and the slot's own mask."""
    value_and_grad = torch.func.grad(loss_fn, has_aux=True)
    grads, (metrics, mask) = value_and_grad(state["params"], batch, rate, rng)
    grads, metrics = fdp.pmean((grads, metrics), weight="rows")
    return update(state, grads), metrics, mask


def on_one_device(state: Any, batch: Any) -> Any:
    """The same step in plain torch, without dropout."""
    grads, (metrics, _) = torch.func.grad(loss_fn, has_aux=True)(state["params"], batch, 0.0, None)
    return update(state, grads), metrics


def train(batches: list[Any], seed: int | None = None, executor: Any = "auto", **options: Any) -> Any:
    """State of all slots, metrics of each step, masks of each step and slot."""
    state: Any = fdp.replicate(initial_state(), DEVICES)
    history, masks = [], []
    for i, batch in enumerate(batches):
        shards = fdp.scatter(batch, DEVICES, keep_empty=True)
        draws = None if seed is None else fdp.fold_in(seed, i)
        state, metrics, mask = fdp.parallel_apply(
            train_step, state, shards, kwargs=options, executor=executor, seed=draws
        )
        for other in metrics.shards:
            assert_same_tree(other, metrics[0])
        history.append(metrics[0])
        masks.append(mask.shards)
    return state, history, masks


# ---- it is the one-device program


@few()
@each_executor
@pytest.mark.parametrize("rows", [16, 13, 9, 8, 7, 3, 1])
def test_a_step_equals_one_device(rows: int, executor: Any):
    state, metrics = on_one_device(initial_state(), batch_of(rows))
    states, history, _ = train([batch_of(rows)], executor=executor)
    assert len(states) == 8
    for replica in states.shards:
        assert_close_tree(replica, state)
    assert_close_tree(history[0], metrics)


@each_executor
def test_training_with_a_short_last_batch_equals_one_device(executor: Any):
    batches = [batch_of(13), batch_of(10, 13), batch_of(3, 23)] * 3
    state: Any = initial_state()
    want = []
    for batch in batches:
        state, metrics = on_one_device(state, batch)
        want.append(metrics)
    states, history, _ = train(batches, executor=executor)
    assert_close_tree(history, want)
    assert_close_tree(states[7], state)
    assert states[7]["opt"].step.item() == 9


def test_shards_have_no_leading_device_axis():
    def look(state: Any, batch: Any) -> Any:
        return state["params"]["encoder"]["w"].shape, state["opt"].step.shape, batch["x"].shape

    state, batch = fdp.replicate(initial_state(), DEVICES), fdp.scatter(batch_of(13), DEVICES)
    weight, step, x = fdp.parallel_apply(look, state, batch)
    assert set(weight.shards) == {(5, 8)}
    assert set(step.shards) == {()}
    assert x.shards == ((2, 5),) * 5 + ((1, 5),) * 3


@each_executor
def test_the_loss_over_no_rows_does_not_leak(executor: Any):
    """Slots 3 to 7 have none: their loss and gradients are NaN, and count nothing."""

    def local(state: Any, batch: Any) -> Any:
        grads, (metrics, _) = torch.func.grad(loss_fn, has_aux=True)(state["params"], batch, 0.0, None)
        mean = fdp.pmean(metrics["loss"], weight="rows")
        return metrics["loss"], mean, fdp.axis_rows(), fdp.axis_size(), grads["encoder"]["w"]

    state, batch = fdp.replicate(initial_state(), DEVICES), fdp.scatter(batch_of(3), DEVICES, keep_empty=True)
    loss, mean, rows, size, _ = fdp.parallel_apply(local, state, batch, executor=executor)
    assert rows.shards == (1, 1, 1, 0, 0, 0, 0, 0)
    assert set(size.shards) == {8}
    assert [bool(x.isnan()) for x in loss.shards] == [False] * 3 + [True] * 5
    want = loss_fn(initial_state()["params"], batch_of(3), 0.0, None)[0]
    for value in mean.shards:
        torch.testing.assert_close(value, want)

    states, history, _ = train([batch_of(3)], executor=executor)
    assert all(tensor.isfinite().all() for tensor in tensors_of([list(states.shards), history]))


def test_every_slot_needs_a_shard():
    state, batch = fdp.replicate(initial_state(), DEVICES), fdp.scatter(batch_of(3), DEVICES)
    with pytest.raises(ValueError, match=r"args\[0\] has 8 .* args\[1\] has 3 .*keep_empty=True"):
        fdp.parallel_apply(train_step, state, batch)


# ---- replicas


@few()
@each_executor
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_replicas_stay_bitwise_equal(executor: Any, rate: float):
    batches = [batch_of(11, i % 7) if i % 5 else batch_of(3) for i in range(15)]
    states, _, _ = train(batches, seed=0, executor=executor, rate=rate)
    assert states[0]["opt"].step.item() == 15
    for replica in states.shards[1:]:
        assert_same_tree(replica, states[0])
    pointers = [t.data_ptr() for replica in states.shards for t in tensors_of(replica["params"])]
    assert len(set(pointers)) == len(pointers)  # each slot has its own


# ---- dropout

DROPOUT = {"seed=": {"seed": 5}, "a key": {"rng": 5}}


@pytest.mark.parametrize("name", DROPOUT)
def test_the_same_seed_gives_the_same_in_each_run_and_under_each_executor(name: str):
    batches = [batch_of(13), batch_of(3)]
    want = train(batches, rate=RATE, **DROPOUT[name])
    assert any((mask == 0).any() for mask in want[2][0])
    for executor in EXECUTORS:
        for _ in range(3):
            states, history, masks = train(batches, executor=executor, rate=RATE, **DROPOUT[name])
            assert_same_tree((states.shards, history, masks), (want[0].shards, *want[1:]))


@pytest.mark.parametrize("name", DROPOUT)
def test_masks_differ_between_slots(name: str):
    _, _, [masks] = train([batch_of(80)], rate=RATE, **DROPOUT[name])
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8


def test_masks_differ_between_steps_and_seeds():
    _, _, masks = train([batch_of(80)] * 2, seed=5, rate=RATE)
    _, _, others = train([batch_of(80)], seed=6, rate=RATE)
    drawn = [tuple(mask.flatten().tolist()) for step in (*masks, *others) for mask in step]
    assert len(set(drawn)) == len(drawn)


# ---- a spec that does not fit


def test_in_dims_that_is_no_prefix():
    """The error has the name of the argument, and where in it."""
    state, batch = initial_state(), {"data": batch_of(13)}
    no_names, no_leaf = {"data": [0, 0]}, {"data": {"x": (0, 1), "y": 0}}

    def refused(text: str) -> Any:
        return pytest.raises(ValueError, match=f"^{re.escape(text)} there: not a prefix of it$")

    with refused("scatter: tree['data'] is a dict with keys ['x', 'y'], but in_dims has a list of 2"):
        fdp.scatter(batch, DEVICES, in_dims=no_names)
    with refused("dp_apply: inputs['data']['x'] is a leaf (Tensor), but in_dims has a tuple of 2"):
        fdp.dp_apply(train_step, state, batch, DEVICES, in_dims=no_leaf)
    with refused("shard_map: args[1]['data']['x'] is a leaf (Tensor), but in_dims has a tuple of 2"):
        fdp.shard_map(train_step, devices=DEVICES, in_dims=(None, no_leaf))(state, batch)
    with refused("value_and_grad: args[1]['data'] is a dict with keys ['x', 'y'], but in_dims has a list of 2"):
        fdp.value_and_grad(loss_fn, devices=DEVICES, in_dims=(None, no_names, None, None))(
            state["params"], batch, 0.0, None
        )
    with refused("dp_apply: kwargs['batch']['data'] is a dict with keys ['x', 'y'], but kwarg_dims has a list of 2"):
        fdp.dp_apply(train_step, state, (), DEVICES, kwargs={"batch": batch}, kwarg_dims={"batch": no_names})
