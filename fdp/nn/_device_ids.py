"""What torch.nn.DataParallel calls devices: an int for an accelerator."""

from collections.abc import Sequence
from typing import Any

import torch

from fdp._placement.devices import as_devices, available_devices
from fdp._trees.types import DeviceLike


def devices_of(device_ids: Sequence[DeviceLike | int] | None, where: str) -> tuple[torch.device, ...]:
    """One device per slot; none where torch would call the module itself: a script for GPUs on a machine without."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_ids is None:
        return () if accelerator is None or accelerator.type == "mps" else available_devices()
    given = [device_ids] if isinstance(device_ids, str | torch.device) else device_ids
    if accelerator is None and isinstance(given, Sequence) and all(map(_is_accelerator, given)):
        return ()
    return as_devices(device_ids, where, "device_ids")


def _is_accelerator(device: Any) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    try:
        return torch.device(device).type not in ("cpu", "meta")
    except (RuntimeError, TypeError):  # no device at all
        return False


def index_of(device: torch.device | None) -> Any:
    """What torch calls a device: the index of an accelerator."""
    return device if device is None or device.index is None else device.index
