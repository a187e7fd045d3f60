"""Functions to map: one that fdp has not seen yet, one that must not run, one that treats rows by themselves."""

import random
import types
from typing import Any

import torch


def anew(fn: Any) -> Any:
    """The same function, of which nothing is known."""
    code = fn.__code__.replace(co_firstlineno=random.randrange(1, 10**6))
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("ran before everything was checked")


def scores(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Treats every row by itself, and rounds the same however many there are."""
    return torch.tanh(x * w).sum(1)  # (rows, 4) -> (rows,)
