"""What shards in threads see of a tensor that all of them have: its class, its attributes and its gradient."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp

SLOTS = fdp.virtual_devices(3)
X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
EXECUTORS = ["sequential", "threads", "auto"]


def calls(fn: Any, params: Any, executor: Any) -> list[Any]:
    """What several calls return."""
    return [fdp.dp_apply(fn, params, X, SLOTS, executor=executor) for _ in range(4)]


def scaled(w: Any, x: Tensor) -> Tensor:
    return x * w * w.scale


def of_its_class(w: Tensor, x: Tensor) -> Tensor:
    return x * w if isinstance(w, nn.Parameter) else x


def stepped(w: Any, x: Tensor) -> Tensor:
    return x * (w - 0.5 * w.grad)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("fn", [scaled, of_its_class, stepped])
def test_attributes_class_and_gradient(fn: Any, executor: str, four_cores: None):
    w: Any = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    w.scale, w.grad = 2.0, torch.ones_like(w)
    want = fn(w, X)
    grad = torch.autograd.grad(want.sum(), w)[0]
    for out in calls(fn, w, executor):
        assert torch.equal(out, want)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), w)[0], grad)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sparse_ones(executor: str, four_cores: None):
    dense = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
    s: Any = dense.to_sparse().requires_grad_()
    for out in calls(lambda s, x: torch.sparse.mm(s, x.t()).t(), s, executor):
        assert torch.equal(out, X @ dense.t())
        out.sum().backward()
    assert torch.equal(s.grad.to_dense(), 4 * X.sum(0).expand(2, 2) * (dense != 0))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("options", [{"devices": SLOTS}, {"devices": "cpu", "microbatches": 3}])
def test_a_dense_gradient_of_a_sparse_tensor(options: Any, needs_grad: bool):
    s = torch.eye(2, dtype=torch.float64).to_sparse().requires_grad_(needs_grad)

    def loss(s: Tensor, x: Tensor) -> Tensor:
        return (s @ x.t()).square().mean()

    expected = torch.func.grad(loss)(s, X)
    torch.testing.assert_close(fdp.grad(loss, **options)(s, X), expected)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A function that is not compared without an error."""

    name: str
    w: Tensor = dataclasses.field(hash=False)

    def __call__(self, params: Tensor, x: Tensor) -> Tensor:
        return x * self.w * params


def test_functions_that_cannot_be_compared():
    scales = [Scale("same", torch.full((2,), factor, dtype=torch.float64)) for factor in (1.0, 2.0)]
    for scale in scales:
        out = fdp.dp_apply(scale, torch.tensor(5.0), X, SLOTS)
        assert torch.equal(out, X * scale.w * 5)
