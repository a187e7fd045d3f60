"""Repeats of one call give the same bits, in gradients from outside too: parts are added in the order of shards."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SIX = fdp.virtual_devices(6)


def predict(params: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return torch.tanh(hidden @ params["w"] * params["b"])


def by_backward(params: dict[str, Tensor], x: Tensor, executor: Any) -> list[Tensor]:
    out = fdp.dp_apply(predict, params, x, SIX, executor=executor)
    return list(torch.autograd.grad(out.square().sum(), [*params.values(), x]))


def twice(params: dict[str, Tensor], x: Tensor, executor: Any) -> list[Tensor]:
    own = [*params.values(), x]
    out = fdp.dp_apply(predict, params, x, SIX, executor=executor)
    grads = torch.autograd.grad(out.square().sum(), own, create_graph=True)
    return list(torch.autograd.grad(torch.stack([grad.sin().sum() for grad in grads]).sum(), own))


def through_gradients(params: dict[str, Tensor], x: Tensor, executor: Any) -> list[Tensor]:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return predict(params, x).square().mean()

    grads = fdp.grad(loss, devices=SIX, executor=executor)(params, x)
    total = torch.stack([grad.sin().sum() for grad in grads.values()]).sum()
    return list(torch.autograd.grad(total, [*params.values(), x]))


def record(rounds: int) -> None:
    """Let some threads of a call record more than others."""
    one = torch.ones((), requires_grad=True)

    def fn(_: Any, i: Tensor) -> Tensor:
        for _ in range(40 * int(i) * (rounds % 3)):
            one.neg()
        return i

    fdp.dp_apply(fn, None, torch.arange(6), SIX, executor="threads")


@pytest.mark.parametrize("times", [5, pytest.param(15, marks=pytest.mark.deep)])
@pytest.mark.parametrize("executor", ["sequential", "threads", "auto"])
@pytest.mark.parametrize("how", [by_backward, twice, through_gradients])
def test_gradients_from_outside_are_the_same_bits(how: Any, executor: Any, times: int):
    params = {"w": numbers(8, 8).float().requires_grad_(), "b": numbers(8).float().requires_grad_()}
    x = (numbers(60, 8) + 0.1).float().requires_grad_()
    with many_cores(6):
        first = how(params, x, executor)
        for i in range(times):
            record(i)
            assert all(torch.equal(a, b) for a, b in zip(how(params, x, executor), first, strict=True)), i


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_sparse_gradients_from_outside(executor: Any):
    w = numbers(10, 3).requires_grad_()
    rows = torch.arange(8) % 5

    def fn(w: Tensor, rows: Tensor) -> Tensor:
        return F.embedding(rows, w, sparse=True)

    fdp.dp_apply(fn, w, rows, SIX[:3], executor=executor).square().sum().backward()
    assert w.grad is not None
    assert w.grad.is_sparse
    expected = torch.autograd.grad(F.embedding(rows, w).square().sum(), w)[0]
    torch.testing.assert_close(w.grad.to_dense(), expected)
