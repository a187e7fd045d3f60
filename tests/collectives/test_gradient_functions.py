"""Gradient functions of fdp whose loss calls collectives, in microbatches too."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import W, X, each_count, each_executor
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers


@each_executor
@each_count
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_a_loss_that_normalises_by_psum_is_that_of_one_device(rows: int, n: int, executor: Any):
    x, keep = numbers(rows, 3), (torch.arange(rows) % 3 != 1).double()

    def loss(w: Tensor, x: Tensor, keep: Tensor, total: Any = fdp.psum) -> Tensor:
        return ((x @ w).square() * keep).sum() / total(keep.sum())

    options: Any = {"devices": fdp.virtual_devices(n), "reduction": "sum", "executor": executor}
    value, grad = fdp.value_and_grad(loss, **options)(W, x, keep)
    assert_close_tree((grad, value), torch.func.grad_and_value(loss)(W, x, keep, lambda tokens: tokens))


@each_executor
@each_count
def test_a_mean_loss_through_centred_data(n: int, executor: Any):
    """A statistic of the whole batch inside, and rows of shards that differ."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        return (y - fdp.pmean(y.mean(0), weight="rows")).square().mean()

    def whole(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        return (y - y.mean(0)).square().mean()

    found = fdp.value_and_grad(loss, devices=fdp.virtual_devices(n), executor=executor)(W, X)
    grad, value = torch.func.grad_and_value(whole)(W, X)
    assert_close_tree(found, (value, grad))
    attached = W.clone().requires_grad_()
    _, first = fdp.value_and_grad(loss, devices=fdp.virtual_devices(n), executor=executor)(attached, X)
    (second,) = torch.autograd.grad(first.square().sum(), attached)
    assert_close_tree(second, torch.func.grad(lambda w: torch.func.grad(whole)(w, X).square().sum())(W))
    under = torch.func.grad(lambda w: fdp.grad(loss, devices=fdp.virtual_devices(n))(w, X).square().sum())
    assert_close_tree(under(W), second)


@each_executor
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches(microbatches: int, executor: Any):
    x = numbers(12, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum() / fdp.psum(len(x))

    options: Any = {"devices": fdp.virtual_devices(2), "reduction": "sum", "executor": executor}
    found = fdp.value_and_grad(loss, microbatches=microbatches, **options)(W, x)
    grad, value = torch.func.grad_and_value(lambda w: (x @ w).square().mean() * microbatches)(W)
    assert_close_tree(found, (value, grad))
