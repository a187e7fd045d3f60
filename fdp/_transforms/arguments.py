"""The arguments of a call, named for messages and checked."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._execution.seeds import Seed
from fdp._placement.sharded import Slots
from fdp._trees.listing import names
from fdp._trees.types import Devices, Dims, Executor, Function, Tree


class Options(NamedTuple):
    """How a call is mapped, and `where`: the public function that messages name."""

    where: str
    devices: Devices
    weights: Sequence[float] | None
    executor: Executor
    seed: Seed | None
    axis_name: str


class Arg(NamedTuple):
    """An argument, what messages call it, and its spec."""

    name: str
    tree: Tree
    dims: Dims
    choices: str = "in_dims"


def input_args(inputs: Tree, in_dims: Dims, where: str) -> list[Arg]:
    """The inputs of `dp_apply`: several if they are a tuple."""
    if type(inputs) is tuple:
        return positional_args(inputs, in_dims, "inputs", where)
    return [Arg("inputs", inputs, in_dims)]


def positional_args(args: tuple[Tree, ...], in_dims: Dims, name: str, where: str) -> list[Arg]:
    """Star arguments with one spec for all, or a tuple with one for each."""
    if type(in_dims) is tuple and len(in_dims) != len(args):
        raise ValueError(f"{where}: in_dims has {len(in_dims)} entries for {len(args)} positional arguments")
    if type(in_dims) in (list, dict):
        raise ValueError(
            f"{where}: in_dims is a {type(in_dims).__name__}; expected one spec for all of the {len(args)} positional "
            "arguments, or a tuple with one for each"
        )
    dims = in_dims if type(in_dims) is tuple else (in_dims,) * len(args)
    return [Arg(f"{name}[{i}]", arg, dim) for i, (arg, dim) in enumerate(zip(args, dims, strict=True))]


def keyword_args(kwargs: Mapping[str, Tree], dims: Dims, where: str) -> dict[str, Arg]:
    """Keyword arguments with one spec for all, or a dict that may leave out names, which are then split along 0."""
    if type(kwargs) is dict and not kwargs and type(dims) is not dict:  # most calls have none
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"{where}: kwargs must be a mapping of names to values, got {type(kwargs).__name__}")
    if wrong := [name for name in kwargs if not isinstance(name, str)]:
        raise TypeError(f"{where}: names of keyword arguments are strings, got {names(wrong)}")
    each = dims if isinstance(dims, Mapping) else dict.fromkeys(kwargs, dims)
    if unknown := [name for name in each if name not in kwargs]:
        raise ValueError(
            f"{where}: kwarg_dims names {names(unknown)}, but the keyword arguments are {names(list(kwargs))}"
        )
    return {k: Arg(f"kwargs[{k!r}]", value, each.get(k, 0), "kwarg_dims") for k, value in kwargs.items()}


def check_several(fn: Function, args: Sequence[Arg], keywords: Sequence[str], where: str) -> None:
    """Raise if a function takes the elements of a list, and the list was passed: a loader makes lists of (x, y)."""
    args, kwargs = args[: len(args) - len(keywords)], dict.fromkeys(keywords)
    held = [(i, _elements(arg.tree)) for i, arg in enumerate(args)]
    several = [(i, elements) for i, elements in held if elements is not None and len(elements) != 1]
    if not several or torch.compiler.is_compiling() or _plainly_binds(fn, len(args), kwargs):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may take other arguments
    except (TypeError, ValueError):  # some builtins have none
        return
    names = [arg.name for arg in args]
    if _binds(signature, names, kwargs):
        return
    for i, elements in several:
        if _binds(signature, [*names[:i], *elements, *names[i + 1 :]], kwargs):
            raise TypeError(
                f"{where}: {names[i]} is one argument, {_said_of(args[i].tree, len(elements))}, and the function takes "
                f"{signature}. Pass {_way_out(args[i])}"
            )


def _said_of(tree: Tree, count: int) -> str:
    if isinstance(tree, Slots):
        return f"a {type(tree).__name__} of {type(tree.shards[0]).__name__}s of {count}"
    return f"a {type(tree).__name__} of {count}"


def _way_out(arg: Arg) -> str:
    """How to pass the parts of an argument: the inputs of `dp_apply` are several if they are a tuple."""
    unzipped = ".unzip()" if isinstance(arg.tree, Slots) else ""
    if arg.name != "inputs":
        return f"*batch{unzipped}"
    return "inputs.unzip()" if unzipped else "tuple(inputs)"


def _elements(tree: Tree) -> Sequence[Tree] | None:
    """Those of a list or tuple, also if each slot has one."""
    tree = tree.shards[0] if isinstance(tree, Slots) else tree
    return tree if type(tree) in (list, tuple) else None


def _plainly_binds(fn: Function, count: int, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of Python takes so many positional arguments and no others: its signature takes long."""
    if kwargs or not isinstance(fn, types.FunctionType) or fn.__code__.co_kwonlyargcount:
        return False
    most = fn.__code__.co_argcount
    return most - len(fn.__defaults__ or ()) <= count <= most


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


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
