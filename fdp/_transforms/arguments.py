"""The arguments of a call, named for messages and checked."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.sharded import Slots
from fdp._trees.message_lists import names
from fdp._trees.types import Dims, Tree


class Args(NamedTuple):
    """Arguments, those by name last, with their specs. `first` and `star` are what messages call them."""

    trees: tuple[Tree, ...]
    dims: tuple[Dims, ...]
    keywords: tuple[str, ...]
    first: tuple[str, ...] = ()
    star: str = "args"

    @property
    def positional(self) -> int:
        """How many are positional."""
        return len(self.trees) - len(self.keywords)

    @property
    def names(self) -> tuple[str, ...]:
        """`params`, `inputs[0]`, `kwargs['mask']`, ..."""
        star = [f"{self.star}[{i}]" for i in range(self.positional - len(self.first))]
        return (*self.first, *star, *[f"kwargs[{k!r}]" for k in self.keywords])

    @property
    def choices(self) -> list[str]:
        """What messages call the specs."""
        return ["in_dims"] * self.positional + ["kwarg_dims"] * len(self.keywords)


def input_args(
    params: Tree, inputs: Tree, in_dims: Dims, kwargs: Mapping[str, Tree], kwarg_dims: Dims, where: str
) -> Args:
    """The arguments of `dp_apply`: inputs are several if they are a tuple."""
    by_name = dims_by_name(kwargs, kwarg_dims, where) if kwargs != {} or type(kwarg_dims) is dict else ()
    if type(inputs) is not tuple:
        return Args((params, inputs, *kwargs.values()), (None, in_dims, *by_name), (*kwargs,), ("params", "inputs"))
    dims = star_dims(in_dims, len(inputs), where)
    return Args((params, *inputs, *kwargs.values()), (None, *dims, *by_name), (*kwargs,), ("params",), "inputs")


def star_args(args: tuple[Tree, ...], in_dims: Dims, kwargs: Mapping[str, Tree], kwarg_dims: Dims, where: str) -> Args:
    """The arguments of a function that was mapped."""
    by_name = dims_by_name(kwargs, kwarg_dims, where) if kwargs != {} or type(kwarg_dims) is dict else ()
    dims = in_dims if type(in_dims) is tuple and len(in_dims) == len(args) else star_dims(in_dims, len(args), where)
    return Args((*args, *kwargs.values()), (*dims, *by_name), (*kwargs,))


def star_dims(in_dims: Dims, count: int, where: str) -> tuple[Dims, ...]:
    """One spec for all star arguments, or a tuple with one for each."""
    if type(in_dims) is tuple:
        if len(in_dims) != count:
            raise ValueError(f"{where}: in_dims has {len(in_dims)} entries for {count} positional arguments")
        return in_dims
    if type(in_dims) in (list, dict):
        raise ValueError(
            f"{where}: in_dims is a {type(in_dims).__name__}; expected one spec for all of the {count} positional "
            "arguments, or a tuple with one for each"
        )
    return (in_dims,) * count


def dims_by_name(kwargs: Mapping[str, Tree], dims: Dims, where: str) -> Sequence[Dims]:
    """One spec for all keyword arguments, or a dict that may leave out names, which are then split along 0."""
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"{where}: kwargs must be a mapping of names to values, got {type(kwargs).__name__}")
    if wrong := [name for name in kwargs if not isinstance(name, str)]:
        raise TypeError(f"{where}: names of keyword arguments are strings, got {names(wrong)}")
    each = dims if isinstance(dims, Mapping) else dict.fromkeys(kwargs, dims)
    if unknown := [name for name in each if name not in kwargs]:
        raise ValueError(
            f"{where}: kwarg_dims names {names(unknown)}, but the keyword arguments are {names(list(kwargs))}"
        )
    return [each.get(name, 0) for name in kwargs]


IN_ORDER = {
    "": "Keyword inputs of the function go into kwargs={{{0!r}: ...}}",
    "*": "Several inputs are a tuple: dp_apply(fn, params, (x, y), devices)",
}
"""What to write where the arguments of `dp_apply` are not as they should be."""


def check_order(inputs: Tree, devices: Any, where: str) -> None:
    """The third argument is the inputs, the fourth the devices."""
    if devices is None and type(inputs) is tuple and inputs and all(isinstance(x, torch.device) for x in inputs):
        raise TypeError(f"{where}: the inputs are devices; the order is {where}(fn, params, inputs, devices)")
    if isinstance(devices, torch.Tensor | Slots | dict):
        raise TypeError(f"{where}: several inputs are a tuple: {where}(fn, params, (x, y), devices)")


def check_function(fn: Any, where: str) -> None:
    """A function, not a module."""
    if isinstance(fn, torch.nn.Module):
        name = type(fn).__name__
        raise TypeError(
            f"{where}: expected a function of (params, ...), got the nn.Module {name}. Write "
            f"apply, state = fdp.functional(module), then pass apply as the function and state as its first argument"
        )
    if not callable(fn):
        raise TypeError(f"{where}: expected a function, got {type(fn).__name__}")
