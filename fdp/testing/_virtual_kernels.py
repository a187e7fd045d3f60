"""Kernels of the virtual accelerator: for what has no tensor to start from, and for what the CPU has no kernel for."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor, copy_into

_aten: Any = torch.ops.aten

# Whatever else makes a tensor is made of these.
_FACTORIES = {
    "empty.memory_format": _aten.empty.memory_format,
    "empty_strided": _aten.empty_strided.default,
    "_efficientzerotensor": _aten.zeros.default,
}

# What autocast runs in the lower precision, and what it keeps in float32: the part of CUDA's lists that modules use.
_LOWER = (
    *("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "addbmm", "mv", "prelu", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution"),
    *("scaled_dot_product_attention", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_FLOAT32 = (
    *("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "norm.Scalar", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "binary_cross_entropy_with_logits"),
    *("exp", "log", "pow.Tensor_Scalar", "sum", "sum.dim_IntList", "prod", "cumsum"),
)


def register() -> list[torch.library.Library]:
    """Register the kernels; they last as long as what is returned."""
    aten, fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name, factory in _FACTORIES.items():
        aten.impl(name, functools.partial(_make, factory), "PrivateUse1")
    aten.impl("_copy_from", lambda source, target, _=False: copy_into(target, source), "PrivateUse1")  # torch.tensor(…)
    for name, kernel in (("_thnn_fused_lstm_cell", _lstm_cell), ("_thnn_fused_gru_cell", _gru_cell)):
        # Of differentiable operations, so that autograd needs no formula.
        aten.impl(name, kernel, "AutogradPrivateUse1")
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", lambda x, device=None: x.clone(), "CPU")  # asks for the allocator of an accelerator
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((_LOWER, None), (_FLOAT32, torch.float32)):
        for name in names:
            aten.impl(name, functools.partial(_autocast, _overload(name), dtype), "AutocastPrivateUse1")
    return [aten, fallback]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _make(factory: Callable[..., torch.Tensor], *args: Any, device: torch.device, **options: Any) -> torch.Tensor:
    options = {name: value for name, value in options.items() if name != "pin_memory"}
    return VirtualTensor(factory(*args, device="cpu", **options), virtual.resolve(device))


def _autocast(op: Callable[..., Any], dtype: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    to = torch.get_autocast_dtype(virtual.NAME) if dtype is None else dtype

    def cast(x: torch.Tensor) -> torch.Tensor:
        eligible = x.device.type == virtual.NAME and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(to) if eligible else x

    with torch._C._DisableAutocast():
        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        return op(*args, **kwargs)


def _lstm_cell(
    inputs: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = _plus(inputs, input_bias) + _plus(hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell, gates.detach()


def _gru_cell(
    inputs: torch.Tensor,
    hidden: torch.Tensor,
    state: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    ir, iz, i_new = _plus(inputs, input_bias).chunk(3, 1)
    hr, hz, h_new = _plus(hidden, hidden_bias).chunk(3, 1)
    update, new = (iz + hz).sigmoid(), (i_new + (ir + hr).sigmoid() * h_new).tanh()
    return new + update * (state - new), inputs.detach()


def _plus(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias
