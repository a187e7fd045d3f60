"""Names of types. Nothing here runs."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch

Tree: TypeAlias = Any
"""An optree pytree: nested containers with tensors and other values as leaves."""

DeviceLike: TypeAlias = str | torch.device
Devices: TypeAlias = DeviceLike | Sequence[DeviceLike | int] | None
"""What a user may write for devices; a sequence has one entry per slot."""

Dims: TypeAlias = Any
"""A prefix tree whose leaves say, for each tensor, which dimension holds the rows."""

Executor: TypeAlias = Literal["auto", "sequential", "threads"]
Randomness: TypeAlias = Literal["different", "same", "rows"]
Reduction: TypeAlias = Literal["mean", "sum"]
AuxWeight: TypeAlias = Literal["rows", "count"]
Function: TypeAlias = Callable[..., Any]


class Auto(enum.Enum):
    """The type of `AUTO`, which stands for a default that depends on the other arguments."""

    AUTO = "AUTO"

    def __repr__(self) -> str:
        return "AUTO"

    def __reduce_ex__(self, protocol: object) -> Any:  # a name, which is found in the module
        return "AUTO"


Auto.__module__ = "fdp"  # where pickles find it
AUTO: Final = Auto.AUTO
