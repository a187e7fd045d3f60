"""Collectives differentiated inside, by torch and by fdp, and inside and outside at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import (
    Case,
    W,
    X,
    cotangents,
    each_case,
    each_executor,
    local,
    plain,
    product,
)
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers


def inside_func(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    return torch.func.grad(loss)(w)


def inside_vjp(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    value, vjp, *_ = torch.func.vjp(loss, w)
    return vjp(torch.ones_like(value))[0]


def inside_jacrev(loss: Callable[[Tensor], Tensor], w: Tensor) -> Any:
    return torch.func.jacrev(loss)(w)


def inside_fdp(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    return fdp.grad(lambda w: loss(w), reduction="sum", axis_name="inner")(w)


INSIDE = (inside_func, inside_vjp, inside_jacrev, inside_fdp)


@few(3)
@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("inside", INSIDE)
@each_case
def test_inside(case: Case, inside: Callable[..., Tensor], n: int, executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            out = case.call(local(case, w, x)) * w.sum()
            return (out * (numbers(*out.shape) + fdp.axis_index())).sum()

        return inside(loss, w)

    found = fdp.dp_apply(fn, W, X, fdp.virtual_devices(n), executor=executor, out_dims="list")
    ws = [W.clone().requires_grad_() for _ in range(n)]
    outs = plain(case, n)(ws, X)
    assert_close_tree(list(found), list(torch.autograd.grad(product(outs, cotangents(outs)), ws)))


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extreme", [fdp.pmax, fdp.pmin])
def test_extremes_cannot_be_differentiated(extreme: Any, n: int, executor: Any):
    devices = fdp.virtual_devices(n)
    w = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        fdp.dp_apply(lambda w, x: extreme(w) * x, w, torch.ones(3), devices, executor=executor).sum().backward()
    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        fdp.grad(lambda w, x: extreme(w) * x.sum(), devices=devices, executor=executor)(w.detach(), torch.ones(3))
    mapped = fdp.shard_map(lambda x: extreme(x.sum()), devices=devices, out_dims="sum", executor=executor)
    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        torch.func.grad(mapped)(torch.ones(3))


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extreme", [fdp.pmax, fdp.pmin])
def test_extremes_of_what_is_detached(extreme: Any, n: int, executor: Any):
    w = torch.ones((), requires_grad=True)
    out = fdp.dp_apply(
        lambda w, x: extreme(w.detach()) * w * x, w, torch.ones(3), fdp.virtual_devices(n), executor=executor
    )
    out.sum().backward()
    assert w.grad is not None
    assert w.grad.item() == 3.0
