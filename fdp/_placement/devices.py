"""What the user says about devices, turned into a tuple of `torch.device`, one per slot."""

from collections.abc import Sequence
from typing import Any

import torch

from fdp._placement.slot import current_slot
from fdp._trees import torch_private
from fdp._trees.not_compiled import constant_while_compiling
from fdp._trees.types import DeviceLike, Devices

_CPU = torch.device("cpu")


def virtual_devices(n: int, device: DeviceLike = "cpu") -> tuple[torch.device, ...]:
    """The same device `n` times: `n` slots to develop and test on, without `n` devices.

    >>> import fdp
    >>> fdp.virtual_devices(2)
    (device(type='cpu'), device(type='cpu'))

    Args:
        n: Number of slots, at least 1.
        device: The device that fills all of them.

    Raises:
        ValueError: `n` is less than 1, or the device is unknown or unavailable.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"virtual_devices: expected a positive number of slots, got {n!r}")
    return (as_device(device, "virtual_devices"),) * n


@constant_while_compiling
def available_devices() -> tuple[torch.device, ...]:
    """All accelerators of this machine, else the CPU: what `devices=None` stands for.

    >>> import fdp
    >>> len(fdp.available_devices()) >= 1
    True
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (torch.device("cpu"),)
    return tuple(torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count()))


def as_devices(devices: Devices, where: str, name: str = "devices") -> tuple[torch.device, ...]:
    """One `torch.device` per slot; messages call the argument `name`."""
    if (type(devices) is tuple or type(devices) is list) and 0 < len(devices) == devices.count(_CPU):
        return tuple(devices)
    if devices is None:
        slot = current_slot()
        return available_devices() if slot is None else (slot.device,)
    if isinstance(devices, str | torch.device):
        return (as_device(devices, where),)
    if isinstance(devices, int):
        number = 0 if isinstance(devices, bool) else max(devices, 0)  # no advice that is an error again
        n = number or 4
        raise TypeError(
            f"{where}: {name}={devices!r} is a bare number. For {n} slots on the CPU write "
            f"{name}=fdp.virtual_devices({n}); for the accelerator with that index {name}=[{number}]"
        )
    if not isinstance(devices, Sequence):
        raise TypeError(
            f"{where}: {name} must be None, a device or a sequence of devices, got {type(devices).__name__}"
        )
    if len(devices) == 0:
        raise ValueError(f"{where}: {name} is empty. {_existing()}")
    return tuple(as_device(device, where) for device in devices)


def as_device(device: Any, where: str) -> torch.device:
    """A device with its index, checked to exist; an int is the index of an accelerator."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(f"{where}: {device!r} is no device; expected e.g. 'cpu', 'cuda:1', 1 or a torch.device")
    if isinstance(device, int):
        existing = available_devices()
        if existing[0].type == "cpu" or not 0 <= device < len(existing):
            raise ValueError(f"{where}: there is no accelerator with index {device}. {_existing()}")
        return existing[device]
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{where}: {device!r} is no device that torch knows. {_existing()}") from error
    if resolved.type == "cpu":
        return torch.device("cpu")  # torch puts tensors for "cpu:0" on "cpu"; the two would not compare equal
    if resolved.type == "meta":
        return resolved
    return _existing_accelerator(resolved, where)


def _existing_accelerator(device: torch.device, where: str) -> torch.device:
    existing = available_devices()
    if device.index is None and device.type == existing[0].type:
        return torch.device(device.type, torch.accelerator.current_device_index())
    if device not in existing and torch_private.fake_mode() is None:
        raise ValueError(f"{where}: device '{device}' is not available. {_existing()}")
    return device


def _existing() -> str:
    names = ", ".join(repr(str(device)) for device in dict.fromkeys((*available_devices(), torch.device("cpu"))))
    return f"Available here: {names}. To try several slots on one device: fdp.virtual_devices(n)"
