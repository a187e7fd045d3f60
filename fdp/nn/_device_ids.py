"""What torch.nn.DataParallel calls devices, an int for an accelerator, and what it says of unequal ones."""

import warnings
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


def warn_of_imbalance(devices: Sequence[torch.device]) -> None:
    """Warn if one GPU has far less memory or fewer cores than another: the others would wait for it."""
    if len(devices) > 1 and all(device.type == "cuda" for device in devices):
        properties = [torch.cuda.get_device_properties(device) for device in devices]
        message = imbalance(devices, [(each.total_memory, each.multi_processor_count) for each in properties])
        if message:
            warnings.warn(message, stacklevel=3)


def imbalance(devices: Sequence[torch.device], figures: Sequence[Sequence[float]]) -> str | None:
    """What to say of devices of which one has less than three quarters of what another has."""
    for column in zip(*figures, strict=True):
        poor, rich = column.index(min(column)), column.index(max(column))
        if column[poor] / column[rich] < 0.75:
            return (
                f"There is an imbalance between your GPUs. You may want to exclude GPU {devices[poor].index}, which "
                f"has less than 75% of the memory or cores of GPU {devices[rich].index}: leave it out of device_ids or "
                "of the environment variable CUDA_VISIBLE_DEVICES, or give it fewer rows by weights="
            )
    return None
