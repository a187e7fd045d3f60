"""What tests of shards on four threads have in common."""

from collections.abc import Callable
from typing import Any

import torch

import fdp

X = torch.randn(8, 3, dtype=torch.float64)


def threads(fn: Callable[..., Any], params: Any, x: Any) -> Any:
    return fdp.dp_apply(fn, params, x, fdp.virtual_devices(4), executor="threads")


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.outer(w, w)).sin().sum(-1)
