"""Parameters and buffers without a shape, as lazy modules hold them, on virtual devices."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor

_MOVES = {"to", "cpu", "half", "float", "double", "char", "short", "int", "long", virtual.NAME}
_lazy: Any = torch.nn.parameter  # not all of it has types
_mixin, _parameter, _buffer = _lazy.UninitializedTensorMixin, _lazy.UninitializedParameter, _lazy.UninitializedBuffer


class _Uninitialized(_mixin):
    """What has no shape on a virtual device. Moved, it has none there either."""

    cls_to_become = VirtualTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        return _like(args[0], out) if func.__name__ in _MOVES else out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _like(self, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _kind(self), (self.requires_grad, self.device, self.dtype)


class VirtualUninitializedParameter(_Uninitialized, _parameter, VirtualTensor):
    """An `UninitializedParameter`, which becomes a tensor that torch takes for a parameter."""


class VirtualUninitializedBuffer(_Uninitialized, _buffer, VirtualTensor):
    """An `UninitializedBuffer`."""


def make_lazy_modules_work() -> None:
    """Let torch's own classes be made on virtual devices, and be moved there by `Tensor.to` as it is now."""
    # A module makes a new parameter of one that comes to another kind of device.
    _mixin.detach = lambda self: _like(self, self)
    _mixin.requires_grad_ = _require_grad
    _mixin._allowed_methods += [torch.Tensor.to, getattr(torch.Tensor, virtual.NAME)]
    tensor: Any = torch.Tensor
    tensor.to = _moving(tensor.to)
    _mixin._allowed_methods.append(tensor.to)
    for cls in (_parameter, _buffer):
        cls.__new__ = _making(cls.__new__)


def _moving(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(self, _mixin):
            return to(self, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return _like(self, to(self, *args, **kwargs))

    return moved


def _making(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def made(cls: Any, requires_grad: bool | None = None, device: Any = None, dtype: Any = None, **more: Any) -> Any:
        grad = cls is _parameter if requires_grad is None else requires_grad
        place = torch.empty(0, device=device, dtype=dtype)
        if not isinstance(place, VirtualTensor):
            return new(cls, grad, device, dtype, **more)
        there = VirtualUninitializedParameter if cls is _parameter else VirtualUninitializedBuffer
        made: Any = VirtualTensor.__new__(there, place.host, place.device)
        if cls is _parameter:
            made._is_param = True  # also when it has become a tensor
        return _require_grad(made, grad)

    return made


def _require_grad(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.requires_grad_(self, requires_grad)


def _like(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """A tensor without a shape like another, on the device and with the dtype of `place`."""
    return _kind(tensor)(tensor.requires_grad, place.device, place.dtype)


def _kind(tensor: torch.Tensor) -> Any:
    return _parameter if isinstance(tensor, _parameter) else _buffer
