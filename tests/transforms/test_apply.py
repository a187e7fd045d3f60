"""Running a function on every slot: dp_apply, shard_map, parallel_apply."""

from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Output, Point
from tests.common.functions import never, scores
from tests.common.numbers import COUNTS, numbers

W = numbers(4)
ROWS = (36, 13, 9, 3, 1, 0)
SLOTS = fdp.virtual_devices(3)


# ---- the law


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
def test_equals_one_device(slots: int, rows: int, executor: Any):
    x = numbers(rows, 4)
    devices = fdp.virtual_devices(slots)
    with unharmed(W, x):
        out = fdp.dp_apply(scores, W, x, devices, executor=executor)
        mapped = fdp.shard_map(scores, devices=devices, in_dims=(None, 0), executor=executor)(W, x)
    assert_same_tree(out, scores(W, x))
    assert_same_tree(mapped, scores(W, x))


@pytest.mark.parametrize("slots", COUNTS)
def test_gradients_of_outputs_equal_one_device(slots: int):
    def second_order(apply: Any) -> Any:
        w, x = numbers(4).requires_grad_(), numbers(9, 4).requires_grad_()
        first = torch.autograd.grad((apply(w, x) ** 2).sum(), (w, x), create_graph=True)
        torch.stack([(grad**2).sum() for grad in first]).sum().backward()
        return first, w.grad, x.grad

    assert_close_tree(
        second_order(lambda w, x: fdp.dp_apply(scores, w, x, fdp.virtual_devices(slots))), second_order(scores)
    )


def test_gradgradcheck():
    def apply(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(scores, w, x, SLOTS)

    assert torch.autograd.gradgradcheck(apply, (numbers(2).requires_grad_(), numbers(4, 2).requires_grad_()))


def test_one_slot_returns_what_the_function_returned():
    tensor, other = numbers(3), numbers(2, 3)

    def fn(w: Any, x: Any) -> Any:
        return {"a": tensor, "b": [other, x], "w": w, "m": tensor}

    x = numbers(3)
    dims = {"a": 0, "b": 1, "w": "sum", "m": "mean"}
    out = fdp.dp_apply(fn, W, (x,), "cpu", out_dims=dims | {"b": [1, 0]})
    assert out["a"] is tensor
    assert out["b"][0] is other
    assert out["b"][1] is x
    assert out["w"] is W
    assert out["m"] is tensor


def test_ten_runs_are_the_same():
    x = numbers(13, 4)
    outs = [fdp.dp_apply(lambda w, x: (x @ w).logsumexp(0), W, x, SLOTS, out_dims="mean") for _ in range(10)]
    for out in outs:
        assert_same_tree(out, outs[0])


# ---- parallel_apply


def test_results_stay_where_they_are():
    x = numbers(5, 4)
    out = fdp.parallel_apply(scores, W, fdp.scatter(x, SLOTS))
    assert isinstance(out, fdp.Sharded)
    assert (out.devices, out.sizes, out.dims) == (SLOTS, None, fdp.AUTO)
    assert_same_tree(out.shards, tuple(scores(W, part) for part in x.split([2, 2, 1])))
    assert_same_tree(fdp.gather(out, 0), scores(W, x))


def test_plain_arguments_are_replicated():
    def fn(w: torch.Tensor, x: torch.Tensor, *, tag: str, bias: list[torch.Tensor]) -> torch.Tensor:
        assert tag == "tag"
        w.add_(len(x))
        bias[0].mul_(2)
        return w.sum() + bias[0]

    w, bias = W.clone(), torch.tensor(3.0)
    with unharmed(w, bias):
        out = fdp.parallel_apply(fn, w, fdp.scatter(numbers(5), SLOTS), kwargs={"tag": "tag", "bias": [bias]})
    assert isinstance(out, fdp.Sharded)
    assert_same_tree(out.shards, tuple((W + n).sum() + 6 for n in (2, 2, 1)))


def test_writes_are_allowed_in_state_of_ones_own():
    state = fdp.replicate({"w": W}, SLOTS)
    fdp.parallel_apply(lambda s, x: s["w"].add_(len(x)), state, fdp.scatter(numbers(5), SLOTS))
    assert_same_tree([shard["w"] for shard in state.shards], [W + 2, W + 2, W + 1])


def test_tuples_come_apart():
    replicated = fdp.replicate(W, SLOTS)
    w, rest = fdp.parallel_apply(lambda w, x: (w, {"n": len(x)}), replicated, fdp.scatter(numbers(4), SLOTS))
    assert w.shards == replicated.shards
    assert rest.shards == ({"n": 2}, {"n": 1}, {"n": 1})
    one = fdp.parallel_apply(lambda w: Point(w, 1), replicated)  # a namedtuple is one result
    assert isinstance(one, fdp.Sharded)
    some = fdp.parallel_apply(lambda x: (x, x) if len(x) > 1 else x, fdp.scatter(numbers(4), SLOTS))
    assert isinstance(some, fdp.Sharded)


def test_a_training_loop_keeps_its_state_on_its_devices():
    def step(w: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> Any:
        momentum = momentum * 0.9 + x.sum(0)
        return w - 0.1 * momentum, momentum, (w * x).sum()

    batches = [numbers(rows, 4) * i for i, rows in enumerate((7, 6, 2), 1)]
    w, momentum = fdp.replicate(W, SLOTS), fdp.replicate(torch.zeros_like(W), SLOTS)
    loss: Any = None
    for batch in batches:
        w, momentum, loss = fdp.parallel_apply(step, w, momentum, fdp.scatter(batch, SLOTS, keep_empty=True))
    for slot in range(3):
        state = W, torch.zeros_like(W), None
        for batch in batches:
            rows = fdp.scatter(batch, SLOTS, keep_empty=True)[slot]
            state = step(state[0], state[1], rows)
        assert_same_tree((w[slot], momentum[slot], loss[slot]), state)


def test_devices_are_those_of_the_arguments():
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, fdp.replicate(W, SLOTS)))) == 3
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, W, devices=SLOTS))) == 3
    assert as_sharded(fdp.parallel_apply(lambda: 3, devices=SLOTS)).shards == (3, 3, 3)
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, fdp.replicate(W, SLOTS), devices=SLOTS))) == 3


