"""A function run on every slot, with results that stay where they are: `parallel_apply`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import torch

from fdp._execution.seeds import seed_of
from fdp._placement.devices import as_devices
from fdp._placement.leaves import put
from fdp._placement.moves import Memo, copy_once
from fdp._placement.partition import Partition
from fdp._placement.peers import Peers
from fdp._placement.plan import Plan, Step
from fdp._placement.sharded import Sharded, Slots
from fdp._transforms.arguments import star_args
from fdp._transforms.bind import run
from fdp._transforms.call import Begun, Call, CallKind, Known, Options, State
from fdp._transforms.signatures import SlotOptions, Untold
from fdp._transforms.steps import running, says
from fdp._trees.tracebacks import api_boundary
from fdp._trees.tree import Flat
from fdp._trees.types import Devices, Executor, Function, Randomness, Tree


@overload
def parallel_apply(fn: Callable[..., Untold], *args: Tree, **options: Unpack[SlotOptions]) -> Any: ...
@overload
def parallel_apply(  # pyright: ignore[reportOverlappingOverload]
    fn: Callable[..., tuple[Any, ...]], *args: Tree, **options: Unpack[SlotOptions]
) -> tuple[Sharded, ...]: ...
@overload
def parallel_apply(fn: Callable[..., object], *args: Tree, **options: Unpack[SlotOptions]) -> Sharded: ...
@api_boundary({"": "Keyword arguments of the function go into kwargs={{{0!r}: ...}}"})
def parallel_apply(
    fn: Function,
    *args: Tree,
    devices: Devices = None,
    kwargs: Mapping[str, Tree] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Sharded | tuple[Sharded, ...]:
    """Run a function on every slot and leave the results where they are: the step of a loop that keeps its state there.

    `parallel_apply(fn, a, b)[i] == fn(a[i], b[i])`.

    >>> import fdp, torch
    >>> slots = fdp.virtual_devices(2)
    >>> w = fdp.replicate(torch.ones(2), slots)
    >>> w, loss = fdp.parallel_apply(lambda w, x: (w - 0.1, (w * x).sum()), w, fdp.scatter(torch.ones(3, 2), slots))
    >>> loss.shards
    (tensor(4.), tensor(2.))

    Args:
        fn: Called with the shards of one slot. It may write to them: they are yours.
        args: `Sharded` and `Replicated` values on the same slots; anything else is replicated.
        devices: One device per slot, by default those of the arguments.
        kwargs: Keyword arguments, like `args`.
        executor, seed, randomness, axis_name: As in `dp_apply`.

    Returns:
        What `fn` returned on each slot, without dims and rows; where that is a tuple, a tuple of such.

    Raises:
        ValueError: Arguments are on different slots.
        TypeError: A module instead of a function.
    """

    def call() -> Call:
        options = Options(where, devices, None, executor, seed_of(seed, randomness, where), axis_name)
        return Call(fn, star_args(args, None, {} if kwargs is None else kwargs, None, where), options, StayingThere())

    where = "parallel_apply"
    result = run(call, where, devices, (*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ())))
    if any(type(shard) is not tuple for shard in result.shards):
        return result
    try:
        return result.unzip()
    except TypeError as error:
        raise TypeError(f"parallel_apply: {error}") from None


class StayingThere(CallKind):
    """A call on every slot, whose results stay where they are."""

    may_repeat = False

    def begin(self, peers: Peers, plan: Plan, flats: Sequence[Flat], where: str, same: dict[str, Any]) -> Begun:
        del same["splits"]
        return peers.begin_on_slots(where, same, plan.sizes or (0,) * len(plan.slots)), plan.partition

    def shares(self, flat: Flat, options: Options) -> tuple[tuple[torch.device, ...], Partition]:
        _check_plain(flat)
        held = {flat.path(i): leaf for i, leaf in enumerate(flat.leaves) if isinstance(leaf, Slots)}
        slots = _state_slots(held, options.devices)
        sizes = next((leaf.sizes for leaf in held.values() if leaf.sizes is not None), None)
        return slots, Partition(tuple(range(len(slots))), slots, sizes)

    def steps(self, known: Known) -> tuple[Sequence[Step], None]:
        place, leave = Step(place_own, says("copy to every slot")), Step(leave_there, says("leave results there"))
        return [place, running(known), leave], None


def place_own(plan: Plan, state: State) -> None:
    """What is on its slots, and of everything else a copy for each slot, which the function may write to."""
    put(plan.cut, state.values, state.columns, state.memo)
    for column, device in zip(state.columns, state.pieces.devices, strict=True):
        own: Memo = {}
        for leaf in plan.leaves:
            value = column[leaf.index]
            if not leaf.is_cut and isinstance(value, torch.Tensor):
                column[leaf.index] = copy_once(value, device, leaf.flat, leaf.index, own, always=True)


def leave_there(plan: Plan, state: State) -> None:
    """What came out on each slot."""
    peers, outputs, own = state.peers, state.outputs, (state.pieces.devices, state.of)
    state.result = Sharded(tuple(peers.stay(outputs)), own[0], peers=own[1])


def _check_plain(flat: Flat) -> None:
    """What is on slots is an argument, and not a part of one."""
    first = 0
    for child in flat.structure.children():
        for i in range(first, first + child.num_leaves):
            if isinstance(flat.leaves[i], Slots) and not child.is_leaf():
                kind = type(flat.leaves[i]).__name__
                raise TypeError(f"parallel_apply: {flat.path(i)} is a {kind} already, inside a tree that is copied")
        first += child.num_leaves


def _state_slots(held: Mapping[str, Slots], devices: Devices) -> tuple[torch.device, ...]:
    """The slots that all arguments of `parallel_apply` are on."""
    on = {name: arg.devices for name, arg in held.items()}
    if devices is not None or not held:
        on = {"devices": as_devices(devices, "parallel_apply")} | on
    slots = next(iter(on.values()))
    if any(others != slots for others in on.values()):
        each = ", ".join(f"{name} has {len(others)} ({', '.join(map(str, others))})" for name, others in on.items())
        raise ValueError(
            f"parallel_apply: arguments are on different slots: {each}. "
            "fdp.scatter(..., keep_empty=True) gives every slot a shard, also of a short batch"
        )
    return slots
