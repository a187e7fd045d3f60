"""`create_graph`: whether gradients can be differentiated again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.functions import never
from tests.common.numbers import COUNTS, numbers
from tests.transforms.losses import W, X, Y, loss, oracle

SLOTS = fdp.virtual_devices(3)


def second_order(value_and_grad: Callable[..., Any], w: Tensor) -> Any:
    """Backward through the gradient of `loss`."""
    value, grad = value_and_grad(w, X, Y)
    return value.detach(), grad.detach(), torch.autograd.grad(value + (grad**2).sum(), w)[0]


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("create_graph", [None, True])
def test_results_are_differentiable(slots: int, microbatches: int, create_graph: Any):
    options: Any = {"devices": fdp.virtual_devices(slots), "microbatches": microbatches, "create_graph": create_graph}
    w = torch.nn.Parameter(W.clone())
    got = second_order(fdp.value_and_grad(loss, **options), w)
    assert_close_tree(got, second_order(lambda *args: oracle(loss, *args), w))


def test_backward_of_the_value():
    w = torch.nn.Parameter(W.clone())
    fdp.value_and_grad(loss, devices=SLOTS)(w, X, Y)[0].backward()
    assert w.grad is not None
    assert_close_tree(w.grad, oracle(loss, W, X, Y)[1])


def test_gradgradcheck_of_the_gradient():
    grad = fdp.grad(loss, (0, 1), devices=["cpu"] * 2, in_dims=(None, 0, 0))
    inputs = numbers(2).requires_grad_(), numbers(3, 2).requires_grad_(), numbers(3)
    assert torch.autograd.gradcheck(grad, inputs)
    assert torch.autograd.gradgradcheck(grad, inputs)


def test_none_follows_an_input_that_is_not_differentiated():
    def through(value_and_grad: Callable[..., Any]) -> Any:
        y = Y.clone().requires_grad_()
        value, grad = value_and_grad(W, X, y)
        return torch.autograd.grad(value + (grad**2).sum(), y)[0]

    assert_close_tree(through(fdp.value_and_grad(loss, devices=SLOTS)), through(lambda *args: oracle(loss, *args)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_none_follows_a_captured_tensor(microbatches: int):
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss(w * scale, x, y)

    def through(value_and_grad: Callable[..., Any]) -> Any:
        value, grad = value_and_grad(W, X, Y)
        return torch.autograd.grad(value + (grad**2).sum(), scale)[0]

    got = through(fdp.value_and_grad(fn, devices=SLOTS, microbatches=microbatches))
    assert_close_tree(got, through(lambda *args: oracle(fn, *args)))


def test_none_follows_a_captured_tensor_in_aux():
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(w, x, y), (x.mean() * scale)

    aux = fdp.grad(fn, has_aux=True, devices=SLOTS)(W, X, Y)[1]
    assert_close_tree(torch.autograd.grad(aux, scale)[0], X.mean())


def test_aux_is_differentiable_as_the_value_is():
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(w, x, y), torch.tanh(x * w).sum(1).mean()

    w = W.clone().requires_grad_()
    aux = fdp.grad(fn, has_aux=True, devices=SLOTS)(w, X, Y)[1]
    want = torch.tanh(X * w).sum(1).mean()
    assert_close_tree(torch.autograd.grad(aux, w)[0], torch.autograd.grad(want, w)[0])
    assert not fdp.grad(fn, has_aux=True, devices=SLOTS, create_graph=False)(w, X, Y)[1].requires_grad
    assert not fdp.grad(fn, has_aux=True, devices=SLOTS)(W, X, Y)[1].requires_grad


@pytest.mark.parametrize("slots", [1, 3])
def test_false_is_detached_under_transforms_too(slots: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return loss(w, x, y), {"m": w.mean(), "tag": "tag"}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "create_graph": False}
    value, grad = oracle(loss, W, X, Y)
    with torch.inference_mode():
        got = fdp.value_and_grad(fn, **options)(W, X, Y)
    assert_close_tree(got, ((value, {"m": W.mean(), "tag": "tag"}), grad))
    w = W.clone().requires_grad_()
    results: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        (value, aux), grad = fdp.value_and_grad(fn, **options)(w, x, Y)
        results.extend((value, aux["m"], grad))
        return value

    assert_close_tree(torch.func.vmap(inside)(X[None]), value[None])
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_true_needs_grad_mode(mode: Any):
    with mode(), pytest.raises(ValueError, match=r"^grad: create_graph=True needs grad mode, which is off here"):
        fdp.grad(never, devices=SLOTS, create_graph=True)(W, X, Y)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("create_graph", [None, True, False])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_when_results_have_a_graph(needs_grad: bool, create_graph: Any, mode: Any, slots: int):
    if create_graph and mode is not torch.enable_grad:
        return  # an error: see above
    w = W.clone().requires_grad_(needs_grad)
    with mode():
        step = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), create_graph=create_graph)
        value, grad = step(w, X, Y)
    has_graph = mode is torch.enable_grad and (needs_grad if create_graph is None else create_graph)
    assert (value.requires_grad, grad.requires_grad) == (has_graph, has_graph)
    assert_close_tree((value.detach(), grad.detach()), oracle(loss, W, X, Y))


def test_inference_tensors():
    """As torch.func does, which differentiates in them."""
    with torch.inference_mode():
        w, x, y = W.clone(), X.clone(), Y.clone()
    assert_close_tree(fdp.value_and_grad(loss, devices=SLOTS)(w, x, y), oracle(loss, w, x, y))


def test_accumulated_gradients_are_left_alone():
    w = torch.nn.Parameter(W.clone())
    w.grad = torch.ones_like(w)
    fdp.value_and_grad(loss, devices=SLOTS)(w, X, Y)
    assert_same_tree(w.grad, torch.ones_like(W))
