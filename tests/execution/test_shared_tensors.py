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


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attributes(executor: str, four_cores: None):
    w = parameter()
    w.scale = 2.0  # pyright: ignore[reportAttributeAccessIssue]

    def scaled(w: Any, x: Tensor) -> Tensor:
        return x * w * w.scale

    for out in calls(scaled, w, executor):
        assert torch.equal(out, X * w * 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_class(executor: str, four_cores: None):
    def kinds(w: Tensor, x: Tensor) -> Tensor:
        return x * w if isinstance(w, nn.Parameter) else x

    w = parameter()
    for out in calls(kinds, w, executor):
        assert torch.equal(out, X * w)
        out.sum().backward()
    assert torch.equal(w.grad, 4 * X.sum(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_gradient(executor: str, four_cores: None):
    def stepped(w: Any, x: Tensor) -> Tensor:
        return x * (w - 0.5 * w.grad)

    w = parameter()
    w.grad = torch.ones_like(w)
    for out in calls(stepped, w, executor):
        assert torch.equal(out, X * (w - 0.5))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sparse_ones(executor: str, four_cores: None):
    def mixed(s: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(s, x.t()).t()

    dense = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
    s = dense.to_sparse().requires_grad_()
    for out in calls(mixed, s, executor):
        assert torch.equal(out, X @ dense.t())
        out.sum().backward()
    assert torch.equal(s.grad.to_dense(), 4 * X.sum(0).expand(2, 2) * (dense != 0))  # pyright: ignore[reportOptionalMemberAccess]


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
