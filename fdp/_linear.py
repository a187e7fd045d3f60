"""How gradients go through collectives: as collectives, by a meeting of the same slots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._context import AXES
from fdp._gang import Gang
from fdp._meeting import OF, meet
from fdp._operations import Operation
from fdp._reach import refuse_batched
from fdp._tensor import is_inexact


def attached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, as leaves where they have no part in a gradient yet."""
    return [x.detach().requires_grad_() if is_inexact(x) and not x.requires_grad else x for x in tensors]


class Handle:
    """Which collective of which call a gradient belongs to."""

    def __init__(self, token: object, key: Any, same: Any) -> None:
        self.token, self.key, self.same = token, key, same

    def gang(self, name: str) -> tuple[Gang, int]:
        """Where the slots of that call are now: still running, or running its backward."""
        for axis in reversed(AXES.get()):
            if axis.gang is not None and axis.gang.token is self.token:
                return axis.gang, axis.gang.place(axis.slot)
        raise RuntimeError(
            f"{name}: its gradient was asked for where the slots of its call do not run. Differentiate inside the "
            "mapped function, or what the call returned"
        )

    def of_transpose(self) -> "Handle":
        """That of the gradient, which is a collective too."""
        return Handle(self.token, (OF, self.key), (OF, self.same))


class Linear(torch.autograd.Function):
    """A collective of slots that run: its gradient is its transpose, by another meeting of the same slots."""

    @staticmethod
    def forward(handle: Handle, operation: Operation, *tensors: Tensor) -> Any:
        gang, index = handle.gang(operation.name)
        found, _ = meet(gang, index, gang.number(index, handle.key), operation, tensors, handle.same)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.handle, ctx.operation, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *Linear.apply(ctx.handle.of_transpose(), ctx.operation.transpose(), *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.operation.name}: forward-mode differentiation inside a mapped function")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        handle, operation, *tensors = args
        moved = [
            x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        found = Linear.apply(handle, operation, *moved)
        return found, (0,) * len(moved)


class Known(torch.autograd.Function):
    """`Linear`, for results that are known."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, operation: Operation, found: Sequence[Tensor], *tensors: Tensor) -> Any:
        ctx.handle, ctx.operation = handle, operation
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_batched(grads, ctx.operation.name)
        back = ctx.handle.of_transpose()
        gang, index = back.gang(ctx.operation.name)
        operation = ctx.operation.transpose()
        found, is_differentiated = meet(gang, index, gang.number(index, back.key), operation, grads, back.same)
        if is_differentiated:
            found = Known.apply(back, operation, found, *attached(grads))
        return None, None, None, *found


class Identity(torch.autograd.Function):
    """The tensors as they are, with something that the gradient is to know."""

    generate_vmap_rule = True

    @staticmethod
    def forward(known: Any, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.known, *_ = inputs


class Undifferentiable(Identity):
    """What has no gradient, by the name of the collective."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.known} cannot be differentiated; detach its argument")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(f"{ctx.known} cannot be differentiated; detach its argument")


class Fence(Identity):
    """No gradient goes through while the slots of a call run: the graph behind it is that of all of them."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if any(axis.gang is not None and axis.gang.token is ctx.known for axis in AXES.get()):
            raise RuntimeError(
                "a gradient was asked for inside a mapped function, through a collective, while the call is "
                "transformed by torch.func from outside, which is not supported. Transform on one side only"
            )
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(x.view_as(x) for x in tangents[1:])
