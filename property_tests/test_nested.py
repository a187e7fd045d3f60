"""Calls inside of calls: each collective is that of its own axis, whichever kinds of calls are around it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fdp
from tests.common.threads import within

EXECUTORS = ("sequential", "threads", "auto")
LIMIT = 30.0


class Case(NamedTuple):
    """Kinds of calls from the outside in; axes that the innermost function and those around it use."""

    kinds: tuple[str, ...]
    used: tuple[int, ...]
    between: tuple[int, ...]
    executors: tuple[Any, ...]
    counts: tuple[int, ...]


MAPS, GRADIENTS = ("dp_apply", "shard_map", "parallel_apply"), ("grad", "value_and_grad")


Mapped = Callable[[Tensor, Tensor], Tensor]


def mapped(kind: str, fn: Mapped, devices: Sequence[torch.device], options: Any) -> Mapped:
    if kind == "dp_apply":
        return lambda w, x: fdp.dp_apply(fn, w, x, devices, **options)
    if kind == "shard_map":
        return fdp.shard_map(fn, devices=devices, in_dims=(None, 0), **options)
    if kind == "parallel_apply":
        return lambda w, x: fdp.gather(fdp.parallel_apply(fn, w, fdp.scatter(x, devices), **options), 0)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return fn(w, x).mean()

    if kind == "grad":
        return lambda w, x: fdp.grad(loss, devices=devices, **options)(w, x) * x
    found = fdp.value_and_grad(loss, devices=devices, **options)
    return lambda w, x: functools.reduce(torch.mul, found(w, x)) * x


def build(case: Case) -> Mapped:
    def leaf(w: Tensor, x: Tensor) -> Tensor:
        h = w * x
        for axis in case.used:
            h = h + fdp.psum(h.sum(), f"axis {axis}") * 0.1 * h
        return torch.tanh(h)

    fn: Mapped = leaf
    for axis in reversed(range(len(case.kinds))):
        options = {"executor": case.executors[axis], "axis_name": f"axis {axis}"}
        fn = mapped(case.kinds[axis], fn, fdp.virtual_devices(case.counts[axis]), options)
        if axis:

            def around(w: Tensor, x: Tensor, inside: Mapped = fn, axis: int = axis - 1) -> Tensor:
                y = inside(w, x)
                return y + fdp.pmean(y.sum(), f"axis {axis}") if axis in case.between else y

            fn = around
    return fn


def expected(case: Case, w: Tensor, x: Tensor) -> Tensor:
    """All slots of all axes as dimensions of one tensor; a gradient inside is that of the sum over all slots."""
    x = x.reshape(*case.counts, -1)
    takes_gradient = case.kinds[-1] in GRADIENTS
    own = w.expand(*case.counts[:-1], 1, 1).clone() if takes_gradient else w
    h = own * x
    for axis in case.used:
        h = h + h.sum((axis, -1), keepdim=True) * 0.1 * h
    y = torch.tanh(h)
    if takes_gradient:
        loss = y.mean((-1, -2), keepdim=True)
        (grad,) = torch.autograd.grad(loss.sum(), own, create_graph=True)
        y = grad * x * (loss if case.kinds[-1] == "value_and_grad" else 1)
    for axis in reversed(case.between):
        y = y + y.sum(tuple(range(axis + 1, y.ndim)), keepdim=True).mean(axis, keepdim=True)
    return y.reshape(-1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two or three levels; a gradient may be the innermost."""
    levels = draw(st.integers(2, 3))

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(sorted(draw(st.sets(st.integers(0, most), min_size=least))))

    kinds = [draw(st.sampled_from(MAPS)) for _ in range(levels - 1)]
    return Case(
        (*kinds, draw(st.sampled_from(MAPS + GRADIENTS))),
        some(1, levels - 1),
        some(0, levels - 2),
        tuple(draw(st.sampled_from(EXECUTORS)) for _ in range(levels)),
        tuple(draw(st.integers(1, 3)) for _ in range(levels)),
    )


def is_refused(case: Case) -> bool:
    """Whether shards beside others come to a collective over their axis in a call with several slots inside."""
    beside = case.executors[0] == "threads" and case.counts[0] > 1  # the others run in order, inside of it
    return beside and 0 in case.used and max(case.counts[1:]) > 1


@given(cases(), st.booleans())
def test_nested_calls_are_one_computation(case: Case, runs_again: bool):
    x = torch.rand(2 * torch.Size(case.counts).numel(), dtype=torch.float64).requires_grad_()
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def results(fn: Mapped) -> tuple[Tensor, ...]:
        y = fn(w, x)
        return (y.detach(), *torch.autograd.grad(y.sin().sum(), (w, x)))

    fn = build(case)
    if is_refused(case):
        with pytest.raises(RuntimeError, match=r"executor='threads': a collective over axis 'axis 0'.*further out"):
            within(LIMIT, lambda: results(fn))
        return
    if runs_again:
        within(LIMIT, lambda: results(fn))
    torch.testing.assert_close(within(LIMIT, lambda: results(fn)), results(functools.partial(expected, case)))
