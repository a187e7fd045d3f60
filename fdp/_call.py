"""A call that is mapped over slots: its arguments, named for messages, then split and moved."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from fdp._dims import Plan, microbatched
from fdp._executors import check_options
from fdp._place import Memo, flatten_args, place, plan_args
from fdp._slots import Slots
from fdp._tensor import layers
from fdp._tree import Flat, flatten, tensors_in
from fdp._typing import DeviceLike, Devices, Dims, Executor, Function, Tree
from fdp._untraced import leave_alone


class Options(NamedTuple):
    """How a call is mapped, and `where`: the public function that messages name."""

    where: str
    devices: Devices
    output_device: DeviceLike | None
    weights: Sequence[float] | None
    executor: Executor
    seed: int | None
    axis_name: str


class Arg(NamedTuple):
    """An argument, what messages call it, and its spec."""

    name: str
    tree: Tree
    dims: Dims
    choices: str = "in_dims"


class Shard(NamedTuple):
    """What the function is called with on one slot."""

    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


def call_shard(fn: Function, shard: Shard) -> Any:
    """Call a function with a shard."""
    return fn(*shard.args, **shard.kwargs)


class Watch(NamedTuple):
    """The tensors that the function can reach, the leaf that each belongs to, and the versions that they had."""

    owners: list[tuple[Flat, int]]
    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def over(cls, flats: Sequence[Flat], memo: Memo) -> Self:
        """Watch the caller's tensors and the copies made of them."""
        if torch.compiler.is_compiling():  # reading versions breaks the graph
            return cls([], [], [])
        owners, tensors = [], []
        transformed = torch._C._are_functorch_transforms_active()
        for flat in flats:
            for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
                copies = memo[id(leaf), spec] if isinstance(leaf, torch.Tensor) else ()
                # Views share the version of what they are views of.
                moved = [tensor for tensor in copies if tensor.device != leaf.device]
                own = [tensor for tensor in (*leaf_tensors(leaf), *moved) if not tensor.is_inference()]
                if transformed:  # a write under vmap shows in the version of what is batched
                    own = [layer for tensor in own for layer in layers(tensor)]
                owners += [(flat, i)] * len(own)
                tensors += own
        return cls(owners, tensors, [tensor._version for tensor in tensors])

    def check(self, where: str) -> None:
        """Raise if the function wrote in place to an argument, as far as version counters tell."""
        versions = [tensor._version for tensor in self.tensors]
        if versions == self.versions:
            return
        written = [i for i, (old, new) in enumerate(zip(self.versions, versions, strict=True)) if old != new]
        paths = ", ".join(dict.fromkeys(path for i in written for path in _paths_of(self.tensors[i], *self.owners[i])))
        raise RuntimeError(
            f"{where}: the function wrote in place to {paths}. It must be pure: work on x.clone(), or return the new "
            "value. The tensors that were passed may hold the change already"
        )


class Call(NamedTuple):
    """A planned call with its arguments in place."""

    flats: list[Flat]
    slots: tuple[torch.device, ...]
    plan: Plan
    shards: list[Shard]
    watch: Watch


def prepare(args: Sequence[Arg], kwargs: Mapping[str, Arg], options: Options, microbatches: int = 1) -> Call:
    """Plan a call and place its arguments."""
    check_options(options.executor, options.seed, options.where)
    flats = flatten_args([*args, *kwargs.values()], options.where)
    slots, plan = plan_args(flats, options.devices, options.weights, options.where)
    plan = microbatched(plan, microbatches)
    memo: Memo = {}
    columns = [place(flat, plan, memo) for flat in flats]
    shards = [
        Shard(tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True)))
        for values in zip(*columns, strict=True)
    ]
    return Call(flats, slots, plan, shards, Watch.over(flats, memo))


def _paths_of(tensor: torch.Tensor, flat: Flat, index: int) -> list[str]:
    """Where a tensor stands, also inside a leaf that holds several."""
    leaf, path = flat.leaves[index], flat.path(index)
    if isinstance(leaf, torch.Tensor):
        return [path]
    inner = flatten(leaf.shards if isinstance(leaf, Slots) else leaf, path)
    return [inner.path(i) for i, other in enumerate(inner.leaves) if other is tensor] or [path]


def leaf_tensors(leaf: Any) -> Sequence[torch.Tensor]:
    """The tensors in a leaf of the arguments: itself, those on all slots, those of a list under 'items'."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    return tensors_in(leaf.shards if isinstance(leaf, Slots) else leaf)


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
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"{where}: kwargs must be a mapping of names to values, got {type(kwargs).__name__}")
    if wrong := [name for name in kwargs if not isinstance(name, str)]:
        raise TypeError(f"{where}: names of keyword arguments are strings, got {wrong}")
    each = dims if isinstance(dims, Mapping) else dict.fromkeys(kwargs, dims)
    if unknown := [name for name in each if name not in kwargs]:
        raise ValueError(f"{where}: kwarg_dims names {unknown}, but the keyword arguments are {list(kwargs)}")
    return {k: Arg(f"kwargs[{k!r}]", value, each.get(k, 0), "kwarg_dims") for k, value in kwargs.items()}


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


leave_alone(globals())
