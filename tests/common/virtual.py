"""What the virtual accelerator shows to tests: copies that anybody makes, and the memory on the host."""

from fdp.testing._virtual_tensor import Copied, VirtualTensor, record_copies

__all__ = ["Copied", "VirtualTensor", "record_copies"]
