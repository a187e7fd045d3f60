"""Batch norm with the statistics of all slots."""

import math
from typing import Any

import torch
from torch import Tensor

from fdp._collectives.api import psum
from fdp._placement.moves import accumulator
from fdp._placement.slot import AXES
from fdp._trees import torch_private
from fdp._trees.not_compiled import leave_all_alone


class SyncBatchNorm(torch_private.BatchNorm):
    """Batch norm whose statistics are those of the rows of all slots: `torch.nn.BatchNorm1d`, `2d` and `3d` in one.

    With `apply, state = functional(network)`, outputs, gradients and new buffers are those of one device:
    `dp_apply(apply, state, x, devices) == apply(state, x)`, for any split.

    >>> import fdp, torch
    >>> apply, state = fdp.functional(fdp.nn.SyncBatchNorm(1, affine=False))
    >>> x = torch.tensor([[1.0], [2.0], [6.0]])
    >>> out, buffers = fdp.dp_apply(apply, state, x, fdp.virtual_devices(2))
    >>> torch.allclose(out, torch.nn.functional.batch_norm(x, None, None, training=True))
    True
    >>> buffers["running_mean"], buffers["running_var"]  # 0.9 times the first and 0.1 times these: 3 and 7
    (tensor([0.3000]), tensor([1.6000]))

    Counts, sums and centred sums of squares are summed over the slots by `psum`, where the module is in training or has
    no running statistics; half precision is summed in float32. Slots without rows contribute nothing. Elsewhere, and
    where no mapped call has the name, it is an ordinary batch norm. So is a call with another `axis_name`: the names
    must agree. With microbatches, the statistics are those of one microbatch of each slot.

    On several slots and under transforms new running statistics are put in place of the old ones, which are not written
    to: `functional` returns them, and a module that is called inside `torch.func.grad` keeps them; under `vmap` call it
    through `functional`. State dicts
    are those of `torch.nn.BatchNorm1d`. In training `torch.compile` breaks its graph here: compiled code sees no slots.

    Args:
        num_features: Channels: dimension 1 of inputs, which are `(rows, channels, ...)`.
        eps, momentum, affine, track_running_stats, device, dtype, bias: As in `torch.nn.BatchNorm1d`.
        axis_name: The calls over whose slots statistics are, the innermost with this name.

    Returns:
        From calls: a tensor like the input.

    Raises:
        ValueError: From calls: fewer than two dimensions, another number of channels, or in training a single value a
            channel on all slots together.
        TypeError: From calls: an input that is not floating-point.
        RuntimeError: From calls: what `psum` raises.

    torch's own class of this name is for distributed processes with a GPU each:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        axis_name: str = "data",
    ) -> None:
        options = {} if bias else {"bias": False}  # torch 2.11 has no such argument
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.axis_name = axis_name

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel."""
        self._check_input_dim(input)
        shared = self._is_shared()
        takes_batch = self.training or (self.running_mean is None and self.running_var is None)
        if takes_batch and (
            shared or torch_private.is_transformed()
        ):  # torch's kernel writes to statistics, in no vmap
            return self._over_slots(input, shared)
        return super().forward(input)

    def extra_repr(self) -> str:
        """What the constructor was given."""
        return f"{super().extra_repr()}, axis_name={self.axis_name!r}"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"SyncBatchNorm: expected at least 2 dimensions, (rows, channels, ...), got {input.ndim}")
        if input.shape[1] != self.num_features:  # a single channel would broadcast, and nobody notice
            raise ValueError(f"SyncBatchNorm: expected {self.num_features} channels, got input size {input.shape}")
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm: expected a floating-point input, got {input.dtype}")

    def _is_shared(self) -> bool:
        """Whether other slots have rows of the batch."""
        axis = next((axis for axis in reversed(AXES.get()) if axis.slot.axis_name == self.axis_name), None)
        return axis is not None and axis.slot.count > 1

    def _over_slots(self, input: Tensor, shared: bool) -> Tensor:
        """Means first, then squares around them: sums of plain squares of large numbers would lose how they differ.

        The two-pass algorithm of Chan, Golub and LeVeque, https://www.jstor.org/stable/2683386
        """
        x = input.to(accumulator(input.dtype))
        dims = [0, *range(2, x.ndim)]
        own = math.prod(x.shape[dim] for dim in dims)
        sums = x.sum(dims, keepdim=True)  # (1, channels, 1, ...)
        count, sums = psum((own, sums), self.axis_name) if shared else (own, sums)
        if count == 0:
            return super().forward(input)
        if count == 1:
            where = ", and one value in all slots" if shared else ""
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.shape}{where}"
            )
        mean = sums / count
        centred = x - mean
        squares = centred.square().sum(dims, keepdim=True)
        squares = psum(squares, self.axis_name) if shared else squares
        out = centred * (squares / count + self.eps).rsqrt()
        if self.weight is not None:
            out = out * self.weight.to(out.dtype).reshape(mean.shape)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(mean.shape)
        self._track(mean.detach().flatten(), squares.detach().flatten() / (count - 1))
        return out.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Put statistics that have moved towards those of a batch in place of the running ones."""
        if not self.training or not self.track_running_stats:
            return
        with torch.inference_mode(False), torch.no_grad():  # they outlive the call: a later one may need gradients
            factor: Any = self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked = _unwrapped(self.num_batches_tracked + 1)
            if factor is None:
                factor = 0.0 if self.num_batches_tracked is None else 1 / self.num_batches_tracked.to(mean.dtype)
            for name, new in (("running_mean", mean), ("running_var", var)):
                old = getattr(self, name)
                if old is not None:
                    setattr(self, name, _unwrapped((old + (new - old) * factor).to(old.dtype)))


def _unwrapped(tensor: Tensor) -> Tensor:
    """What a tensor is after the transforms of torch.func that differentiate here, which it has no part in."""
    while torch_private.is_gradtrackingtensor(tensor):
        tensor = torch_private.get_unwrapped(tensor)
    return tensor


leave_all_alone(SyncBatchNorm.forward)  # compiled code cannot see which slot it runs in
