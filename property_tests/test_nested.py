"""Calls inside of calls: each collective is that of its own axis, whichever kinds of calls are around it."""

import functools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.collectives.test_nested import GRADIENTS, LIMIT, MAPS, Case, Mapped, build, expected
from tests.common.threads import within

EXECUTORS = ("sequential", "threads", "auto")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two or three levels; a gradient may be the innermost."""
    levels = draw(st.integers(2, 3))

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(sorted(draw(st.sets(st.integers(0, most), min_size=least))))

    kinds = [draw(st.sampled_from(MAPS)) for _ in range(levels - 1)]
    used, executors = some(1, levels - 1), [draw(st.sampled_from(EXECUTORS)) for _ in range(levels)]
    if 0 in used:  # beside others a collective of an axis further out is refused
        executors[0] = "auto"
    return Case(
        (*kinds, draw(st.sampled_from(MAPS + GRADIENTS))),
        used,
        some(0, levels - 2),
        tuple(executors),
        tuple(draw(st.integers(1, 3)) for _ in range(levels)),
    )


@given(cases(), st.booleans())
def test_nested_calls_are_one_computation(case: Case, runs_again: bool):
    x = torch.rand(2 * torch.Size(case.counts).numel(), dtype=torch.float64).requires_grad_()
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def results(fn: Mapped) -> tuple[Tensor, ...]:
        y = fn(w, x)
        return (y.detach(), *torch.autograd.grad(y.sin().sum(), (w, x)))

    fn = build(case)
    if runs_again:
        within(LIMIT, lambda: results(fn))
    torch.testing.assert_close(within(LIMIT, lambda: results(fn)), results(functools.partial(expected, case)))
