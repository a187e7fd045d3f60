"""Ctrl-C at any moment of a call: it arrives, nothing is left, and the next call is right."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from tests.common.programs import run_script

functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
DEVICES = fdp.virtual_devices(3)


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.deep)])
def test_interrupts_at_random_moments(count: int):
    """With collectives and without, under both executors, gradients, nested, and slot 0 in the main thread."""
    found = run_script(SOAK, "--calls", "0", "--interrupts", str(count), timeout=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith(f"{count} interrupts in "), found.stdout


def seeded(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum() + torch.rand((), dtype=x.dtype)


def inside_grad(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fdp.psum(torch.func.grad(lambda w: fdp.pmean(((x @ w) ** 2).sum()))(w))


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    z = (x @ w).tanh()
    return (z - fdp.pmean(z.mean(), weight="rows")).square().mean()


W, ROWS = torch.randn(3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
PLACES: dict[str, Callable[[], Any]] = {
    "seeded": lambda: fdp.dp_apply(seeded, W, ROWS, DEVICES, seed=4, out_dims="list"),
    "inside a gradient": lambda: fdp.dp_apply(inside_grad, W, ROWS, DEVICES, out_dims=None),
    "a gradient": lambda: fdp.value_and_grad(loss, devices=DEVICES)(W, ROWS),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a generator is let go of
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", PLACES)
def test_an_interrupt_where_a_function_begins(name: str, step: int):
    """One for each function that is called in the main thread: there Python looks whether a signal has come."""
    call = PLACES[name]
    want, state, place, begun = call(), torch.get_rng_state(), step // 2, 0

    def begin(*_: Any) -> None:
        nonlocal begun
        begun += 1
        if begun == place:
            raise KeyboardInterrupt

    before = sys.gettrace()
    while begun >= place or place == step // 2:
        begun, place = 0, place + step
        try:
            sys.settrace(begin)
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert gc.isenabled(), place
        assert torch.is_grad_enabled(), place
        assert torch.equal(torch.get_rng_state(), state), place
        assert not functorch.get_interpreter_stack(), place
        torch.testing.assert_close(call(), want)
    assert place > 150  # so many were there
