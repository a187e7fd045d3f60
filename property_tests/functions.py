"""Functions to run on several devices: row-wise ones over any tree, and losses that are means over rows or tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.common.containers import leaves_of, mapped, tensors_of


def sines(*shape: int) -> torch.Tensor:
    """Numbers between -1 and 1, no two equal."""
    return torch.sin(torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)).reshape(shape)


def summary(tree: Any) -> torch.Tensor:
    """A number that depends on every element of a tree, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for i, tensor in enumerate(tensors_of(tree)):
        total = total + torch.sin(real(tensor) + i).sum() / (i + 1)
    return total


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, of complex ones a mix of both parts."""
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128)
        return tensor.real + 2 * tensor.imag
    return tensor.to(torch.float64)


def features(tree: Any, tensor_dims: Sequence[int | None], device: torch.device) -> torch.Tensor:
    """A number for each row that depends on every element of the row, and on all that is not split."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i, (tensor, dim) in enumerate(zip(tensors_of(tree), tensor_dims, strict=True)):
        values = torch.cos(real(tensor) * (i + 1))
        rows = values.sum() if dim is None else values.movedim(dim, 0).unsqueeze(1).flatten(1).sum(1)
        total = total + rows  # () or (rows,)
    return total


def row_wise(tensor_dims: Sequence[int | None]) -> Callable[[Any, torch.Tensor, Any], torch.Tensor]:
    """A function `(params, x, tree) -> (rows, 3)` whose rows depend on the same rows of x and the tree."""

    def apply(params: Any, x: torch.Tensor, tree: Any) -> torch.Tensor:
        weight = torch.cos(summary(params) + torch.arange(3, device=x.device))  # (3,)
        return torch.tanh((x + features(tree, tensor_dims, x.device).unsqueeze(-1)) * weight)  # (rows, 3)

    return apply


def grads_of(value: torch.Tensor, inputs: Sequence[torch.Tensor], *, create_graph: bool = False) -> list[torch.Tensor]:
    """Gradients by plain autograd, zeros where there is no dependence."""
    if not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in inputs]
    grads = torch.autograd.grad(value, inputs, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    return list(grads)


def value_and_grads(
    loss: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], *, create_graph: bool = False
) -> tuple[Any, list[Any]]:
    """What `loss` returns, and its gradients: one device, plain autograd, each position of a tree on its own."""

    def own(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.view_as(leaf) if create_graph else leaf.detach().clone().requires_grad_()

    copies = list(args)
    for i in argnums:
        copies[i] = mapped(own, args[i])
    out = loss(*copies)
    inputs = [leaf for i in argnums for leaf in leaves_of(copies[i])]
    value = out[0] if isinstance(out, tuple) else out
    grads = iter(grads_of(value, inputs, create_graph=create_graph) if inputs else [])
    return out, [mapped(lambda _: next(grads), copies[i]) for i in argnums]
