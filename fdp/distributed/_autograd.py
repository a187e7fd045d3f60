"""What goes through all processes, with gradients: each takes the same results for functions of the same parameters.

A gradient of what is the same everywhere is the same everywhere too, so a process hands on its own part of it. Where
parameters enter, the parts of all processes are summed, as they are over slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._trees import torch_private
from fdp.distributed._epoch import Epoch, Tag
from fdp.distributed._exchange import all_of, meet, objects, same_of, sums


def is_tracked(tensors: Sequence[Tensor]) -> bool:
    """Whether something differentiates or transforms what is made of these."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return differentiated or torch_private.is_transformed() or torch_private.is_forward_mode()


class AllReduce(torch.autograd.Function):
    """The sum over processes."""

    @staticmethod
    def forward(epoch: Epoch, name: str, *tensors: Tensor) -> Any:
        return tuple(sums(epoch, tensors, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.epoch, ctx.name, *_ = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # The same everywhere, and each hands on its own part: a gradient of these gradients is the sum of all parts.
        return None, None, *_handed_on(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return AllReduce.apply(ctx.epoch, ctx.name, *tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        epoch, name, *tensors = args
        moved = _batched(info, in_dims[2:], tensors)
        return AllReduce.apply(epoch, name, *moved), (0,) * len(moved)


class AllGather(torch.autograd.Function):
    """The tensors of all processes, in a new first dimension. A token that comes with them is handed on."""

    @staticmethod
    def forward(epoch: Epoch, name: str, tensor: Tensor, *token: Tensor) -> Any:
        return torch.stack(all_of(epoch, tensor, name)), *(x.detach() for x in token)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.epoch, ctx.name, *_ = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole, *token = _handed_on(ctx, grads)  # as in `AllReduce`
        return None, None, None if whole is None else whole[ctx.epoch.rank], *token

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return AllGather.apply(ctx.epoch, ctx.name, *tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        epoch, name, tensor = args  # no token: nothing was exchanged
        return AllGather.apply(epoch, name, *_batched(info, in_dims[2:], [tensor])), (1,)


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
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        name, shapes = f"the backward of {ctx.name}", [shape for shape, _, _ in ctx.kinds]
        given = [grad is not None for grad in grads]
        table = meet(ctx.epoch, Tag(name, same_of(shapes), lambda: f"gradients of {shapes}"), [all(given)])
        if any(has_all for (has_all,) in table):
            there = list(range(len(grads)))
        else:
            there = [i for i, column in enumerate(zip(*objects(ctx.epoch, given, name), strict=True)) if any(column)]
        filled = [_filled(grads[i], *ctx.kinds[i]) for i in there]
        found: list[Any] = [None] * len(grads)
        for i, x in zip(there, AllReduce.apply(ctx.epoch, name, *filled) if there else (), strict=True):
            found[i] = x
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(x.view_as(x) for x in tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return GradientSum.apply(*args), tuple(in_dims[3:])


def _handed_on(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients through one node for all of them, the same in all processes; what is not there stays so."""
    if not any(grad is not None for grad in grads):
        return [None] * len(grads)
    filled = [_filled(grad, *kind) for grad, kind in zip(grads, ctx.kinds, strict=True)]
    found = GradientSum.apply(ctx.epoch, ctx.name, None, *filled)
    return [None if grad is None else x for grad, x in zip(grads, found, strict=True)]


def _filled(grad: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def _batched(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]
