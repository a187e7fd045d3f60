"""Losses that are means over rows or tokens, and their gradients by torch.func on one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.common.containers import tensors_of, with_tensors
from tests.common.numbers import numbers

W = numbers(4)
X = numbers(7, 4)
Y = numbers(7) / 2
MASK = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.float64)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((torch.tanh(x * w).sum(1) - y) ** 2).mean()


def weighted_loss(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A mean over what the mask counts."""
    return ((torch.tanh(x * w).sum(1) - y) ** 2 * mask).sum() / mask.sum()


def mask_sum(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return mask.sum()


def tree_loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss(params["w"] + params["b"].x[0], x, y)


def oracle(fn: Any, *args: Any, argnums: Any = 0, has_aux: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """`(value, grads)` by torch.func on one device, which knows fewer trees: it gets a list of tensors."""
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    positions = [i % len(args) for i in numbers]

    def of_tensors(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        given = list(args)
        for i in positions:
            given[i] = with_tensors(args[i], rest)
        return fn(*given, **kwargs)

    tensors = [tensor for i in positions for tensor in tensors_of(args[i])]
    grads, value = torch.func.grad_and_value(of_tensors, tuple(range(len(tensors))), has_aux)(*tensors)
    rest = iter(grads)
    trees = tuple(with_tensors(args[i], rest) for i in positions)
    return value, trees if isinstance(argnums, tuple) else trees[0]


def one(w: Tensor) -> Tensor:
    return oracle(loss, w, X, Y)[1]


def dual(fn: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Any:
    with forward_ad.dual_level():
        out: Any = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent)))
        return out.primal.clone(), out.tangent.clone()
