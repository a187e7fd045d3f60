"""The virtual accelerator with more of the manners of GPUs, for tests of fdp.

`install` gives a process the devices of `install_virtual_accelerator`, on which moreover

- a backward runs in a thread for each device, which has no context variables (`backward.py`);
- the current device of what runs in a backward is that of its tensors (`backward.py`);
- work is put on streams, and what does not wait for the stream that it needs raises (`streams.py`);
- each time that the host waits for a device is counted, with the line of fdp that made it wait (`host_waits.py`).
"""

import torch

from fdp.testing import install_virtual_accelerator
from tests.accelerator.double import backward, operations, streams


def install(count: int) -> tuple[torch.device, ...]:
    """Give this process the devices; again with the same count does nothing."""
    is_new = torch._C._get_privateuse1_backend_name() == "privateuseone"
    devices = install_virtual_accelerator(count)
    if is_new:
        streams.install()
        operations.install()
        backward.install()
    return devices
