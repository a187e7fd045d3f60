"""A call that is mapped over slots: its arguments, named for messages, then split and moved."""

import contextlib
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._collectives.graph import captured
from fdp._collectives.run import check_options
from fdp._execution.patches import is_forward_mode
from fdp._mesh.autograd import Entered
from fdp._mesh.call import Across
from fdp._mesh.processes import Processes, processes_of
from fdp._placement.plan import Plan, microbatched
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.split import Memo, common_processes, flatten_args, held_slots, place, plan_args
from fdp._transforms.purity import Watch, leaf_tensors
from fdp._trees.listing import names, note_lists
from fdp._trees.profiling import stage
from fdp._trees.tree import Flat, digest_of, flatten, tensors_in
from fdp._trees.types import DeviceLike, Devices, Dims, Executor, Function, Tree
from fdp._trees.untraced import leave_alone


class Options(NamedTuple):
    """How a call is mapped, and `where`: the public function that messages name."""

    where: str
    devices: Devices
    output_device: DeviceLike | None
    weights: Sequence[float] | None
    executor: Executor
    seed: int | None
    axis_name: str
    same: Mapping[str, Any] = types.MappingProxyType({})


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
    try:
        return fn(*shard.args, **shard.kwargs)
    except (TypeError, AttributeError) as error:
        note_lists(error, shard.args, 0, "the function", "pass tuple(batch) to dp_apply, *batch to others")
        raise


class Call(NamedTuple):
    """A planned call with its arguments in place; `across` if it is on a mesh."""

    flats: list[Flat]
    slots: tuple[torch.device, ...]
    plan: Plan
    shards: list[Shard]
    watch: Watch
    across: Across | None = None

    def inputs(self) -> list[torch.Tensor]:
        """All tensors of the arguments."""
        return [tensor for flat in self.flats for leaf in flat.leaves for tensor in leaf_tensors(leaf)]

    @property
    def device(self) -> torch.device:
        """Where results go: the first slot that has a shard."""
        return self.plan.devices[0] if self.plan.devices else self.slots[0]

    def check_captured(self, outputs: Tree, aliases: Sequence[torch.Tensor] = ()) -> None:
        """On a mesh a gradient goes through arguments only: of what is captured each process would have a part."""
        inputs = [*self.inputs(), *aliases]  # which stand for some of them
        if self.across is not None and captured(tensors_in(outputs), inputs):
            raise ValueError(
                "the function uses a tensor that requires grad and is none of its arguments. Each process would have a "
                "part of its gradient only: pass it in an argument, or detach it"
            )

    def part(self) -> contextlib.AbstractContextManager[object]:
        """Around what this process does by itself."""
        return contextlib.nullcontext() if self.across is None else self.across


def prepare(
    args: Sequence[Arg], kwargs: Mapping[str, Arg], options: Options, microbatches: int = 1, *, apart: bool = False
) -> Call:
    """Plan a call and place its arguments. On a mesh, `apart` if slots are known not to meet before the end."""
    where = options.where
    check_options(options.executor, options.seed, where)
    flats = flatten_args([*args, *kwargs.values()], where)
    processes = common_processes(held_slots(flats), options.devices, processes_of(options.devices, where), where)
    slots, plan = plan_args(flats, options.devices, options.weights, where)
    across = None
    if processes is not None:
        across, plan = _begin(processes, plan, flats, options, apart)
    with contextlib.ExitStack() if across is not None else contextlib.nullcontext() as stack:
        if across is not None and stack is not None:
            stack.push(across)  # what fails from here on is said at the end of the call
            _check_transforms(across, where)
            _enter(flats, across, where)
        plan = microbatched(plan, microbatches)
        memo: Memo = {}
        columns = [_placed(flat, plan, memo) for flat in flats]
        shards = [
            Shard(tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True)))
            for values in zip(*columns, strict=True)
        ]
        call = Call(flats, slots, plan, shards, Watch.over(flats, memo), across)
        if stack is not None:
            stack.pop_all()
    return call


def _placed(flat: Flat, plan: Plan, memo: Memo) -> list[Tree]:
    with stage("replicate" if all(spec is None for spec in flat.specs) else "scatter"):
        return place(flat, plan, memo)


