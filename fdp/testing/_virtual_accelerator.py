"""An accelerator made of the CPU, with as many devices as you like: to run code for several GPUs without one."""

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._autograd import DeviceType
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

from fdp._placement import packing
from fdp._placement.devices import available_devices
from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor, copy_into

_INSTALLING = threading.Lock()
_kernels: list[torch.library.Library] = []


def install_virtual_accelerator(count: int) -> tuple[torch.device, ...]:
    """Give this process an accelerator with devices `virtual:0`, `virtual:1`, ..., which compute on the CPU.

    Code for several GPUs then runs without one, with real values: `torch.accelerator` finds the devices, tensors live
    on one of them, and an operation that is given tensors of two is an error. Every device has a random generator of
    its own, and every thread its current device. While an operation draws, the CPU's generator stands in for that one:
    what another thread draws on the CPU at that moment may come again. An operation is done when it returns, and a
    backward runs in the thread that starts it: about speed, and about what happens in which order on a GPU, it says
    nothing.

    It lasts until the process ends. For tests, let them have a process of their own.

    >>> import fdp, torch
    >>> from fdp.testing import install_virtual_accelerator
    >>> devices = install_virtual_accelerator(4)  # doctest: +SKIP
    >>> fdp.available_devices() == devices  # doctest: +SKIP
    True
    >>> x = torch.arange(4.0, device=devices[1])  # doctest: +SKIP
    >>> fdp.scatter(x, devices)  # doctest: +SKIP
    Sharded(4 slots on virtual:0, virtual:1, virtual:2, virtual:3, rows 1+1+1+1: float32[1])
    >>> x + x.to("virtual:2")  # doctest: +SKIP
    Traceback (most recent call last):
    RuntimeError: aten.add.Tensor: expected all tensors to be on the same device, but found virtual:1, virtual:2

    What torch does not let a backend in Python have is missing: sparse, nested and quantized tensors, lazy modules (run
    them on the CPU once, then move them), `torch.Generator` for a virtual device (generators of the CPU are taken),
    streams that run side by side, storage that can be looked at, DLPack, pinned memory, functions as `map_location` of
    `torch.load`, and `torch.compile`. Autocast, `nn.LSTM`, `nn.GRU` and packed sequences raise here; try them with
    `virtual_devices`, on the CPU. `ctc_loss` takes lengths on the device only. Tied parameters come apart in
    `Module.to`: tie them afterwards.

    Args:
        count: Number of devices, at least 1.

    Returns:
        The devices, as `available_devices` has them.

    Raises:
        ValueError: `count` is not a positive int.
        RuntimeError: There is an accelerator already: a real one, a backend that is not built in, or a virtual one with
            another number of devices.
    """
    where = "install_virtual_accelerator"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{where}: expected a positive number of devices, got {count!r}")
    with _INSTALLING:
        if _kernels:
            if count == virtual.device_count():
                return available_devices()
            raise RuntimeError(
                f"{where}: installed with {virtual.device_count()} devices already, which a process cannot change; "
                f"start another one for {count}"
            )
        packing.PLAIN.add(VirtualTensor)
        name = torch._C._get_privateuse1_backend_name()
        if name != "privateuseone":
            raise RuntimeError(f"{where}: the backend {name!r} stands where the virtual accelerator would")
        real = torch.accelerator.current_accelerator(check_available=True)
        if real is not None:
            raise RuntimeError(f"{where}: there is a real accelerator, {str(real)!r}; hide it from this process")
        virtual.create(count)
        backend_registration._setup_privateuseone_for_python_backend(
            virtual.NAME, backend_module=virtual, device_guard=_Guard()
        )
        _kernels.append(_kernels_without_a_tensor())
        _follow_current_device()
        torch.serialization.register_package(0, lambda storage: None, _placed)
        _run_backward_in_calling_thread()
    return available_devices()


def _kernels_without_a_tensor() -> torch.library.Library:
    """The kernels that have no tensor to start from: whatever else makes one is made of these."""
    aten, ops = torch.library.Library("aten", "IMPL"), cast(Any, torch.ops.aten)
    factories = {
        "empty.memory_format": ops.empty.memory_format,
        "empty_strided": ops.empty_strided.default,
        "_efficientzerotensor": ops.zeros.default,
    }
    for name, factory in factories.items():
        aten.impl(name, functools.partial(_make, factory), "PrivateUse1")
    aten.impl("_copy_from", lambda source, target, _=False: copy_into(target, source), "PrivateUse1")  # torch.tensor(…)
    return aten


def _make(factory: Callable[..., torch.Tensor], *args: Any, device: torch.device, **options: Any) -> torch.Tensor:
    return VirtualTensor(factory(*args, device="cpu", **options), virtual.resolve(device))


class _Placed(torch.UntypedStorage):
    """Storage of the CPU for a tensor on a virtual device: what `torch.load` makes tensors of."""

    place: torch.device

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.place


def _placed(storage: Any, location: str) -> Any:
    if torch.device(location).type != virtual.NAME:
        return None
    storage.__class__ = _Placed
    storage.place = virtual.resolve(location)
    return storage


def _follow_current_device() -> None:
    # torch keeps the current device in C++, where for a backend in Python it is always 0
    # (PythonDeviceGuard in torch/csrc/acc/Module.cpp): what torch.accelerator calls is replaced.
    core: Any = torch._C
    core._accelerator_getDeviceIndex = virtual.current_device
    core._accelerator_setDeviceIndex = virtual.exchange_device
    core._accelerator_exchangeDevice = virtual.exchange_device
    core._accelerator_maybeExchangeDevice = virtual.exchange_device
    core._accelerator_getStream = virtual.current_stream
    core._accelerator_synchronizeDevice = virtual.synchronize
    # And what takes "virtual" for the current device before any kernel can see it.
    _device_constructors()  # remembers the functions that `with torch.device(...)` is about, as they are now
    for owner, function in ((torch.Tensor, "to"), (torch, "tensor"), (torch, "as_tensor")):
        setattr(owner, function, _on_current_device(getattr(owner, function)))


def _on_current_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def resolved(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_resolve, args), **{name: _resolve(value) for name, value in kwargs.items()})

    return resolved


def _resolve(value: Any) -> Any:
    is_current = isinstance(value, str | torch.device) and str(value) == virtual.NAME
    return virtual.resolve(value) if is_current else value


_DeviceGuard: Any = cast(Any, torch._C)._acc.DeviceGuard


class _Guard(_DeviceGuard):
    """What torch asks for the kind of device, around every node of a backward.

    It asks also while an error of Python's is on its way through torch, and there an error in the answer ends the
    process. So the error is put aside; torch then says that it has none, and `run_here` raises it.
    """

    def type_(self) -> Any:
        try:
            object()  # fails if an error is on its way
        except SystemError as error:
            _RAISED.error = error.__cause__
        return DeviceType.PrivateUse1


class _Raised(threading.local):
    error: BaseException | None = None


_RAISED = _Raised()


def _run_backward_in_calling_thread() -> None:
    # Autograd would hand over to a thread for each device, and of those it knows one (PythonDeviceGuard::deviceCount).
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except SystemError:
            error, _RAISED.error = _RAISED.error, None
            if error is None:
                raise
        try:
            raise error
        finally:
            del error  # no cycle

    modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
    for module in modules:
        module._engine_run_backward = run_here
