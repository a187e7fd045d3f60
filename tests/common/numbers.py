"""Numbers to compute with, the same at every call."""

import torch
from torch import Tensor

COUNTS = (1, 2, 3, 4, 7)
"""Numbers of slots."""

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different numbers, the same at every call."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(torch.sin(1 + count), torch.cos(2 + count)).to(dtype).reshape(shape)
    values = torch.sin(1 + count) if dtype.is_floating_point else (7 * count + 3) % (2 if dtype is torch.bool else 100)
    return values.to(dtype).reshape(shape)
