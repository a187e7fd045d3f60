"""Gradient functions whose loss makes calls inside that close over an argument, or over what slots have exchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers

TWO = fdp.virtual_devices(2)
W, X = numbers(3), numbers(6, 3)
Loss = Callable[[Tensor, Tensor], Tensor]


def by_collective(w: Tensor, x: Tensor) -> Tensor:
    return fdp.shard_map(
        lambda r: fdp.psum((r @ w).sin().sum(), "inner"), devices=TWO, out_dims=None, axis_name="inner"
    )(x)


def two_calls_deep(w: Tensor, x: Tensor) -> Tensor:
    def on_slot(rows: Tensor) -> Tensor:
        return fdp.psum(by_collective(w, rows), "outer")

    return fdp.shard_map(on_slot, devices=TWO, out_dims=None, axis_name="outer")(x)


def without_collective(w: Tensor, x: Tensor) -> Tensor:
    parts: Any = fdp.parallel_apply(lambda r: (r @ w).sin().sum(), fdp.scatter(x, TWO))
    return torch.stack(parts.shards).sum()


def also_outside(w: Tensor, x: Tensor) -> Tensor:
    return by_collective(w, x) * w.exp().sum()


def alone(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sin().sum()


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "psum": (by_collective, alone),
    "two-calls-deep": (two_calls_deep, alone),
    "parallel_apply": (without_collective, alone),
    "also-outside": (also_outside, lambda w, x: alone(w, x) * w.exp().sum()),
}


@few(3)
@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_an_argument(name: str, needs: bool, slots: int, executor: Any):
    """Also if it requires grad itself, as the parameters of a module do."""
    loss, same = LOSSES[name]
    w = nn.Parameter(W) if needs else W
    step = fdp.grad(loss, devices=fdp.virtual_devices(slots), reduction="sum", executor=executor)
    want = torch.func.grad(lambda w: sum(same(w, part) for part in X.split(6 // slots)))(W)
    step(w, X)
    found = step(w, X)  # of a function that is known to meet
    assert_close_tree(found.detach(), want)
    assert found.requires_grad == needs
    if needs:
        assert_close_tree(
            torch.autograd.grad(found.sin().sum(), w)[0],
            torch.func.grad(
                lambda w: torch.func.grad(lambda w: sum(same(w, part) for part in X.split(6 // slots)))(w).sin().sum()
            )(W),
        )


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_what_slots_have_exchanged(how: str, executor: Any):
    """Threads number what they record each for itself, so that the numbers do not tell what needs what."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        s = fdp.psum((x @ w).sum())
        for _ in range(40):  # the slot's own thread has recorded more than those of the slots inside
            s = s + 0 * w.sum()
        return fdp.shard_map(lambda r: fdp.psum((r * s).sum(), "inner"), devices=TWO, out_dims=None, axis_name="inner")(
            x
        )

    want = torch.func.grad(lambda w: ((X @ w).sum() * X).sum())(W)
    for _ in range(3):
        if how == "grad":
            found = fdp.grad(loss, devices=TWO, reduction="sum", executor=executor)(W, X)
            assert not found.requires_grad
        else:
            w = W.clone().requires_grad_()
            fdp.dp_apply(loss, w, X, TWO, out_dims="sum", executor=executor).backward()
            found = w.grad
        assert_close_tree(found, want)
