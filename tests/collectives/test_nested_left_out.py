"""Nested calls over two axes, of which some slots use less than others: gradients as in one graph on one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

W, X = torch.tensor(0.5, dtype=torch.float64), numbers(8)
FIRST, SECOND = X.chunk(2)
SLOTS = fdp.virtual_devices(2)
Loss = Callable[[Tensor, Tensor], Tensor]


def is_first() -> bool:
    return fdp.axis_index("outer") == 0


def part(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).exp().sum()


def nested(w: Tensor, x: Tensor, *, drops: bool = False) -> Tensor:
    """A sum over both axes; where it `drops`, the second outer slot uses its own part only."""

    def each(w: Tensor, x: Tensor) -> Tensor:
        inner = fdp.psum(part(w, x), "inner")
        both = fdp.psum(inner, "outer")
        return (both if is_first() or not drops else inner) * x.sum()

    return fdp.dp_apply(each, w, x, SLOTS, out_dims="sum", axis_name="inner")


def one_drops_the_call(w: Tensor, x: Tensor) -> Tensor:
    result = nested(w, x)
    return result if is_first() else (w * x).sum()


def one_drops_it_inside(w: Tensor, x: Tensor) -> Tensor:
    return nested(w, x, drops=True)


def one_detaches(w: Tensor, x: Tensor) -> Tensor:
    return nested(w if is_first() else w.detach(), x) * w


EXPECTED: dict[Loss, Callable[[Tensor], Tensor]] = {
    one_drops_the_call: lambda w: part(w, X) * FIRST.sum() + (w * SECOND).sum(),
    one_drops_it_inside: lambda w: part(w, X) * FIRST.sum() + part(w, SECOND) * SECOND.sum(),
    one_detaches: lambda w: (part(w, FIRST) + part(w.detach(), SECOND)) * w * X.sum(),
}
each_loss = pytest.mark.parametrize("loss", EXPECTED, ids=lambda loss: loss.__name__)


def expected(loss: Loss) -> tuple[Tensor, Tensor]:
    w = W.clone().requires_grad_()
    value = EXPECTED[loss](w)
    return value.detach(), torch.autograd.grad(value, w)[0]


@each_loss
def test_a_gradient_function_around(loss: Loss):
    call = fdp.value_and_grad(loss, devices=SLOTS, reduction="sum", axis_name="outer")
    assert_close_tree(call(W, X), expected(loss))


@each_loss
def test_a_gradient_from_outside(loss: Loss):
    w = W.clone().requires_grad_()
    value = fdp.dp_apply(loss, w, X, SLOTS, out_dims="sum", axis_name="outer")
    assert_close_tree((value, *torch.autograd.grad(value, w)), expected(loss))
