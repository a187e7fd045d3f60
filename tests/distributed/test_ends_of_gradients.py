"""Gradients are added up as a call ends: also where one process does not come there, and where slots have met."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.distributed.pool import Failure, Pool


def loss(p: Tensor, x: Tensor) -> Tensor:
    return (x * p).mean()


def x_of(mesh: Any) -> Tensor:
    return torch.arange(12.0).reshape(4, 3) + mesh.rank


def fails_in_process_1(mesh: Any) -> str:
    """A step that works, one that fails in process 1 before its shards run, and one that works again.

    Process 1 takes part in the sums of that step, though its parameters are not where all want the gradients.
    """
    step = fdp.value_and_grad(loss, devices=mesh, output_device="cpu")
    before = step(torch.ones(3), x_of(mesh))
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor") as caught:
        step(torch.ones(3, device="meta" if mesh.rank else "cpu"), x_of(mesh))
    assert torch.equal(step(torch.ones(3), x_of(mesh))[1], before[1])
    return str(caught.value)


def test_a_process_that_fails_before_its_shards_run_is_not_waited_for(two: Pool):
    first, second = two(fails_in_process_1, 2)
    assert "process 1 has raised NotImplementedError: Cannot copy out of meta tensor" in first
    assert second.startswith("Cannot copy")


def meets_in_process_1(mesh: Any, known: bool) -> float:
    """Process 0 is at the end of the call, and has begun to add, when process 1 comes to a collective."""

    def uneven(p: Tensor, x: Tensor) -> Tensor:
        value = loss(p, x)
        return value + fdp.psum(value.detach()) if met[0] or mesh.rank else value

    met = [known]
    step = fdp.value_and_grad(uneven, devices=mesh)
    if known:
        step(torch.ones(3), x_of(mesh))
        met[0] = False
    elsewhere = "(psum|the slots of value_and_grad) in process 1"
    with pytest.raises(RuntimeError, match=f"different places: .*end of value_and_grad in process 0, {elsewhere}"):
        step(torch.ones(3), x_of(mesh))
    met[0] = True
    value, grads = step(torch.ones(3), x_of(mesh))
    return value.item() + grads.sum().item()


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_collective_in_one_process_only_fails_in_both(two: Pool, slots: int, known: bool):
    found = two.outcomes(meets_in_process_1, slots, known)
    assert not any(isinstance(each, Failure) for each in found), found
    assert found[0] == found[1]


def operations_of_a_step(mesh: Any, meets: bool) -> list[str]:
    def step_loss(p: Tensor, x: Tensor) -> Tensor:
        return loss(p, x) + fdp.psum(x.sum()) if meets else loss(p, x)

    step = fdp.value_and_grad(step_loss, devices=mesh)
    step(torch.ones(3), x_of(mesh))
    with torch.profiler.profile() as profile:
        step(torch.ones(3), x_of(mesh))
    return sorted(event.name for event in profile.events() or () if event.name.startswith("gloo:"))


def test_a_step_that_meets_sends_headers_and_others_only_their_sum(two: Pool):
    for found in two(operations_of_a_step, 1, False):
        assert found == ["gloo:all_reduce"]
    for found in two(operations_of_a_step, 1, True):
        assert found == ["gloo:all_gather"] * 2 + ["gloo:all_reduce"] * 2  # the slots, and that of psum