def as_sharded(value: Any) -> fdp.Sharded:
    assert isinstance(value, fdp.Sharded)
    return value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, SLOTS), fdp.scatter(numbers(2), SLOTS)),
            r"args\[0\] has 3 \(cpu, cpu, cpu\), args\[1\] has 2 \(cpu, cpu\)\. .*keep_empty=True",
        ),
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, SLOTS), devices=["cpu"] * 2),
            r"devices has 2 \(cpu, cpu\), args\[0\] has 3 \(cpu, cpu, cpu\)",
        ),
        (
            lambda: fdp.parallel_apply(never, kwargs={"a": fdp.replicate(W, SLOTS), "b": fdp.replicate(W, "cpu")}),
            r"kwargs\['a'\] has 3 \(cpu, cpu, cpu\), kwargs\['b'\] has 1 \(cpu\)",
        ),
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, ["cpu", "meta"]), fdp.replicate(W, ["cpu"] * 2)),
            r"args\[0\] has 2 \(cpu, meta\), args\[1\] has 2 \(cpu, cpu\)",
        ),
    ],
)
def test_arguments_on_different_slots(call: Any, message: str):
    with pytest.raises(ValueError, match=rf"^parallel_apply: arguments are on different slots: {message}"):
        call()


def test_tuples_of_different_length():
    with pytest.raises(TypeError, match=r"parallel_apply: .*tuple.*\['tuple of 2', 'tuple of 1', 'tuple of 1'\]"):
        fdp.parallel_apply(lambda x: (x,) * len(x), fdp.scatter(numbers(4), SLOTS))


def test_dict_outputs_of_dataclasses():
    x = numbers(5)
    out = fdp.dp_apply(lambda w, x: Output(logits=x), W, x, SLOTS)
    assert_same_tree(out, Output(logits=x))
