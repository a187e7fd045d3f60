"""What goes through all processes, with gradients: each takes the same results for functions of the same parameters.

A gradient of what is the same everywhere is the same everywhere too, so a process hands on its own part of it. Where
parameters enter, the parts of all processes are summed, as they are over slots.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._trees import torch_private
from fdp.distributed._chain import Chain
from fdp.distributed._communicator import Communicator
from fdp.distributed._session import Tag, meet


def total(
    comm: Communicator,
    name: str,
    chain: Chain,
    tensors: Sequence[Tensor],
    ours: Sequence[bool],
    dtypes: Sequence[torch.dtype | None] | None = None,
) -> list[Tensor]:
    """The sum over processes of each.

    Where nothing differentiates, those that are `ours` may be overwritten, and real numbers are sent as other `dtypes`.
    """
    if not tensors:
        return []
    if is_tracked(tensors) or chain.has_gone_back:
        return list(chain.through(functools.partial(AllReduce.apply, comm, name), tensors))
    return comm.sums(tensors, name, ours, dtypes)


def is_tracked(tensors: Sequence[Tensor]) -> bool:
    """Whether something differentiates or transforms what is made of these."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return differentiated or torch_private.is_transformed() or torch_private.is_forward_mode()


class AllReduce(torch.autograd.Function):
    """The sum over processes."""

    @staticmethod
    def forward(comm: Communicator, name: str, *tensors: Tensor) -> Any:
        return tuple(comm.sums(tensors, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.comm, ctx.name, *_ = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # The same everywhere, and each hands on its own part: a gradient of these gradients is the sum of all parts.
        return None, None, *_handed_on(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return AllReduce.apply(ctx.comm, ctx.name, *tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        comm, name, *tensors = args
        moved = _batched(info, in_dims[2:], tensors)
        return AllReduce.apply(comm, name, *moved), (0,) * len(moved)


class AllGather(torch.autograd.Function):
    """The tensors of all processes, in a new first dimension. A token that comes with them is handed on."""

    @staticmethod
    def forward(comm: Communicator, name: str, tensor: Tensor, *token: Tensor) -> Any:
        return torch.stack(comm.all(tensor, name)), *(x.detach() for x in token)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.comm, ctx.name, *_ = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole, *token = _handed_on(ctx, grads)  # as in `AllReduce`
        return None, None, None if whole is None else whole[ctx.comm.position], *token

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return AllGather.apply(ctx.comm, ctx.name, *tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        comm, name, tensor = args  # no token: nothing was exchanged
        return AllGather.apply(comm, name, *_batched(info, in_dims[2:], [tensor])), (1,)


class GradientSum(torch.autograd.Function):
    """Tensors that are the same in all processes, as they are or as `values`; their gradients are summed over them.

    What has a gradient in no process has none. In a process without shards `counts` is False: its zeros are none.
    """

    @staticmethod
    def forward(comm: Communicator, name: str, values: Sequence[Tensor] | None, counts: bool, *tensors: Tensor) -> Any:
        return tuple(values or (x.view_as(x) for x in tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.comm, ctx.name, _, ctx.counts, *tensors = inputs
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in tensors]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        name, shapes = f"the backward of {ctx.name}", [shape for shape, _, _ in ctx.kinds]
        given = [ctx.counts and grad is not None for grad in grads]
        tag = Tag(name, repr(shapes), lambda: f"gradients of {shapes}")
        table = meet(ctx.comm, tag, [all(given)])()
        if any(has_all for (has_all,) in table):
            there = list(range(len(grads)))
        else:
            columns = zip(*ctx.comm.objects(given, name), strict=True)
            there = [i for i, column in enumerate(columns) if any(column)]
        filled = [_filled(grads[i], *ctx.kinds[i]) for i in there]
        found: list[Any] = [None] * len(grads)
        for i, x in zip(there, AllReduce.apply(ctx.comm, name, *filled) if there else (), strict=True):
            found[i] = x
        return None, None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(x.view_as(x) for x in tangents[4:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return GradientSum.apply(*args), tuple(in_dims[4:])


def _handed_on(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients through one node for all of them, the same in all processes; what is not there stays so."""
    if not any(grad is not None for grad in grads):
        return [None] * len(grads)
    filled = [_filled(grad, *kind) for grad, kind in zip(grads, ctx.kinds, strict=True)]
    found = GradientSum.apply(ctx.comm, ctx.name, None, True, *filled)
    return [None if grad is None else x for grad, x in zip(grads, found, strict=True)]


class ZeroGradients(torch.autograd.Function):
    """The first `count` tensors as they are, as functions of the others with gradients of zero.

    So that a process without shards takes part in the backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = ctx.saved_tensors
        zeros = [torch.zeros_like(x) for x in inputs]
        # They depend on the inputs again, so that this process takes part in a gradient of the gradient.
        return None, *([None] * ctx.count), *ZeroGradients.apply(len(zeros), *zeros, *inputs, *grads)


def _filled(grad: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def _batched(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]
