"""What the virtual accelerator shows to tests: copies that anybody makes, and the memory on the host."""

from collections import Counter
from collections.abc import Iterable

import torch

import fdp
from fdp.testing._virtual_tensor import Copied, VirtualTensor, record_copies

__all__ = ["Copied", "VirtualTensor", "record_copies", "traffic"]


def traffic(copies: Iterable[fdp.Transfer | Copied]) -> Counter[tuple[torch.device, torch.device]]:
    """Bytes from device to device. Small leaves travel together: there are fewer copies than leaves."""
    found: Counter[tuple[torch.device, torch.device]] = Counter()
    for copy in copies:
        found[copy.source, copy.target] += copy.nbytes
    return found
