"""Gradients on a mesh: what nobody differentiates has no part in them, and gradients of gradients are whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.depth import few
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, same_at_all_scales

W = torch.tensor([1.0, 2.0], dtype=torch.float64)
X = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [0.5, 2.5]], dtype=torch.float64)
LAYOUTS = [Layout((1, 1), (2, 2)), Layout((2, 1), (3, 1))]


def fn(w: Tensor, x: Tensor) -> Any:
    total, roots = fdp.psum(((w * x).sum(0), (w * x).sqrt().sum(0)))
    sent = fdp.ppermute((w * x.square()).sum(0), [(0, 1)])
    return ((w * x * total).sin() + sent).sum(0), roots, fdp.pmax((w * x).sqrt().amax(0)), total


def from_outside(seat: Seat, i: int) -> Any:
    w = W.clone().requires_grad_()
    outs = fdp.dp_apply(fn, w * 1, seat.own(X), out_dims=("sum", None, None, None), **seat.on)
    (grad,) = torch.autograd.grad(outs[i].sin().sum(), w, create_graph=True)
    return {"whole": [grad, torch.autograd.grad(grad.sin().sum(), w)]}


def by_value_and_grad(seat: Seat) -> Any:
    def loss(w: Tensor, x: Tensor) -> Any:
        rows, roots, largest, total = fn(w, x)
        return rows.sum(), (roots, largest, total)

    options: Any = {"reduction": "sum", "aux_dims": None, **seat.on}
    return {"whole": fdp.value_and_grad(loss, has_aux=True, **options)(W, seat.own(X))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_the_slots(two: Pool, layout: Layout):
    found = same_at_all_scales(two, layout, by_value_and_grad)
    assert found["whole"][1].isfinite().all()


@pytest.mark.parametrize("output", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_outside(two: Pool, layout: Layout, output: int):
    found = same_at_all_scales(two, layout, from_outside, output)
    assert found["whole"][0].isfinite().all()


# ---- of calls in vmap


def batched(seat: Seat, how: str) -> Any:
    ws = torch.stack([W, 2 * W, W.cos()])

    def total(w: Tensor, factor: Tensor) -> Tensor:
        return fdp.dp_apply(lambda w, x: curve(w, x), w * factor, seat.own(X), out_dims="sum", **seat.on)

    def sum_of_all(ws: Tensor, factor: Tensor) -> Tensor:
        return torch.func.vmap(total, (0, None))(ws, factor).sum()

    if how == "backward":
        leaves = [ws.requires_grad_(), W.clone().requires_grad_()]
        return {"whole": torch.autograd.grad(sum_of_all(*leaves), leaves)}
    grad = torch.func.grad(sum_of_all, argnums=(0, 1))
    return {"whole": [grad(ws, W), torch.func.vmap(grad, (None, 0))(ws, ws)]}


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_of_a_batch_of_calls(two: Pool, how: str):
    same_at_all_scales(two, LAYOUTS[0], batched, how)


def refused(mesh: Any) -> list[str]:
    factors = W.clone().requires_grad_()
    x = torch.ones(2, dtype=torch.float64)
    calls = [
        lambda k: fdp.dp_apply(lambda _, x: (k * x).sum(), None, x, mesh, out_dims="sum"),
        lambda k: fdp.replicate(k, mesh)[0],
    ]
    found = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            torch.func.vmap(call)(factors)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_in_vmap(two: Pool):
    for captured, replicated in two(refused):
        assert "tensor that requires grad and is none of its arguments" in captured
        assert "inside of vmap a tensor stands for many" in replicated


# ---- what is made of a sum over processes is differentiated twice


def curve(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).tanh().sum()


def twice(seat: Seat, how: str, out_dims: Any) -> Any:
    def call(w: Tensor) -> Tensor:
        out = fdp.dp_apply(curve, w, seat.own(X), out_dims=out_dims, **seat.on)
        return out.square()  # so that its gradient depends on the rows of all

    if how == "torch.func":
        return {"whole": torch.func.grad(lambda w: torch.func.grad(call)(w).sin().sum())(W)}
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(w), w, create_graph=True)
    return {"whole": torch.autograd.grad(first.sin().sum(), w)}


@few(2)
@pytest.mark.parametrize("out_dims", ["sum", "mean", "max", None])
@pytest.mark.parametrize("how", ["autograd", "torch.func"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout((1, 2), (0, 4))])
def test_gradients_of_gradients(two: Pool, layout: Layout, how: str, out_dims: Any):
    same_at_all_scales(two, layout, twice, how, out_dims, one_device=out_dims == "sum", needs_rows=True)


# ---- arguments that the function does not use have no gradient


def unused(seat: Seat, case: str, create_graph: bool) -> Any:
    used, some, never = (W.clone().requires_grad_() for _ in range(3))

    def fn(params: Any, x: Tensor) -> Any:
        used, some, _ = params
        out = (used * x).sin().sum()
        if case == "collective":
            out = out * fdp.psum(x.sum())
        return out + (some * x).sum() if case == "some" and fdp.axis_index() else out

    out = fdp.dp_apply(fn, (used, some, never), seat.own(X), out_dims="sum", **seat.on)
    grads = torch.autograd.grad(out, [used, some, never], create_graph=create_graph, allow_unused=True)
    is_there = [grad is not None for grad in grads]
    second = torch.autograd.grad(grads[0].sum(), used) if create_graph else ()
    return {"whole": ([grad for grad in grads if grad is not None], is_there, second)}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", ["plain", "collective", "some"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout((1, 2), (0, 4))])
def test_what_no_process_uses_has_no_gradient(two: Pool, layout: Layout, case: str, create_graph: bool):
    found = same_at_all_scales(two, layout, unused, case, create_graph, one_device=case == "plain", needs_rows=True)
    if found is not None:
        assert found["whole"][1] == [True, case == "some", False]
