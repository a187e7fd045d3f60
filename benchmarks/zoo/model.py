"""What a library hands over: a module with a batch, built in one of several ways."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

ROWS = 5  # on three slots 2, 2 and 1
SIZES = (2, 2, 1)


class Model(NamedTuple):
    """A module and the keyword arguments of one call; each tensor among them has a row in dim 0 for each sample."""

    module: nn.Module
    batch: dict[str, Any]


# Each makes the model another way, the preferred first. One that does not work raises.
Ways: TypeAlias = Iterator[Callable[[], Model]]


class LeftOut(Exception):
    """A model that cannot be tried here, and why."""


def prepared(module: nn.Module) -> nn.Module:
    """In eval mode and float64; what is initialised as zero or one is not so any more, so that every part matters."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64), alpha=0.02)
    return module


def check_size(build: Callable[[], nn.Module], most: int) -> None:
    """A model that is too large is left out; its size is not known where it cannot be built without data."""
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        if (count := sum(p.numel() for p in build().parameters())) > most:
            raise LeftOut(f"{count // 10**6} million parameters")
