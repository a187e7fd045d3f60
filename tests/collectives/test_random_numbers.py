"""Random numbers and settings of torch in functions with collectives."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_executor

# ---------------------------------------------------------------- randomness


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


@pytest.mark.parametrize("around", [torch.device("meta"), torch.device("cpu")], ids=str)
def test_calls_draw_anew_whatever_the_default_device_is(around: torch.device):
    def drop(w: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + 0 * fdp.psum(x.sum())

    x = torch.ones(64)
    with around:
        one, other = (fdp.dp_apply(drop, None, x, fdp.virtual_devices(2)) for _ in range(2))
    assert not torch.equal(one, other)
