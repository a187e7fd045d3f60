"""Ctrl-C at any moment of a call: it arrives, nothing is left, and the next call is right."""

import threading
from pathlib import Path

import pytest
import torch

import fdp
from tests.common.programs import run_script

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
DEVICES = fdp.virtual_devices(3)


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.deep)])
def test_interrupts_at_random_moments(count: int):
    """With collectives and without, under both executors, gradients, nested, and slot 0 in the main thread."""
    found = run_script(SOAK, "--calls", "0", "--interrupts", str(count), timeout=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith(f"{count} interrupts in "), found.stdout


def test_threads_to_come_have_as_many_threads_for_operations_as_before():
    """What a slot sets for itself is torch's default for them."""
    found: list[int] = []

    def count() -> None:
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for executor in ("sequential", "threads"):
            fdp.dp_apply(lambda _, x: x * fdp.psum(1), None, torch.ones(3), DEVICES, executor=executor)
            thread = threading.Thread(target=count)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [4, 4]
