"""A function run on every slot, with results that stay where they are: `parallel_apply`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import torch

from fdp._execution.executor import Mode, check_executor, run_all
from fdp._execution.seeds import Seed, seed_of, seed_options
from fdp._placement.devices import as_devices
from fdp._placement.partition import Partition
from fdp._placement.peers import peers_of
from fdp._placement.plan import places_of
from fdp._placement.replicate import replicate_on
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.split_dims import common_peers
from fdp._transforms.arguments import Arg, check_function, check_several, keyword_args
from fdp._transforms.call import Shard, call_shard
from fdp._transforms.row_seed import RowCall, with_rows
from fdp._transforms.signatures import SlotOptions, Untold
from fdp._trees.tracebacks import api_boundary
from fdp._trees.tree import Flat, flatten
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
    held = (*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ()))
    with peers_of(devices, held).begins("parallel_apply"):
        drawn = seed_of(seed, randomness, "parallel_apply")
        result = _on_slots(fn, args, {} if kwargs is None else kwargs, devices, executor, drawn, axis_name)
    if any(type(shard) is not tuple for shard in result.shards):
        return result
    try:
        return result.unzip()
    except TypeError as error:
        raise TypeError(f"parallel_apply: {error}") from None


def _on_slots(
    fn: Function,
    args: tuple[Tree, ...],
    kwargs: Mapping[str, Tree],
    devices: Devices,
    executor: Executor,
    seed: Seed | None,
    axis_name: str,
) -> Sharded:
    """Run a function on every slot."""
    where = "parallel_apply"
    check_function(fn, where)
    check_executor(executor, where)
    keywords = keyword_args(kwargs, None, where)
    check_several(fn, [Arg(f"args[{i}]", arg, None) for i, arg in enumerate(args)], keywords, where)
    named = {f"args[{i}]": arg for i, arg in enumerate(args)} | {arg.name: arg.tree for arg in keywords.values()}
    held = {name: arg for name, arg in named.items() if isinstance(arg, Slots)}
    slots = _state_slots(held, devices)
    peers = common_peers(held.items(), devices, where)
    columns = [
        arg if isinstance(arg, Slots) else replicate_on(arg, slots, always=True, name=name, where=where)
        for name, arg in named.items()
    ]
    sizes = next((arg.sizes for arg in columns if arg.sizes is not None), None)
    n, names = len(args), list(named)
    same = {"axis_name": axis_name, **seed_options(seed)}
    call = peers.begin_on_slots(where, same, sizes or (0,) * len(slots))

    def run(seed: Seed | None) -> list[Tree]:
        shards = zip(*(column.shards for column in columns), strict=True) if columns else [()] * len(slots)
        tasks = [
            functools.partial(call_shard, fn, Shard(s[:n], dict(zip(keywords, s[n:], strict=True)))) for s in shards
        ]
        places = call.places(places_of(Partition(tuple(range(len(slots))), slots, sizes), axis_name))
        return run_all(tasks, places, Mode(executor, seed, call))

    def again(trees: Sequence[Tree], seed: Seed) -> object:
        on_one = tuple(trees[:n]), dict(zip(keywords, trees[n:], strict=True)), slots[:1], "sequential", seed
        return _on_slots(fn, *on_one, axis_name)

    def row_call() -> RowCall:
        if sizes is None:
            raise ValueError(f"{where}: randomness='rows' needs rows: pass what fdp.scatter returns")
        flats = [Flat(name, [column], [None], _LEAF, []) for name, column in zip(names, columns, strict=True)]
        return RowCall(where, fn, flats, int(call.rows(sum(sizes))), (where, n, *keywords), again, False)

    with call.part():
        results = with_rows(seed, row_call, run)
    results = call.tie(results)
    return Sharded(tuple(results), slots, peers=peers)


_LEAF = flatten(0, "a leaf").structure


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
