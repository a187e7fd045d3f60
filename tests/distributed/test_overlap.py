"""Gradients are sent while the backward goes on, and the results are those that they would be after it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.distributed.pool import Pool

SIZE = 300  # a matrix of 720,000 bytes in float64, which is sent by itself


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = {name: torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator) / SIZE for name in "abcd"}
    return random | {"bias": torch.ones(SIZE, dtype=torch.float64), "unused": torch.ones(SIZE, SIZE)}


def layers(p: Any, x: Tensor) -> Tensor:
    for name in "abc":
        x = torch.tanh(x @ p[name] + p["bias"])
    return x @ p["d"].exp()


def loss(p: Any, x: Tensor) -> Tensor:
    return layers(p, x).square().mean(1).mean()


def rows(mesh: Any, count: int = 4) -> Tensor:
    return batch(count * len(mesh.slots))[mesh.rank * count :][:count]


def batch(count: int) -> Tensor:
    return torch.arange(float(count * SIZE), dtype=torch.float64).reshape(count, SIZE).sin()


def began(mesh: Any, microbatches: int) -> list[bool]:
    """For each message of a step, whether it began before the backward had come to the first layer."""
    step = fdp.value_and_grad(loss, devices=mesh, microbatches=microbatches)
    for _ in range(2):
        step(parameters(), rows(mesh))
    with torch.profiler.profile() as profile:
        step(parameters(), rows(mesh))
    events = list(profile.events() or ())
    last = max(e.time_range.start for e in events if e.name == "TanhBackward0")
    return [e.time_range.start < last for e in events if e.name == "c10d::allreduce_"]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_large_gradients_are_sent_while_the_backward_goes_on(two: Pool, microbatches: int):
    for found in two(began, 1, microbatches):
        assert len(found) == 6  # four matrices, the unused one, and the small ones
        assert sum(found) >= 2


def steps(mesh: Any, microbatches: int, fails: int | None) -> Any:
    odd = [False]
    kept: list[Tensor] = []

    def fn(p: Any, x: Tensor) -> Tensor:
        p["c"].register_hook(kept.append)  # so that its gradient stays as it is
        first = p["a"] * 1
        if odd[0]:
            first.register_hook(lambda grad: {}["odd"])  # when most are sent
        return loss(p | {"a": first}, x)

    step = fdp.value_and_grad(fn, devices=mesh, microbatches=microbatches)
    own = fdp.value_and_grad(loss, devices=mesh.devices)(parameters(), rows(mesh))
    found = [step(parameters(), rows(mesh)) for _ in range(2)]
    if fails is not None:
        odd[0] = mesh.rank == fails
        with pytest.raises((RuntimeError, KeyError), match="odd"):
            step(parameters(), rows(mesh))
        odd[0] = False
    kept.clear()
    found += [step(parameters(), rows(mesh)) for _ in range(2)]
    if microbatches == 1:
        for each in kept:
            share = 1 / len(mesh.slots)
            torch.testing.assert_close(each, own[1]["c"] * share, rtol=1e-10, atol=1e-12)
    return found


@pytest.mark.parametrize("fails", [None, 0, 1])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_of_one_device(two: Pool, microbatches: int, fails: int | None):
    grads, value = torch.func.grad_and_value(loss)(parameters(), batch(8))
    first, second = two(steps, 1, microbatches, fails)
    assert_same_tree(first, second)
    for found in first:
        assert_close_tree(found, (value, grads))


def test_four_processes(four: Pool):
    grads, value = torch.func.grad_and_value(loss)(parameters(), batch(16))
    for found in four(steps, 1, 1, 2):
        for each in found:
            assert_close_tree(each, (value, grads))


def shared(mesh: Any) -> Any:
    """One tensor is the gradient of two leaves."""
    p = {"a": torch.ones(SIZE, SIZE), "b": torch.ones(SIZE, SIZE), "c": torch.ones(SIZE, SIZE)}
    step = fdp.value_and_grad(lambda p, x: ((p["a"] + p["b"]).sin() * x.mean() + p["c"]).sum(), devices=mesh)
    return [step(p, torch.full((2,), 1.0 + mesh.rank))[1] for _ in range(3)]


def test_gradients_that_are_one_tensor_are_summed_once(two: Pool):
    expected = 1.5 * torch.full((SIZE, SIZE), 2.0).cos()
    for found in two(shared, 1):
        for each in found:
            assert_close_tree(each, {"a": expected, "b": expected, "c": torch.ones(SIZE, SIZE)}, rtol=1e-6)


class Recomputed(torch.autograd.Function):
    """A layer that is computed anew in the backward, by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(x @ w), (x, w), grads)


def recomputed(p: Any, x: Tensor) -> Tensor:
    for name in "aba":
        x = Recomputed.apply(x, p[name])
    return x.square().mean(1).mean()


def recomputing(mesh: Any) -> Any:
    p = {name: parameters()[name].requires_grad_() for name in "ab"}
    expected = torch.autograd.grad(recomputed(p, batch(8)), list(p.values()))
    step = fdp.value_and_grad(recomputed, devices=mesh)
    own = {name: w.detach() for name, w in p.items()}
    return dict(zip(p, expected, strict=True)), [step(own, rows(mesh)) for _ in range(3)]


def test_a_backward_inside_the_backward_sends_nothing(two: Pool):
    for expected, found in two(recomputing):
        for _, grads in found:
            assert_close_tree(grads, expected)


def in_half_precision(mesh: Any, microbatches: int) -> Any:
    p = {"half": torch.linspace(0, 1, 4).bfloat16(), "more": torch.ones(3).bfloat16(), "b": torch.ones(2)}
    p |= {"double": torch.ones(3, dtype=torch.float64), "large": torch.ones(SIZE, SIZE * 2).bfloat16()}

    def loss(p: Any, x: Tensor) -> Tensor:
        return sum(leaf.double().square().sum() for leaf in p.values()) * x.mean()

    step = fdp.value_and_grad(loss, devices=mesh, microbatches=microbatches)
    return [step(p, torch.arange(4.0) + mesh.rank) for _ in range(3)], torch.func.grad(loss)(p, torch.full((1,), 2.0))


@pytest.mark.parametrize("slots", [1, (2, 1)], ids=str)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_half_precision_goes_in_float32(two: Pool, slots: Any, microbatches: int):
    for found, expected in two(in_half_precision, slots, microbatches):
        for _, grads in found:
            assert_close_tree(grads, expected, rtol=1e-2)
