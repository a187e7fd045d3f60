"""Where slots are: on the CPU, or with ACCELERATOR=virtual on a virtual accelerator and, among others, on the CPU.

An accelerator that is installed stays for the life of a process, so that the choice is for all tests of one.
"""

import os
from typing import Any

import pytest
import torch

import fdp
from tests.accelerator.double import install
from tests.common.containers import mapped
from tests.common.virtual import VirtualTensor

ACCELERATOR = os.environ.get("ACCELERATOR", "")
if ACCELERATOR not in ("", "virtual"):
    raise ValueError(f"ACCELERATOR is {ACCELERATOR!r}; expected 'virtual', or nothing")
if ACCELERATOR:
    install(4)

CPU = torch.device("cpu")
PLACES = fdp.available_devices() if ACCELERATOR else (CPU,)

cpu_only = pytest.mark.skipif(bool(ACCELERATOR), reason="not for the virtual accelerator")


def spread(slots: int) -> list[torch.device]:
    """As many slots, on all devices in turn."""
    return [PLACES[i % len(PLACES)] for i in range(slots)]


def generators() -> list[torch.Generator]:
    """Those of all devices."""
    others = torch.get_device_module(PLACES[0]).default_generators if ACCELERATOR else ()
    return [torch.default_generator, *others]


def memory_of(tensor: torch.Tensor) -> int:
    """Where its elements are."""
    return (tensor.host if isinstance(tensor, VirtualTensor) else tensor).untyped_storage().data_ptr()


def moved(tree: Any, device: torch.device = CPU) -> Any:
    """The tree with every tensor on a device; what was one tensor stays one, and gradients lead back."""
    there: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        if id(leaf) not in there:
            there[id(leaf)] = leaf.to(device)
        return there[id(leaf)]

    return mapped(move, tree)
