"""Kernels of the virtual accelerator for what has no tensor to start from."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor, copy_into

_aten: Any = torch.ops.aten

# Whatever else makes a tensor is made of these.
_FACTORIES = {
    "empty.memory_format": _aten.empty.memory_format,
    "empty_strided": _aten.empty_strided.default,
    "_efficientzerotensor": _aten.zeros.default,
}


def register() -> torch.library.Library:
    """Register the kernels, which last as long as what is returned."""
    aten = torch.library.Library("aten", "IMPL")
    for name, factory in _FACTORIES.items():
        aten.impl(name, functools.partial(_make, factory), "PrivateUse1")
    aten.impl("_copy_from", lambda source, target, _=False: copy_into(target, source), "PrivateUse1")  # torch.tensor(…)
    return aten


def _make(factory: Callable[..., torch.Tensor], *args: Any, device: torch.device, **options: Any) -> torch.Tensor:
    return VirtualTensor(factory(*args, device="cpu", **options), virtual.resolve(device))
