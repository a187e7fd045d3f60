"""Derivatives through collectives over processes, whatever a slot or a process uses of their results."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.numbers import numbers
from tests.distributed.pool import Failure, Pool
from tests.distributed.scales import Layout, Seat, same_at_all_scales

Loss = Callable[[Tensor, Tensor], Tensor]
LAYOUTS = [Layout((1, 1), (3, 2)), Layout((2, 2), (7, 4)), Layout((1, 2), (2, 3))]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.slots} slots, {layout.rows} rows")


def is_late() -> bool:
    """Whether this slot is one of the last: in these layouts, of process 1."""
    return fdp.axis_index() >= fdp.axis_size() / 2


def batch_norm(w: Tensor, x: Tensor) -> Tensor:
    z = x @ w
    count = fdp.psum(len(x))
    mean = fdp.psum(z.sum(0)) / count
    variance = fdp.psum((z - mean).square().sum(0)) / count
    return torch.tanh((z - mean) / (variance + 1e-5).sqrt() * mean).square().sum(1).mean()


def contrastive(w: Tensor, x: Tensor) -> Tensor:
    z = x @ w
    return (z @ fdp.all_gather(z).t()).logsumexp(1).mean()


def unused(w: Tensor, x: Tensor) -> Tensor:
    """Results that some slots use, or nobody, whose gradient would be NaN."""
    z = (x @ w).tanh()
    total, squares = fdp.psum(z.sum(0)), fdp.psum((z * z).sum(0))
    fdp.psum((z * 0).sqrt().sum())
    again = fdp.psum((z * total).sum(0))
    if is_late():
        return (z * squares).sum(1).mean() + (again * z).mean()
    return (z * total).sum(1).mean() + z.mean()


def lonely(w: Tensor, x: Tensor) -> Tensor:
    """The loss of some slots depends on nothing."""
    z = x @ w
    total = fdp.psum(z.tanh().sum(0))
    more = fdp.psum((z * total).sum(0))
    return x.mean() if is_late() else (z * more).mean()


def in_another_order(w: Tensor, x: Tensor) -> Tensor:
    z = x @ w
    a, b = fdp.psum(z.sin().sum(0)), fdp.psum(z.cos().sum(0))
    return ((a * z).sin() * b * z if is_late() else (b * z).sin() * a * z).mean()


def nested(w: Tensor, x: Tensor) -> Tensor:
    """A call in each slot, whose slots meet those of other processes too."""

    def inner(w: Tensor, x: Tensor) -> Tensor:
        z = (x @ w).tanh()
        return z.sum() * fdp.psum(fdp.psum(z.sum(), "inner"), "data")

    return fdp.dp_apply(inner, w, x, fdp.virtual_devices(2), out_dims="sum", axis_name="inner", weights=None) / len(x)


def in_an_exchange(w: Tensor, x: Tensor) -> Tensor:
    """A gradient inside, of a loss with collectives."""
    own = torch.func.grad(lambda w: 3 * batch_norm(w, x))(w)
    return fdp.psum(own).square().sum() / 3


LOSSES = [batch_norm, contrastive, unused, lonely, in_another_order, nested, in_an_exchange]
each_loss = pytest.mark.parametrize("loss", LOSSES)


def parameters() -> Tensor:
    return numbers(3, 4).requires_grad_()


def rows(seat: Seat, layout: Layout) -> Tensor:
    return seat.own(numbers(sum(layout.rows), 3).sin() + 1)


def of_second_order(w: Tensor, x: Tensor) -> Tensor:
    """A gradient of a gradient, both inside, of a loss with collectives."""

    def inner(w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: batch_norm(w, x))(w).square().sum()

    return torch.func.grad(inner)(w).square().sum() + (w * w).sum()


LOSSES.append(of_second_order)


def gradients(seat: Seat, loss: Loss, layout: Layout, microbatches: int) -> Any:
    options: Any = {"microbatches": microbatches, **seat.on}
    return {"whole": fdp.value_and_grad(loss, **options)(parameters().detach(), rows(seat, layout))}


@each_layout
@each_loss
def test_gradient_functions(two: Pool, loss: Loss, layout: Layout):
    if loss is nested and min(layout.sizes) < 2:
        pytest.skip("each slot needs two rows")
    same_at_all_scales(two, layout, gradients, loss, layout, 1, meets=True)


@pytest.mark.parametrize("loss", [batch_norm, contrastive])
def test_microbatches(two: Pool, loss: Loss):
    same_at_all_scales(two, LAYOUTS[1], gradients, loss, LAYOUTS[1], 2)


@pytest.mark.parametrize("loss", [batch_norm, contrastive])
def test_one_device(two: Pool, loss: Loss):
    same_at_all_scales(two, LAYOUTS[1], gradients, loss, LAYOUTS[1], 1, one_device=True)


def from_outside(seat: Seat, loss: Loss, layout: Layout) -> Any:
    """A call without gradients of its own: process 1 uses one of its results only."""
    x, w = rows(seat, layout), parameters()
    outs = fdp.dp_apply(loss, w, x, out_dims="list", **seat.on)
    if len(outs) == sum(layout.slots):  # one process
        used = [*outs[: layout.slots[0]], outs[-1]]
    else:
        used = outs if seat.start == 0 else outs[-1:]
    total = torch.stack([part.sin() for part in used]).sum()
    return {"whole": torch.autograd.grad(total, w)}


@each_layout
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not lonely])
def test_from_outside(two: Pool, loss: Loss, layout: Layout):
    if loss is nested and min(layout.sizes) < 2:
        pytest.skip("each slot needs two rows")
    same_at_all_scales(two, layout, from_outside, loss, layout, meets=True)


def skipping(mesh: Any, what: str) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        z = x @ w
        odd = mesh.rank == 1
        if what == "the first" and odd:
            return (z * fdp.psum(z.sin())).mean()
        a = fdp.psum(z.sum())
        if what == "raises" and odd:
            raise ValueError("mine")
        if what == "the backward raises" and odd:
            z.register_hook(lambda grad: {}["mine"])
        if what == "the last" and odd:
            return (z * a).mean()
        if what == "another shape" and odd:
            return (z * fdp.psum(z.sum(0))).mean()
        if what == "another kind" and odd:
            return (z * fdp.all_gather(z).sum()).mean()
        return (z * a * fdp.psum(z.sin())).mean()

    fdp.value_and_grad(loss, devices=mesh)(parameters().detach(), numbers(4, 3))


SKIPS = {
    "the first": r"psum: the processes do not fit together",
    "the last": r"do not fit together|different places",
    "another shape": r"psum: the processes do not fit together: .*\[2, 4\].*\[4\]",
    "another kind": "different places: psum in process 0, all_gather in process 1",
    "raises": "mine",
    "the backward raises": "mine",
}


@pytest.mark.parametrize("what", SKIPS)
def test_what_one_process_skips_or_changes_is_an_error_in_both(two: Pool, what: str):
    for found in two.outcomes(skipping, 2, what):
        assert isinstance(found, Failure)
        assert "could not reach" not in found.message, found
        assert re.search(SKIPS[what], found.message), found
    same_at_all_scales(two, LAYOUTS[1], gradients, batch_norm, LAYOUTS[1], 1)
