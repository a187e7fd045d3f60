"""Gradients of gradients through calls with collectives are those of one device, whatever threads have made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import EXECUTORS, each_executor
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import within

three = fdp.virtual_devices(3)
W, X = numbers(1) + 2, numbers(6, 1).abs()
Call = Callable[[Tensor, Tensor], Any]


def derivatives(call: Call, w: Tensor = W, x: Tensor = X, order: int = 3) -> Any:
    """Gradients up to an order; zeros where there is none."""
    own = w.clone().requires_grad_(), x.clone().requires_grad_()
    found: list[Any] = [call(*own)]
    for _ in range(order):
        total = torch.stack([out.sin().sum() for out in found[-1]]).sum()
        grads = torch.autograd.grad(total, own, create_graph=True, allow_unused=True, materialize_grads=True)
        found.append(grads)
    return found


def two_collectives(w: Tensor, x: Tensor) -> Tensor:
    """Neither needs the other, so that only their order tells which comes first."""
    h = torch.tanh(x * fdp.psum(x.sum(0))) * w
    return h + fdp.ppermute(h.sum(0), [(0, 1), (1, 2)])


def two_alone(w: Tensor, x: Tensor) -> Any:
    h = torch.tanh(x * x.sum(0)) * w
    sums = [torch.zeros_like(w), *[part.sum(0) for part in h.split(2)[:-1]]]
    return [torch.cat([part + other for part, other in zip(h.split(2), sums, strict=True)])]


@each_executor
@pytest.mark.parametrize("recorded", [0, 500])
def test_where_slot_0_runs_in_the_callers_thread(recorded: int, executor: Any):
    """Which has recorded more than the others, or less."""

    def call(w: Tensor, x: Tensor) -> Any:
        for _ in range(recorded):
            w.neg()
        shards: Any = fdp.parallel_apply(two_collectives, w, fdp.scatter(x, three), executor=executor)
        return [fdp.gather(shards, 0)]

    assert_close_tree(within(30, lambda: derivatives(call)), derivatives(two_alone))


@each_executor
def test_where_another_call_has_the_threads(executor: Any):
    """Of the second gradient, while another call of the same program goes on."""

    def second(inside: bool) -> Any:
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        out = fdp.dp_apply(two_collectives, w, x, three, executor=executor)
        found: list[Any] = []

        def differentiate() -> None:
            grads = torch.autograd.grad(out.sin().sum(), (w, x), create_graph=True)
            found.append(torch.autograd.grad(torch.stack([grad.sin().sum() for grad in grads]).sum(), (w, x)))

        def other(rows: Tensor) -> Tensor:
            for _ in range(50 * fdp.axis_index()):
                rows.neg().requires_grad_().neg()
            if fdp.psum(fdp.axis_index()) and fdp.axis_index() == 0:
                differentiate()
            return rows

        if inside:
            fdp.shard_map(other, devices=fdp.virtual_devices(2))(torch.ones(2))
        else:
            differentiate()
        return found[0]

    assert_close_tree(within(30, lambda: second(inside=True)), second(inside=False))


# ---------------------------------------------------------------- calls in calls


def inner(w: Tensor, x: Tensor) -> Any:
    h = w * x
    columns, rows = fdp.psum(h.sum(), "inner"), fdp.psum(h.sum(), "outer")
    roots = fdp.psum(h.sqrt().sum(), "outer")
    return (h * columns).sin().sum(), fdp.psum(columns * rows, "inner"), columns * rows, roots


def outer(executor: Any, inner_executor: Any) -> Call:
    two: Any = fdp.virtual_devices(2)

    def fn(w: Tensor, x: Tensor) -> Any:
        y, d, q, roots = fdp.dp_apply(
            *(inner, w, x, two),
            in_dims=1,
            axis_name="inner",
            out_dims=("sum", None, None, None),
            executor=inner_executor,
        )
        return y, d, q, fdp.psum(d * y, "outer"), roots

    return lambda w, x: fdp.dp_apply(fn, w, x, two, axis_name="outer", out_dims="list", executor=executor)


def of_blocks(w: Tensor, x: Tensor) -> Any:
    """`x` in two by two blocks: `h[o][i]` is on the slot o of the outer axis and i of the inner one."""
    h = [[w * block for block in rows.chunk(2, 1)] for rows in x.chunk(2)]
    columns = [h[o][0].sum() + h[o][1].sum() for o in range(2)]
    rows = [h[0][i].sum() + h[1][i].sum() for i in range(2)]
    d = [columns[o] * rows[0] + columns[o] * rows[1] for o in range(2)]
    y = [(h[o][0] * columns[o]).sin().sum() + (h[o][1] * columns[o]).sin().sum() for o in range(2)]
    return y, d, [columns[o] * rows[0] for o in range(2)], [d[0] * y[0] + d[1] * y[1]] * 2


@few(3)
@each_executor
@pytest.mark.parametrize("inner_executor", EXECUTORS)
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("output", range(4))
def test_nested(output: int, slot: int, inner_executor: Any, executor: Any):
    x = numbers(4, 4).abs()
    x[0, 0] = x[3, 2] = x[1, 3] = 0  # of the roots, which have no part in it
    call = outer(executor, inner_executor)
    if executor == "threads":
        with pytest.raises(
            RuntimeError, match=r"psum: executor='threads': a collective over axis 'outer'.*further out"
        ):
            call(W, x)
        return
    found = within(30, lambda: derivatives(lambda w, x: [call(w, x)[output][slot]], x=x, order=2))
    assert_close_tree(found, derivatives(lambda w, x: [of_blocks(w, x)[output][slot]], x=x, order=2))
