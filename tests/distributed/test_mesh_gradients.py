"""Gradients on a mesh: what nobody differentiates has no part in them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
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
    return {"whole": torch.autograd.grad(outs[i].sin().sum(), w)}


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


# ---- arguments that the function does not use have no gradient


def unused(seat: Seat, case: str) -> Any:
    used, some, never = (W.clone().requires_grad_() for _ in range(3))

    def fn(params: Any, x: Tensor) -> Any:
        used, some, _ = params
        out = (used * x).sin().sum()
        if case == "collective":
            out = out * fdp.psum(x.sum())
        return out + (some * x).sum() if case == "some" and fdp.axis_index() else out

    out = fdp.dp_apply(fn, (used, some, never), seat.own(X), out_dims="sum", **seat.on)
    grads = torch.autograd.grad(out, [used, some, never], allow_unused=True)
    is_there = [grad is not None for grad in grads]
    return {"whole": ([grad for grad in grads if grad is not None], is_there)}


@pytest.mark.parametrize("case", ["plain", "collective", "some"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout((1, 2), (0, 4))])
def test_what_no_process_uses_has_no_gradient(two: Pool, layout: Layout, case: str):
    found = same_at_all_scales(two, layout, unused, case, one_device=case == "plain", needs_rows=True)
    if found is not None:
        assert found["whole"][1] == [True, case == "some", False]
