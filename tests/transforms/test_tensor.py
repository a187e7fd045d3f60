"""Sums of gradients in place, where nobody can see it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fdp
from fdp._placement.moves import is_ours

SIZE = 128  # 128 KiB of float64
X = torch.randn(9, SIZE, dtype=torch.float64)


class Adds(TorchDispatchMode):
    """Counts additions of large tensors, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"add": 0, "add_": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.counts and isinstance(args[0], Tensor) and args[0].numel() == SIZE * SIZE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def matrix() -> Tensor:
    return torch.randn(SIZE, SIZE, dtype=torch.float64)


def square(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().mean()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("replicated", [False, True])
def test_gradients_of_shards_are_added_in_place(transposed: bool, replicated: bool):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return square(w.T if transposed else w, x)

    devices = fdp.virtual_devices(4)
    w: Any = matrix()
    params = fdp.replicate(w, devices) if replicated else w
    with Adds() as adds:
        grads: Any = fdp.grad(loss, devices=devices)(params, X)
    assert adds.counts == {"add": 0, "add_": 3}
    torch.testing.assert_close(grads[3] if replicated else grads, torch.func.grad(loss)(w, X))


def hooked(kept: list[Tensor]) -> Callable[..., Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        w.register_hook(kept.append)
        return square(w, x)

    return loss


class Keeping(torch.autograd.Function):
    """A backward that gives away memory which it keeps."""

    kept: list[Any]
    make: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Keeping.make(grads[0])


def from_numpy(grad: Tensor) -> Tensor:
    Keeping.kept.append(grad.numpy().copy())
    return torch.from_numpy(Keeping.kept[-1])


def part(grad: Tensor) -> Tensor:
    Keeping.kept.append(grad.clone())
    return Keeping.kept[-1].view_as(grad)


def itself(grad: Tensor) -> Tensor:
    Keeping.kept.append(grad.clone())
    return Keeping.kept[-1]


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("make", [from_numpy, part, itself])
def test_memory_that_a_backward_keeps_is_not_written_to(make: Callable[[Tensor], Tensor], executor: Any):
    Keeping.kept, Keeping.make = [], staticmethod(make)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return square(Keeping.apply(w), x)

    w = matrix()
    got = fdp.grad(loss, devices=fdp.virtual_devices(3), executor=executor)(w, X)
    torch.testing.assert_close(got, torch.func.grad(square)(w, X))
    parts = [torch.as_tensor(np.asarray(kept)) for kept in Keeping.kept]
    torch.testing.assert_close(sum(parts), got)  # each is still that of its own shard


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_gradients_that_a_hook_keeps_are_not_written_to(executor: Any):
    kept: list[Tensor] = []
    w = matrix()
    got = fdp.grad(hooked(kept), devices=fdp.virtual_devices(3), executor=executor)(w, X)
    torch.testing.assert_close(sum(kept), got)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_one_gradient_for_two_tensors(executor: Any):
    def loss(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return square(a + b + c.T, x)

    tensors = matrix(), matrix(), matrix()
    numbers = (0, 1, 2)
    got = fdp.grad(loss, numbers, devices=fdp.virtual_devices(3), executor=executor)(*tensors, X)
    torch.testing.assert_close(got, torch.func.grad(loss, numbers)(*tensors, X))
    assert len({grad.data_ptr() for grad in got}) == 3 or torch.equal(got[0], got[1])
    got[0].add_(1)  # the results are the caller's
    torch.testing.assert_close(got[2], torch.func.grad(loss, 2)(*tensors, X))


def test_what_is_ours():
    held = [matrix()]
    assert is_ours(held)
    assert is_ours([matrix().t()])
    for other in (held[0], held[0].view(-1), held[0].untyped_storage(), held[0].detach()):
        assert not is_ours(held), other
    del other
    assert is_ours(held)
    assert not is_ours([matrix()[:100]])
    assert not is_ours([torch.ones(1, dtype=torch.float64).expand(SIZE, SIZE)])
    assert not is_ours([torch.ones(3)])
    assert not is_ours([torch.from_numpy(np.ones((SIZE, SIZE)))])
    assert not is_ours([matrix().requires_grad_()])
    assert not is_ours([matrix().to_sparse()])
    assert not is_ours([torch.nn.Parameter(matrix(), requires_grad=False)])
    base = matrix()
    assert not is_ours([base.t()])


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_under_transforms_nothing_is_written_to(executor: Any):
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def call(scale: Tensor) -> Any:
        # Of the two gradients only the second one is batched.
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return square(w, x) * (scale if len(x) == 4 else 1)

        return fdp.grad(loss, devices=fdp.virtual_devices(2), executor=executor)(w, X)

    w = matrix()
    want = torch.stack([call(scale) for scale in scales])
    torch.testing.assert_close(torch.func.vmap(call)(scales), want)
    pullback: Any = torch.func.vjp(call, scales[0])[1]
    torch.testing.assert_close(pullback(w)[0], (w * (want[1] - want[0])).sum())
