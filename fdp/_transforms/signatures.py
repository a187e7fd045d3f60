"""What type checkers know of functions that fdp makes: the arguments of the user's function, and the result."""

from collections.abc import Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, overload

import torch

from fdp._placement.sharded import Slots
from fdp._trees.types import Auto, AuxWeight, DeviceLike, Devices, Dims, Executor, Function, Randomness, Reduction, Tree

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


class Mapped(Protocol[P, T_co]):
    """A function with the arguments of another. In place of each there may be a `Sharded` or a `Replicated`."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, on_slots: Slots, /, *args: Any, **kwargs: Any) -> Any: ...  # gradients are like the argument
    @overload
    def __call__(self, first: Any, on_slots: Slots, /, *args: Any, **kwargs: Any) -> T_co: ...
    @overload
    def __call__(self, first: Any, second: Any, on_slots: Slots, /, *args: Any, **kwargs: Any) -> T_co: ...


class Untold:
    """Never made: of all functions, those of whose result nothing is known return one, for a type checker."""


class RunOptions(TypedDict, total=False):
    """The keyword arguments of all of them."""

    devices: Devices
    executor: Executor
    seed: int | None
    randomness: Randomness
    axis_name: str


class SlotOptions(RunOptions, total=False):
    """The keyword arguments of `parallel_apply`."""

    kwargs: Mapping[str, Tree] | None


class MapOptions(RunOptions, total=False):
    """The keyword arguments of `shard_map`, but for `out_dims`."""

    in_dims: Dims
    kwarg_dims: Dims
    output_device: DeviceLike | None
    weights: Sequence[float] | None


class GradOptions(MapOptions, total=False):
    """The keyword arguments of `value_and_grad`."""

    reduction: Reduction
    count: Function | None
    aux_dims: Dims | Auto
    aux_weight: AuxWeight
    create_graph: bool | None
    microbatches: int
    reduce_dtype: torch.dtype | None