def _check_transforms(across: Across, where: str) -> None:
    layers = torch._C._functorch.get_interpreter_stack() or () if torch._C._are_functorch_transforms_active() else ()  # pyright: ignore[reportAttributeAccessIssue]
    if (is_forward_mode() or any(layer.key().name != "Grad" for layer in layers)) and not across.is_whole:
        raise RuntimeError(
            f"{where}: a process without rows cannot follow vmap or forward mode (jvp, jacfwd, hessian) around the "
            "call. Give every process rows, or use reverse mode"
        )


def _begin(
    processes: Processes, plan: Plan, flats: Sequence[Flat], options: Options, apart: bool
) -> tuple[Across, Plan]:
    """Agree with the other processes on a call, and leave this one without shards if it has no rows."""
    whole = plan.sizes is None and not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves)
    if plan.sizes is not None:
        rows = [size for size in plan.sizes if size]
    else:  # what is not split runs once, on the first slot of all
        rows = [0] * (0 if whole and processes.wire.position else len(plan.slots))
    if torch.is_grad_enabled() and any(
        x.requires_grad for flat in flats for leaf in flat.leaves for x in leaf_tensors(leaf)
    ):
        apart = False
    if torch._C._are_functorch_transforms_active() or is_forward_mode():
        apart = False
    same = {"axis_name": options.axis_name, "seed": options.seed, "splits": plan.sizes is not None, **options.same}
    kinds = [(digest_of(flat), [_kind(*pair) for pair in zip(flat.leaves, flat.specs, strict=True)]) for flat in flats]

    def say() -> str:
        leaves = [(f.path(i), x, d) for f in flats for i, (x, d) in enumerate(zip(f.leaves, f.specs, strict=True))]
        return "\n".join([f"{k}={v!r}" for k, v in same.items()] + [f"{path} {_said(x, d)}" for path, x, d in leaves])

    across = Across(processes, options.where, (same, kinds), rows, apart=apart, say=say)
    return across, plan if across.is_active else Plan((), (), None if plan.sizes is None else ())


def _kind(leaf: Any, spec: Any) -> Any:
    """What of a leaf is the same in all processes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.ndim if spec is not None else tuple(leaf.shape)
    if isinstance(leaf, Slots):
        inner = flatten(leaf.shards[0], "", None)
        return digest_of(inner), [_kind(x, spec if isinstance(leaf, Sharded) else None) for x in inner.leaves]
    return None


def _said(leaf: Any, spec: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = list(leaf.shape) if spec is None else f" of {leaf.ndim} dimensions"
        return f"{str(leaf.dtype).removeprefix('torch.')}{shape}"
    return str(leaf.shards[0] if isinstance(leaf, Slots) else type(leaf).__name__)[:200]


def _enter(flats: Sequence[Flat], across: Across, where: str) -> None:
    """Mark what is whole on every slot, and so the same in all processes: its gradient is the sum over them."""
    if not torch.is_grad_enabled():
        return
    places: list[tuple[Flat, int]] = [
        (flat, i)
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and (spec is None or leaf.ndim == 0)
    ]
    if not places:
        return
    distinct = {id(flat.leaves[i]): flat.leaves[i] for flat, i in places}
    entered = dict(
        zip(distinct, Entered.apply(across.everybody, where, None, across.is_active, *distinct.values()), strict=True)
    )
    for flat, i in places:
        flat.leaves[i] = entered[id(flat.leaves[i])]


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
        raise TypeError(f"{where}: names of keyword arguments are strings, got {names(wrong)}")
    each = dims if isinstance(dims, Mapping) else dict.fromkeys(kwargs, dims)
    if unknown := [name for name in each if name not in kwargs]:
        raise ValueError(
            f"{where}: kwarg_dims names {names(unknown)}, but the keyword arguments are {names(list(kwargs))}"
        )
    return {k: Arg(f"kwargs[{k!r}]", value, each.get(k, 0), "kwarg_dims") for k, value in kwargs.items()}


def check_several(fn: Function, args: Sequence[Arg], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise if a function takes the elements of a list, and the list was passed: a loader makes lists of (x, y)."""
    held = [(i, _elements(arg.tree)) for i, arg in enumerate(args)]
    several = [(i, elements) for i, elements in held if elements is not None and len(elements) != 1]
    if not several or torch.compiler.is_compiling():
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


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


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
