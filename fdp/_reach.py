"""What the graph of a tensor leads back to, and gradients that cannot go there."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C  # a part of it has no types


def captured(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Leaves that outputs depend on by another way than through the inputs."""
    known = list(inputs)
    leaves = {id(x) for x in known}
    stack: list[Any] = []
    for x in outputs:
        if x.requires_grad and x.is_leaf and id(x) not in leaves:
            yield x
        stack.append(x.grad_fn)
    seen = {x.grad_fn for x in known} | {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            yield variable
        stack.extend(parent for parent, _ in node.next_functions)


def refuse_batched(grads: Iterable[Any], what: str) -> None:
    """Raise for the batches of gradients that torch.autograd makes itself, which only its own operations know."""
    if any(isinstance(grad, Tensor) and _C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(
            f"{what}: batched gradients of torch.autograd (is_grads_batched, jacobian(..., vectorize=True)) cannot "
            "pass. Use torch.func: vmap of a vjp, jacrev"
        )
