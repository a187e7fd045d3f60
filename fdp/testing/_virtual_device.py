"""The device module of the virtual accelerator: what `torch.get_device_module("virtual")` returns."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch._C._autograd import DeviceType

NAME = "virtual"

# torch cannot make generators for a backend that is written in Python; those of the CPU give the numbers.
default_generators: tuple[torch.Generator, ...] = ()

_initialized = True  # torch.utils.checkpoint looks here before it keeps the state of the generators

_CURRENT = threading.local()

_Device = torch.device | str | int | None


def create(count: int) -> None:
    """Make devices, each with a generator."""
    global default_generators
    default_generators = tuple(torch.Generator() for _ in range(count))
    manual_seed_all(torch.initial_seed())


def resolve(device: torch.device | str) -> torch.device:
    """A device with its index, by default the current one; a virtual device must exist."""
    device = torch.device(device)
    return torch.device(NAME, index_of(device)) if device.type == NAME else device


def index_of(device: _Device) -> int:
    """The index of a virtual device, by default of the current one."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index is None:
        return current_device()
    if not 0 <= index < device_count():
        raise RuntimeError(f"{NAME}:{index} does not exist: there are {device_count()} {NAME} devices")
    return index


# ---- what torch asks of a device module


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return False  # nothing is lost in a fork


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return len(default_generators)


def current_device() -> int:
    return getattr(_CURRENT, "index", 0)


def set_device(device: _Device) -> None:
    _CURRENT.index = index_of(device)


@contextlib.contextmanager
def device(device: _Device) -> Iterator[None]:
    before = exchange_device(index_of(device))
    try:
        yield
    finally:
        set_device(before)


def exchange_device(index: int) -> int:
    """Make a device the current one and return which was; a negative index changes nothing."""
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


def current_stream(device: _Device = None) -> torch.Stream:
    # Operations are done when they return, so that there is one stream per device and nothing to wait for.
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=DeviceType.PrivateUse1.value)


def synchronize(device: _Device = None) -> None:
    index_of(device)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    default_generators[index_of(device)].set_state(state)


class _NoAutocast(list[torch.dtype]):
    """What `torch.autocast` looks for its dtype in, if it is switched on. It would cast nothing, and not say so."""

    def __contains__(self, dtype: object) -> bool:
        raise RuntimeError(
            "virtual devices have no autocast: try it by torch.autocast('cpu') on fdp.virtual_devices(n)"
        )


def get_amp_supported_dtype() -> list[torch.dtype]:
    return _NoAutocast()
