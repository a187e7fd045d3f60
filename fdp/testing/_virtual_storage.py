"""Loading files to virtual devices: tensors there are made of storage that stays on the CPU."""

from typing import Any

import torch

from fdp.testing import _virtual_device as virtual


class _Placed(torch.UntypedStorage):
    """Storage of the CPU for a tensor on a virtual device."""

    place: torch.device

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.place


def load_to_virtual_devices() -> None:
    """Let `torch.load` take a virtual device as `map_location`."""
    torch.serialization.register_package(0, lambda storage: None, _placed)


def _placed(storage: Any, location: str) -> Any:
    if torch.device(location).type != virtual.NAME:
        return None
    storage.__class__ = _Placed
    storage.place = virtual.resolve(location)
    return storage
