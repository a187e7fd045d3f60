"""Aux and microbatches of gradient functions."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree, unharmed
from tests.common.containers import Point
from tests.common.numbers import COUNTS, numbers
from tests.transforms.losses import MASK, W, X, Y, loss, mask_sum, oracle, weighted_loss

SLOTS = fdp.virtual_devices(3)


# ---- aux


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_dims(slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        scores = x @ w
        aux = {
            "scores": scores,
            "mean": scores.mean(),
            "sum": Point(scores.sum(), torch.tensor(len(x))),
            "max": scores.max(),
            "list": len(x),
            "first": None,
            "tag": "tag",
            "items": [f"{score:.3f}" for score in scores.tolist()],
        }
        return loss(w, x, y), aux

    dims = {"scores": 0, "mean": "mean", "sum": "sum", "max": "max", "list": "list", "first": None, "tag": "mean"}
    dims["items"] = "items"
    options: Any = {"has_aux": True, "aux_dims": dims, "microbatches": microbatches}
    (value, aux), grads = fdp.value_and_grad(fn, devices=fdp.virtual_devices(slots), **options)(W, X, Y)
    want_loss, want = fn(W, X, Y)
    assert sum(aux.pop("list")) == want.pop("list") == 7
    assert_close_tree(aux, want)
    assert_close_tree((value, grads), (want_loss, oracle(loss, W, X, Y)[1]))


@pytest.mark.parametrize(
    ("aux", "dims", "message"),
    [
        (lambda x: {"x": x}, "mean", r"aux\['x'\] has shapes \(3, 4\), \(2, 4\), \(2, 4\), which have no 'mean'"),
        (lambda x: {"n": len(x)}, "mean", r"aux\['n'\] differs between shards: 3 in shard 0, 2 in shard 1"),
        (lambda x: torch.tensor(len(x)), "mean", "aux is torch.int64, which has no 'mean', and differs"),
        (lambda x: x.sum(), 0, "aux is a 0-dim tensor.*'mean', 'sum', 'max', 'min', 'stack', 'list' or None"),
        (
            lambda x: [x] * len(x),
            0,
            "shards differ in structure: aux is a list of 3 in shard 0, a list of 2 in shard 1",
        ),
        (lambda x: {"a": x}, {"b": 0}, r"aux is a dict with keys \['a'\], but aux_dims has a dict with keys \['b'\]"),
    ],
)
def test_aux_that_cannot_be_joined(aux: Any, dims: Any, message: str):
    with unharmed(W, X), pytest.raises(ValueError, match=rf"^grad: {message}"):
        fdp.grad(lambda w, x: ((x @ w).mean(), aux(x)), has_aux=True, aux_dims=dims, devices=SLOTS)(W, X)


# ---- microbatches


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("slots", COUNTS)
def test_microbatches_with_aux_and_count(slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        return weighted_loss(w, x, y, mask), {"tokens": mask.sum(), "scores": x @ w}

    options: Any = {
        "has_aux": True,
        "count": mask_sum,
        "aux_dims": {"tokens": "sum", "scores": 0},
        "devices": fdp.virtual_devices(slots),
        "microbatches": microbatches,
    }
    assert_close_tree(fdp.value_and_grad(fn, **options)(W, X, Y, MASK), oracle(fn, W, X, Y, MASK, has_aux=True))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_all_kinds_of_arguments(microbatches: int):
    def fn(w: Tensor, x: Tensor, items: Any, bias: Tensor, *, y: Tensor) -> Tensor:
        return (((x * w).sum(1) + torch.stack(items) * bias - y) ** 2).mean()

    items = list(numbers(7) * 3)
    args = W, X, items, numbers(1)
    in_dims = None, 0, "items", None
    got = fdp.value_and_grad(fn, (0, 1, 2, 3), devices=SLOTS, in_dims=in_dims, microbatches=microbatches)(*args, y=Y)
    assert_close_tree(got, oracle(fn, *args, argnums=(0, 1, 2, 3), y=Y))
    replicated = fdp.grad(fn, in_dims=in_dims, microbatches=microbatches)(fdp.replicate(W, SLOTS), *args[1:], y=Y)
    assert_close_tree(replicated[2], oracle(fn, *args, y=Y)[1])


def test_microbatches_keep_one_graph_at_a_time():
    alive = itertools.count()
    most: list[int] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            most.append(next(alive))
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            most.append(-1)
            return grads[0]

    fdp.grad(lambda w, x: Counted.apply((x @ w).mean()), devices="cpu", microbatches=3)(W, X)
    assert [step >= 0 for step in most] == [True, False] * 3


def test_reduce_dtype_is_for_processes():
    """In one process nothing is sent."""
    x = torch.arange(8.0)
    step = fdp.value_and_grad(lambda w, x: (w * x).sin().mean(), devices=["cpu"] * 2, reduce_dtype=torch.bfloat16)
    exact = fdp.value_and_grad(lambda w, x: (w * x).sin().mean(), devices=["cpu"] * 2)
    assert all(map(torch.equal, step(torch.tensor(0.3), x), exact(torch.tensor(0.3), x)))
    with pytest.raises(ValueError, match=r"grad: reduce_dtype must be None or torch.bfloat16, got torch.float16"):
        fdp.grad(torch.sum, reduce_dtype=torch.float16)
