"""Settings of torch and Python, for as long as a block or a test."""

import contextlib
import gc
import importlib
import warnings
from collections.abc import Iterator

import torch


def load_forward_mode() -> None:
    """What forward-mode AD loads at its first use, where torch warns of its own `torch.jit.script`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # from torch 2.15 on
        importlib.import_module("torch._decomp.decompositions_for_jvp")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str = "meta") -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet. Tracing makes so many objects that looking for garbage takes a fifth of it."""
    torch.compiler.reset()
    with without_collector():
        yield
    torch.compiler.reset()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is freed, is freed by counting references."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
