"""Gradients: those of the whole batch on one device, for every way to split it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Point
from tests.common.numbers import COUNTS, numbers
from tests.transforms.losses import W, X, Y, loss, oracle, tree_loss

SLOTS = fdp.virtual_devices(3)

ROWS = (36, 13, 9, 3, 1)


# ---- the law


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slots", COUNTS)
def test_equals_one_device(slots: int, rows: int):
    params = {"w": numbers(4), "b": Point([numbers()], None)}
    x, y = numbers(rows, 4), numbers(rows) / 2
    options: Any = {"devices": fdp.virtual_devices(slots)}
    want = oracle(tree_loss, params, x, y)
    with unharmed(params, x, y):
        assert_close_tree(fdp.value_and_grad(tree_loss, **options)(params, x, y), want)
        assert_close_tree(fdp.grad_and_value(tree_loss, **options)(params, x, y), want[::-1])
        assert_close_tree(fdp.grad(tree_loss, **options)(params, x, y), want[1])


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("weights", [None, "uneven"])
def test_weights_do_not_change_the_result(slots: int, weights: Any):
    weights = weights and [0, 5, 0, 1, 2, 0, 1][-slots:]
    got = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), weights=weights)(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))


@pytest.mark.parametrize("slots", [1, 3])
def test_aux_comes_with_the_value(slots: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return loss(w, x, y), {"m": x.mean()}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots)}
    (value, aux), grads = want = oracle(fn, W, X, Y, has_aux=True)
    assert_close_tree(fdp.value_and_grad(fn, **options)(W, X, Y), want)
    assert_close_tree(fdp.grad_and_value(fn, **options)(W, X, Y), (grads, (value, aux)))
    assert_close_tree(fdp.grad(fn, **options)(W, X, Y), (grads, aux))


def test_keyword_arguments_are_split():
    def fn(w: Tensor, x: Tensor, *, batch: Batch, scale: Tensor, names: list[str]) -> Tensor:
        assert len(names) == len(x)
        return loss(w * scale, x, batch.x)

    batch = Batch(Y, numbers(3))
    kwargs = {"batch": batch, "scale": torch.tensor(2.0, dtype=torch.float64), "names": list("abcdefg")}
    dims = {"batch": {"y": None}, "names": "items"}
    got = fdp.value_and_grad(fn, devices=SLOTS, kwarg_dims=dims)(W, X, **kwargs)
    assert_close_tree(got, oracle(fn, W, X, **kwargs))


def test_sum():
    def total(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss(w, x, y) * len(x)

    for slots in COUNTS:
        got = fdp.value_and_grad(total, devices=fdp.virtual_devices(slots), reduction="sum")(W, X, Y)
        assert_close_tree(got, oracle(total, W, X, Y))
    got = fdp.value_and_grad(lambda w, x: (w * x).sum(), devices=SLOTS, reduction="sum")(W, X[:0])
    assert_close_tree(got, (torch.zeros_like(W).sum(), torch.zeros_like(W)))


def test_without_anything_to_split():
    assert_close_tree(fdp.value_and_grad(lambda w: (w**3).sum(), devices=SLOTS)(W), oracle(lambda w: (w**3).sum(), W))


def test_weights_go_in_before_the_backward():
    seeds: list[float] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        out = (x @ w).mean()
        out.register_hook(lambda grad: seeds.append(float(grad)))
        return out

    fdp.grad(fn, devices=SLOTS)(W, X)
    assert seeds == [3 / 7, 2 / 7, 2 / 7]
    seeds.clear()
    fdp.grad(fn, devices=SLOTS, reduction="sum")(W, X)
    assert seeds == [1, 1, 1]
    seeds.clear()
    fdp.grad(fn, devices=SLOTS, count=lambda w, x: 2 * x.shape[0] ** 2, microbatches=2)(W, X)
    assert seeds == [4 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9]


def test_ten_runs_are_the_same():
    runs = [fdp.value_and_grad(loss, devices=SLOTS)(W, X, Y) for _ in range(10)]
    for run in runs:
        assert_same_tree(run, runs[0])


# ---- modes


def test_autocast_is_that_of_one_device():
    w, x, y = W.float(), X.float(), Y.float()

    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        hidden = x @ torch.outer(w, w)
        assert hidden.dtype is torch.bfloat16
        return ((hidden.float().sum(1) - y) ** 2).mean()

    with torch.autocast("cpu", torch.bfloat16):
        got = fdp.value_and_grad(fn, devices=SLOTS)(w, x, y)
        want = oracle(fn, w, x, y)
    assert_close_tree(got, want, rtol=2e-2)


def test_output_device():
    value, grads = fdp.value_and_grad(loss, devices=SLOTS, output_device="meta")(W, X, Y)
    assert value.device.type == grads.device.type == "meta"
    grads = fdp.grad(loss, devices=SLOTS, output_device="cpu")(W, X, Y)
    assert_close_tree(grads, oracle(loss, W, X, Y)[1])
