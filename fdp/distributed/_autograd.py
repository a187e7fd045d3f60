"""Nodes of autograd around a call on a mesh: one where parameters enter, one where results become those of all.

A gradient of what is the same everywhere is the same everywhere too, so a process hands on its own part of it. Where
parameters enter, the parts of all processes are summed, as they are over slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp.distributed._exchange import meet, objects, same_of, sums
from fdp.distributed._reports import Tag
from fdp.distributed._waits_and_failures import Epoch

Grad = Tensor | None


class AllReduce(torch.autograd.Function):
    """The sum over processes."""

    @staticmethod
    def forward(epoch: Epoch, name: str, *tensors: Tensor) -> Any:
        return tuple(sums(epoch, tensors, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        check_order()
        return None, None, *grads


class GradientSum(torch.autograd.Function):
    """Tensors that are the same in all processes, as they are or as `values`; their gradients are summed over them.

    What has a gradient in no process has none.
    """

    @staticmethod
    def forward(epoch: Epoch, name: str, values: Sequence[Tensor] | None, *tensors: Tensor) -> Any:
        return tuple(values or (x.view_as(x) for x in tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.epoch, ctx.name, _, *tensors = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in tensors]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        check_order()
        name, shapes = f"the backward of {ctx.name}", [shape for shape, _, _ in ctx.kinds]
        given = [grad is not None for grad in grads]
        table = meet(ctx.epoch, Tag(name, same_of(shapes), lambda: f"gradients of {shapes}"), [all(given)])
        there = given
        if not all(has_all for (has_all,) in table):
            there = list(map(any, zip(*objects(ctx.epoch, given, Tag(name)), strict=True)))
        each = zip(grads, ctx.kinds, there, strict=True)
        filled = [filled_up(grad, kind) for grad, kind, is_there in each if is_there]
        found = iter(sums(ctx.epoch, filled, name))
        return None, None, None, *(next(found) if is_there else None for is_there in there)


class Refused(torch.autograd.Function):
    """Tensors as functions of the first, which cannot be differentiated."""

    @staticmethod
    def forward(start: Tensor, *tensors: Tensor) -> Any:
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        raise RuntimeError(SECOND)


SECOND = (
    "what a gradient function gives on several processes cannot be differentiated again, nor a call on them twice from "
    "outside. Write the inner derivative inside of the function, with torch.func.grad, and take the outer one by "
    "fdp.value_and_grad on the mesh. If you do not want derivatives of gradients, pass create_graph=False"
)


def check_order() -> None:
    """It is a first derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError(SECOND)


def filled_up(grad: Grad, kind: tuple[Any, torch.dtype, torch.device]) -> Tensor:
    """A gradient, or zeros of its kind."""
    shape, dtype, device = kind
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
