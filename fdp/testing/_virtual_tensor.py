"""The tensors of the virtual accelerator: each holds a tensor of the CPU, which does the computing."""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._utils import _rebuild_device_tensor_from_cpu_tensor, _rebuild_parameter
from torch.utils._pytree import tree_iter, tree_map_only

from fdp._execution.generators import put_states, states_of
from fdp.testing import _virtual_device as virtual

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
            device=device,
        )
        self.host = host
        return self

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::copy_":
            return copy_into(*args, **kwargs)
        if name == "aten::_to_copy":
            return _to_copy(*args, **kwargs)
        if _is_composite(func):  # met in inference mode, where autograd does not take it apart
            return func.decompose(*args, **kwargs)
        return _compute(func, args, kwargs)

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
    written = _written(func, args, kwargs)
    device = _common_device(func, args, kwargs, written)
    target = device if kwargs.get("device") is None else virtual.resolve(kwargs["device"])
    held = {id(x.host): x for x in tree_iter((args, kwargs)) if isinstance(x, VirtualTensor)}
    host_args, host_kwargs = tree_map_only(VirtualTensor, _host, (args, kwargs))
    with (
        _drawing(func, args, kwargs, target),
        torch._C._DisableAutocast(),
    ):  # what is set for the CPU is not about this device
        try:
            out = func(*host_args, **_host_options(host_kwargs))
        except NotImplementedError as error:
            here = f"{func}: {device} computes on the CPU, which has no kernel for it"
            raise NotImplementedError(f"{here}. Try it on fdp.virtual_devices(n)") from error
    for x in held.values() if written else ():  # after `resize_`, `t_`, `set_` and the like
        if (x.shape, x.stride(), x.storage_offset()) != (x.host.shape, x.host.stride(), x.host.storage_offset()):
            x.data = VirtualTensor(x.host, x.device)
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):  # these leave it to the kernel of a device
        torch.autograd.graph.increment_version(x for x in written if not x.is_inference())
    with _as_viewed(func, args):
        # What is written in place is also returned, and stays the tensor that it was.
        return tree_map_only(torch.Tensor, lambda x: held[id(x)] if written and id(x) in held else _on(target, x), out)


def _as_viewed(func: OpOverload, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[object]:
    """A view is an inference tensor if its base is one, and not because the mode is on."""
    if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _common_device(func: OpOverload, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> torch.device:
    """The one device that all tensors are on; numbers and indices of the CPU may go with them, as on CUDA."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    indices = {id(x) for x in tree_iter(args[1])} if func._schema.name in _INDEXING else ()
    free = {x for x in tensors if x.device.type == "cpu" and (x.dim() == 0 or id(x) in indices)}
    devices = {x.device for x in tensors if x not in free}
    if len(devices) > 1 or not all(isinstance(x, VirtualTensor) for x in written):
        found = sorted({str(x.device) for x in tensors})
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {', '.join(found)}")
    return next(iter(devices))


_INDEXING = {f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")}


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _outputs(func)]
    return [x for x in tree_iter(given) if isinstance(x, torch.Tensor)]


@functools.cache
def _outputs(func: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _host_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a factory, for the held tensor."""
    device = options.get("device")
    return options if device is None or device.type != virtual.NAME else options | {"device": torch.device("cpu")}


@contextlib.contextmanager
def _drawing(func: OpOverload, args: Any, kwargs: Any, device: torch.device) -> Iterator[None]:
    """The CPU's generator stands in for the one of a device: not every operation takes a generator."""
    is_given = any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
    if is_given or device.type != virtual.NAME or torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    both = [torch.default_generator, virtual.default_generators[device.index]]
    with _ONE_DRAWS:
        before, there = states_of(both)
        put_states(both[:1], [there])
        try:
            yield
        finally:
            put_states(both, [before, *states_of(both[:1])])


_ONE_DRAWS = threading.Lock()


def _on(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    if device.type != virtual.NAME:
        return host
    # A conjugate that is still to be taken is a bit of a tensor, and torch would look for it at the virtual one.
    return VirtualTensor(host.resolve_conj().resolve_neg(), device)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if isinstance(tensor, VirtualTensor) else tensor
