"""Inputs that nothing depends on, in a gradient from outside: torch refuses, and the graph stays as on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

X = numbers(5)
each_slots = pytest.mark.parametrize("slots", [1, 2, 3])
each_kind = pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "results"])
Pair = tuple[Tensor, Tensor]


def one(w: Tensor, v: Tensor) -> Pair:
    """What only `w` counts in, and what only `v` does."""
    return (w * X).exp().sum(), (v * X).exp().sum()


def several(slots: int) -> Callable[[Tensor, Tensor], Pair]:
    def each(params: Pair, x: Tensor) -> Pair:
        w, v = params
        return fdp.psum((w * x).exp().sum()), (v * x).exp().sum()

    def call(w: Tensor, v: Tensor) -> Pair:
        devices = fdp.virtual_devices(slots)
        return fdp.dp_apply(each, (w, v), X, devices, out_dims=(None, "sum"))

    return call


def inputs(*, leaves: bool) -> Pair:
    w, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 0.25))
    return (w, v) if leaves else (w * 1, v * 1)


@each_kind
@each_slots
def test_the_graph_is_there_after_an_unused_input(slots: int, leaves: bool):
    found = []
    for fn in (one, several(slots)):
        w, v = inputs(leaves=leaves)
        loss, _ = fn(w, v)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="appears to not have been used"):
                torch.autograd.grad(loss, v)
        assert torch.autograd.grad(loss, v, allow_unused=True) == (None,)
        found.append(torch.autograd.grad(loss, w))
    assert_close_tree(found[1], found[0])


@each_kind
@each_slots
@pytest.mark.parametrize("asked", [(0,), (0, 1)])
def test_the_graph_is_gone_after_a_gradient(slots: int, leaves: bool, asked: Sequence[int]):
    for fn in (one, several(slots)):
        both: Any = inputs(leaves=leaves)
        loss, _ = fn(*both)
        torch.autograd.grad(loss, [both[i] for i in asked], allow_unused=True)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(loss, both[0])
