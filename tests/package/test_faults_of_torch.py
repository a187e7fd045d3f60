"""Faults of torch that docs/explanation/compatibility.md describes. A test that fails says that torch mended one."""

from typing import Any

import pytest
import torch
from torch import Tensor

# torch's compiler makes an object of each Function, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
MENDED = "torch has mended this: take it off docs/explanation/compatibility.md and docs/how_to/compile.md"


class Asking(torch.autograd.Function):
    """A product that computes only the gradients that are asked for."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (w, x), (grad,) = ctx.saved_tensors, grads
        of_w = x.T @ grad if ctx.needs_input_grad[0] else None
        of_x = grad @ w.T if ctx.needs_input_grad[1] else None
        return of_w, of_x


class AskingApart(torch.autograd.Function):
    """The same, written as torch.func wants it."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = Asking.backward


class Computing(AskingApart):
    """One that asks nothing, which is right."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (w, x), (grad,) = ctx.saved_tensors, grads
        return x.T @ grad, grad @ w.T


def gradients(product: Any) -> tuple[Tensor, Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return product.apply(2 * w, x).sum()

    compiled = torch.compile(torch.func.grad_and_value(loss, argnums=(1, 0)), backend="eager", fullgraph=True)
    (of_x, of_w), _ = compiled(torch.ones(2, 3), torch.ones(4, 2))
    return of_w, of_x


@pytest.mark.parametrize("product", [Asking, AskingApart])
def test_a_function_that_asks_what_needs_a_gradient_is_told_wrong(product: Any):
    of_w, of_x = gradients(product)
    torch.testing.assert_close(of_w, torch.full((2, 3), 8.0))
    assert (of_x == 0).all(), MENDED


def test_a_function_that_does_not_ask_is_right():
    of_w, of_x = gradients(Computing)
    torch.testing.assert_close((of_w, of_x), (torch.full((2, 3), 8.0), torch.full((4, 2), 6.0)))
