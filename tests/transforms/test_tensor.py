"""Sums of gradients in place, where nobody can see it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fdp

SIZE = 256  # 512 KiB of float64
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
    assert adds.counts == {"add": 1, "add_": 2}
    torch.testing.assert_close(grads[3] if replicated else grads, torch.func.grad(loss)(w, X))


def hooked(kept: list[Tensor]) -> Callable[..., Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        w.register_hook(kept.append)
        return square(w, x)

    return loss


class Keeping(torch.autograd.Function):
    """A backward that gives away memory which it keeps: of each shard the memory, a copy of it, and of what it gave."""

    kept: list[tuple[Tensor, Tensor, Tensor]]
    make: Callable[[Tensor], tuple[Tensor, Tensor]]

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        memory, given = Keeping.make(grads[0])
        Keeping.kept.append((memory, memory.clone(), given.clone()))
        return given


KEEPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "itself": lambda grad: (x := grad.clone(), x),
    "a view": lambda grad: (x := grad.clone(), x.view_as(x)),
    "turned": lambda grad: (x := grad.t().clone(), x.t()),
    "spread out": lambda grad: (x := grad.sum().reshape(1), x.expand(SIZE, SIZE)),
    "sparse": lambda grad: (x := grad.to_sparse(), x),
    "a parameter": lambda grad: (x := torch.nn.Parameter(grad.clone(), requires_grad=False), x),
}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("make", KEEPS.values(), ids=KEEPS)
def test_memory_that_a_backward_keeps_is_not_written_to(make: Any, executor: Any):
    Keeping.kept, Keeping.make = [], staticmethod(make)
    step = fdp.grad(lambda w, x: square(Keeping.apply(w), x), devices=fdp.virtual_devices(3), executor=executor)
    got = step(matrix(), X)
    assert len(Keeping.kept) == 3
    torch.testing.assert_close(got.to_dense(), sum(given.to_dense() for _, _, given in Keeping.kept))
    for memory, before, _ in Keeping.kept:
        assert torch.equal(memory.to_dense(), before.to_dense())


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
