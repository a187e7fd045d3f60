"""Random numbers and settings of torch in functions with collectives."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import EXECUTORS, each_executor
from tests.collectives.cases import EXECUTORS, leaves, ring
from tests.common.threads import side_by_side



# ---------------------------------------------------------------- randomness


def noisy(w: Tensor, x: Tensor) -> Tensor:
    mask = torch.nn.functional.dropout(torch.ones(len(x), 20))
    total = fdp.psum(mask.sum())
    return torch.cat([mask, torch.rand(len(x), 2), torch.randn(len(x), 1) * total], 1) * w


def test_seeded():
    x, w = torch.ones(6), torch.ones((), requires_grad=True)
    before = torch.get_rng_state()
    devices = fdp.virtual_devices(3)
    for seed in (0, 1):
        runs = [fdp.dp_apply(noisy, w, x, devices, seed=seed, executor=e) for e in EXECUTORS for _ in range(5)]
        assert all(torch.equal(run, runs[0]) for run in runs)
        assert torch.equal(torch.get_rng_state(), before)
        parts = runs[0].split(2)
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(parts, 2))
        runs[0].sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(fdp.dp_apply(noisy, w, x, devices, seed=0), fdp.dp_apply(noisy, w, x, devices, seed=1))


def test_seeded_draws_are_those_without_collectives():
    def plainly(w: Any, x: Tensor) -> Tensor:
        return torch.rand(len(x), 4)

    def meeting(w: Any, x: Tensor) -> Tensor:
        first = torch.rand(len(x), 2)
        fdp.psum(first.sum())
        return first

    def both(w: Any, x: Tensor) -> Tensor:
        fdp.psum(0)
        return torch.rand(len(x), 4)

    devices = fdp.virtual_devices(3)
    expected = fdp.dp_apply(plainly, None, torch.ones(6), devices, seed=3)
    assert torch.equal(fdp.dp_apply(both, None, torch.ones(6), devices, seed=3), expected)
    torch.manual_seed(fdp.fold_in(3, 1))
    assert torch.equal(fdp.dp_apply(meeting, None, torch.ones(6), devices, seed=3)[2:4], torch.rand(2, 2))


@each_executor
def test_seeded_in_microbatches(executor: Any):
    def loss(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.rand(())
        return w * fdp.psum(draw) * x.mean(), draw

    def loss_alone(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return w * x.mean(), torch.rand(())

    def draws(fn: Any) -> Any:
        options: Any = {"devices": fdp.virtual_devices(2), "microbatches": 2, "seed": 5, "executor": executor}
        (_, aux), _ = fdp.value_and_grad(fn, has_aux=True, aux_dims="stack", **options)(torch.ones(()), torch.ones(4))
        return aux

    found = draws(loss)
    assert torch.equal(found, draws(loss))
    assert len(set(found.tolist())) == 4
    assert torch.equal(found, draws(loss_alone))


# ---------------------------------------------------------------- torch's settings


@each_executor
def test_settings_of_the_caller(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        first = fdp.psum(w @ w)
        assert torch.is_autocast_enabled("cpu")
        second = w @ w
        assert first.dtype is second.dtype is torch.bfloat16
        assert not torch.is_grad_enabled()
        return x

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fdp.dp_apply(fn, torch.eye(2), torch.ones(3), fdp.virtual_devices(3), executor=executor)


@each_executor
def test_grad_mode_inside_is_the_slots_own(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(fdp.axis_index() != 1):
            y = fdp.psum((w * x).sum().detach())
            assert torch.is_grad_enabled() == (fdp.axis_index() != 1)
        assert torch.is_grad_enabled()
        return y * w * x

    w = torch.ones((), requires_grad=True)
    fdp.dp_apply(fn, w, torch.ones(3), fdp.virtual_devices(3), executor=executor).sum().backward()
    assert w.grad is not None
    assert w.grad.item() == 9.0


def test_both_executors_agree_often():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.psum((w * x).sin().sum(0))
        return fdp.all_gather(x * y).sum(0) * fdp.ppermute(y, ring(fdp.axis_size())) + x

    def run(executor: Any) -> Any:
        w, x = leaves()
        out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(4), executor=executor)
        return out, *torch.autograd.grad(out.square().sum(), (w, x))

    expected = run("sequential")
    with side_by_side():
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(run("threads"), expected, strict=True))


@pytest.mark.parametrize("around", [torch.device("meta"), torch.device("cpu")], ids=str)
def test_calls_draw_anew_whatever_the_default_device_is(around: torch.device):
    def drop(w: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + 0 * fdp.psum(x.sum())

    x = torch.ones(64)
    with around:
        one, other = (fdp.dp_apply(drop, None, x, fdp.virtual_devices(2)) for _ in range(2))
    assert not torch.equal(one, other)
