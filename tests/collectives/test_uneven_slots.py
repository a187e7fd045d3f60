"""Gradients of functions that depend on their inputs in some slots only: all slots meet in the backward all the same.

A function here is a generator that yields what is to be summed over slots. One device runs those of all slots in turn,
in one graph.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_executor
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

Sums = Generator[Tensor, Tensor, Tensor]
Fn = Callable[[int, Tensor, Tensor], Sums]
W, X = torch.tensor(0.5, dtype=torch.float64), numbers(6)
each_slots = pytest.mark.parametrize("slots", [2, 3])


def detached(i: int, w: Tensor, x: Tensor) -> Sums:
    total = yield ((w if i == 0 else w.detach()) * x).exp().sum()
    return total * x.sum()


def constant(i: int, w: Tensor, x: Tensor) -> Sums:
    total = yield (w * x).exp().sum() if i else x.sum()
    return total**2 * w


def dropped(i: int, w: Tensor, x: Tensor) -> Sums:
    total = yield (w * x).exp().sum()
    return total * x.sum() if i == 0 else (w * x).sin().sum()


def no_gradient(i: int, w: Tensor, x: Tensor) -> Sums:
    total = yield (w * x).exp().sum()
    return total * x.sum() if i else x.sum()


def in_the_middle(i: int, w: Tensor, x: Tensor) -> Sums:
    first = yield (w * x).exp().sum()
    second = yield (first.sin() if i else first.detach()) * x.sum()
    third = yield second * w if i == 0 else second.detach()
    return third * x.mean()


def other_branches(i: int, w: Tensor, x: Tensor) -> Sums:
    first = yield (w * x).exp().sum()
    second = yield x.sum() if i else first * w
    yield first.detach()
    return (first if i else second) * w


FUNCTIONS = (detached, constant, dropped, no_gradient, in_the_middle, other_branches)
each_function = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)


def on_slot(fn: Fn, w: Tensor, x: Tensor) -> Tensor:
    running = fn(fdp.axis_index("slots"), w, x)
    value = next(running)
    try:
        while True:
            value = running.send(fdp.psum(value, "slots"))
    except StopIteration as end:
        return end.value


def together(running: list[Sums]) -> list[Tensor]:
    """What several return that are summed together."""
    values = [next(each) for each in running]
    while True:
        total, values, found = torch.stack(values).sum(), [], []
        for each in running:
            try:
                values.append(each.send(total))
            except StopIteration as end:
                found.append(end.value)
        if found:
            return found


def expected(fn: Fn, slots: int) -> tuple[Tensor, Tensor]:
    w = W.clone().requires_grad_()
    value = torch.stack(together([fn(i, w, x) for i, x in enumerate(X.chunk(slots))])).sum()
    return value.detach(), torch.autograd.grad(value, w)[0]


@each_executor
@each_slots
@each_function
def test_the_gradient_of_a_loss(fn: Fn, slots: int, executor: Any):
    call = fdp.value_and_grad(
        lambda w, x: on_slot(fn, w, x),
        devices=fdp.virtual_devices(slots),
        reduction="sum",
        executor=executor,
        axis_name="slots",
    )
    found = call(W, X)
    assert_close_tree(found, expected(fn, slots))
    assert not any(x.requires_grad for x in found)
    with torch.inference_mode():  # by torch.func
        assert_close_tree(call(W, X), found)


@each_executor
@each_slots
@each_function
def test_a_gradient_function_inside_says_who_does_not_come(fn: Fn, slots: int, executor: Any):
    """There slots meet in the backward themselves, and one whose loss does not lead there does not come."""

    def each(w: Tensor, x: Tensor) -> Tensor:
        return fdp.grad(lambda w, x: on_slot(fn, w, x), reduction="sum")(w, x)

    match = "psum in shard . waits for .*This is in a gradient.*needs a result that depends on what is differentiated"
    with pytest.raises(RuntimeError, match=match):
        fdp.dp_apply(each, W, X, fdp.virtual_devices(slots), out_dims="sum", executor=executor, axis_name="slots")


@each_executor
def test_a_slot_that_records_nothing(executor: Any):
    """Its sum is a constant for itself, and its part in that of the others has no gradient."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(fdp.axis_index() == 0):
            total = fdp.psum(w * x.sum())
        assert total.requires_grad == (fdp.axis_index() == 0)
        return total * w

    call = fdp.grad(loss, devices=fdp.virtual_devices(2), reduction="sum", executor=executor)
    first, _ = X.chunk(2)
    # total * w in both slots; in that of slot 0 the part of slot 0 has a gradient
    assert_close_tree(call(W, X), 2 * W * X.sum() + W * first.sum())
