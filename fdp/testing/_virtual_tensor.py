"""The tensors of the virtual accelerator: each holds a tensor of the CPU, which does the computing."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._utils import _rebuild_device_tensor_from_cpu_tensor, _rebuild_parameter
from torch.utils._pytree import tree_iter, tree_map_only

from fdp.testing import _virtual_device as virtual

CPU = torch.device("cpu")
_DATA: Any = torch.Tensor.data


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual device. Its values are those of the CPU tensor that it holds."""

    host: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: Any, host: torch.Tensor, device: torch.device) -> "VirtualTensor":
        if host.layout is not torch.strided or host.is_quantized:
            raise NotImplementedError(f"{device}: the virtual accelerator has dense tensors only, not {host.layout}")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        self.host = host
        return self

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::copy_":
            return copy_into(*args, **(kwargs or {}))
        if name == "aten::_to_copy":
            return _to_copy(*args, **(kwargs or {}))
        if _is_composite(func):  # met in inference mode, where autograd does not take it apart
            return func.decompose(*args, **(kwargs or {}))
        return _compute(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history, as ever; setting it takes over what the other tensor holds."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        _DATA.__set__(self, new)  # a plain one is refused here: the device of a tensor is for life
        self.host = _host(new)

    # What torch refuses for subclasses, or does on device 0 because it asks its device guard.

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        here = {"dtype": self.dtype, "device": self.device}
        given = {name: value for name, value in options.items() if value is not None}
        return torch.tensor(data, **here | given)

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()
        if isinstance(self, torch.nn.Parameter):
            return _rebuild_parameter, (plain, self.requires_grad, OrderedDict())
        arguments = (_host(plain), self.dtype, str(self.device), self.requires_grad)
        return _rebuild_device_tensor_from_cpu_tensor, arguments


# ---- copies, the only operations that see two devices


class Copied(NamedTuple):
    """A copy from one device to another that was really made."""

    nbytes: int
    source: torch.device
    target: torch.device


_LOGS: dict[int, list[Copied]] = {}  # by id


@contextlib.contextmanager
def record_copies() -> Iterator[list[Copied]]:
    """A log of all copies between devices, from all threads, whoever makes them."""
    log: list[Copied] = []
    _LOGS[id(log)] = log
    try:
        yield log
    finally:
        del _LOGS[id(log)]


def _record(source: torch.Tensor, target: torch.device) -> None:
    if source.device != target:
        for log in list(_LOGS.values()):
            log.append(Copied(source.nbytes, source.device, target))


def copy_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)`, on or between any devices."""
    _record(source, target.device)
    _host(target).copy_(_host(source))
    return target


def _to_copy(source: torch.Tensor, **options: Any) -> torch.Tensor:
    device = virtual.resolve(options.get("device") or source.device)
    _record(source, device)
    host = torch.ops.aten._to_copy.default(_host(source), **_host_options(options))
    return _on(device, host)


# ---- everything else, on one device


def _compute(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = _common_device(func, args, kwargs)
    target = device if kwargs.get("device") is None else virtual.resolve(kwargs["device"])
    held = {id(x.host): x for x in tree_iter((args, kwargs)) if isinstance(x, VirtualTensor)}
    host_args, host_kwargs = tree_map_only(VirtualTensor, _host, (args, kwargs))
    call, host_kwargs = func, _host_options(host_kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and target.type == virtual.NAME:
        call, host_kwargs = _with_generator(func, args, host_kwargs, target)
    with torch._C._DisableAutocast():  # what is set for the CPU is not about this device
        try:
            out = call(*host_args, **host_kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{func}: {device} computes on the CPU, which has no kernel for it. Slots on the CPU need none: pass "
                "devices=fdp.virtual_devices(n)"
            ) from error
    written = _is_writing(func)
    if written:
        for tensor in held.values():
            _take_over_shape(tensor)
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):  # these leave it to the kernel of a device
        torch.autograd.graph.increment_version(x for x in _written(func, args, kwargs) if not x.is_inference())
    with _as_viewed(func, args):
        # What is written in place is also returned, and stays the tensor that it was.
        return tree_map_only(torch.Tensor, lambda x: held[id(x)] if written and id(x) in held else _on(target, x), out)


def _as_viewed(func: OpOverload, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[object]:
    """A view is an inference tensor if its base is one, and not because the mode is on."""
    if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _common_device(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The one device that all tensors are on; numbers and indices of the CPU may go with them, as on CUDA."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    indices = {id(x) for x in tree_iter(args[1])} if func._schema.name in _INDEXING else ()
    free = {x for x in tensors if x.device.type == "cpu" and (x.dim() == 0 or id(x) in indices)}
    devices = {x.device for x in tensors if x not in free}
    if len(devices) > 1 or not all(isinstance(x, VirtualTensor) for x in _written(func, args, kwargs)):
        found = sorted({str(x.device) for x in tensors})
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {', '.join(found)}")
    return next(iter(devices))


_INDEXING = {f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")}


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _is_writing(func: OpOverload) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    if not _is_writing(func):
        return ()
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_iter([given.get(name) for name in names]) if isinstance(x, torch.Tensor)]


def _take_over_shape(tensor: VirtualTensor) -> None:
    """Follow the held tensor after `resize_`, `t_`, `set_` and the like."""
    host = tensor.host
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (host.shape, host.stride(), host.storage_offset()):
        tensor.data = VirtualTensor(host, tensor.device)


def _host_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a factory, for the held tensor."""
    device = options.get("device")
    return options if device is None or device.type != virtual.NAME else options | {"device": CPU}


# ---- random numbers


def _with_generator(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A random operation that draws from the generator of a device, unless it was given another one."""
    own = virtual.default_generators[device.index]
    if func is torch.ops.aten.native_dropout.default:
        return functools.partial(_dropout, generator=own), kwargs
    variant = _taking_generator(func)
    if variant is None or kwargs.get("generator") is not None:
        return func, kwargs
    if len(args) > [a.name for a in variant._schema.arguments].index("generator"):
        return func, kwargs
    return variant, {**kwargs, "generator": own}


@functools.cache
def _taking_generator(func: OpOverload) -> OpOverload | None:
    """The operation, or the overload of it that takes a generator besides."""
    if any(a.name == "generator" for a in func._schema.arguments):
        return func
    wanted = {a.name for a in func._schema.arguments} | {"generator"}
    packet = func.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((op for op in overloads if {a.name for a in op._schema.arguments} == wanted), None)


def _dropout(x: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """`native_dropout`, which takes no generator."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=generator).bool()
    return x * mask * (1 / (1 - p) if p < 1 else 0), mask


def _on(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    if device.type != virtual.NAME:
        return host
    # A conjugate that is still to be taken is a bit of a tensor, and torch would look for it at the virtual one.
    return VirtualTensor(host.resolve_conj().resolve_neg(), device)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if isinstance(tensor, VirtualTensor) else tensor
