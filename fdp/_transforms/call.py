"""A call that is mapped over slots, in steps: `bind` its arguments, `plan` them, `place` them, run, join.

A plan is decided from the signature of a call and kept with it: the structures of the arguments, what is known of each
leaf without its values, specs and options. What depends on more is planned anew each time, by the same code.
"""

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._collectives.run import check_options
from fdp._execution.function_traits import how_called
from fdp._placement.devices import as_devices
from fdp._placement.moves import Memo
from fdp._placement.partition import Partition, microbatched
from fdp._placement.peers import Joined, PeerCall
from fdp._placement.plan import Plan, places_of
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.slot import Slot
from fdp._placement.split import common_peers, flatten_args, held_slots, kind_of, place, plan_args, planned
from fdp._transforms.arguments import Arg, check_several
from fdp._transforms.plans import find, keep
from fdp._transforms.purity import MutationCheck
from fdp._trees import torch_private
from fdp._trees.listing import note_lists
from fdp._trees.profiling import stage
from fdp._trees.tree import Flat, flatten, is_plain, signature_of_dims
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
    """A call that is bound and planned; this process runs the shards of `partition`."""

    flats: list[Flat]
    plan: Plan
    partition: Partition
    peers: PeerCall
    n_args: int
    keywords: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where results go: the first slot that has a shard."""
        return self.partition.devices[0] if self.partition.devices else self.plan.slots[0]

    def places(self) -> Sequence[Slot]:
        """The place of every shard of this process."""
        return self.peers.places(self.plan.places)

    def joined(self, outputs: Sequence[Tree], dims: Dims) -> Joined:
        """What the shards have returned, weighted by their rows."""
        sizes = self.partition.sizes
        if sizes is None:
            return Joined(outputs, dims, None if len(outputs) > 1 else (1,), lambda: 1, "out")
        return Joined(outputs, dims, sizes, functools.partial(self.peers.rows, sum(sizes)), "out")

    def place(self) -> tuple[list[Shard], MutationCheck]:
        """The arguments on each slot, and what sees that nobody writes to them."""
        self.peers.enter()
        memo: Memo = {}
        columns = []
        for flat, arg in zip(self.flats, self.plan.args, strict=True):
            with stage(arg.stage):
                columns.append(place(flat, self.partition, memo, places=arg.places))
        n, keywords = self.n_args, self.keywords
        shards = [
            Shard(values[:n], dict(zip(keywords, values[n:], strict=True))) for values in zip(*columns, strict=True)
        ]
        return shards, MutationCheck.over(self.flats, memo, has_copies=any(arg.moves for arg in self.plan.args))


def bind(
    fn: Function,
    args: Sequence[Arg],
    kwargs: Mapping[str, Arg],
    options: Options,
    microbatches: int = 1,
) -> Call:
    """Bind arguments and find their plan."""
    where = options.where
    check_options(options.executor, options.seed, where)
    named = [*args, *kwargs.values()]
    flats = [flatten(arg.tree, arg.name, where=where) for arg in named]
    signature = _signature(fn, flats, named, options, len(args), microbatches)
    plan = find(fn, signature)
    if plan is None:
        check_several(fn, args, kwargs, where)
        flats = flatten_args(named, where)
    else:
        flats = [
            Flat(f.name, f.leaves, arg.specs, f.structure, f.accessors) for f, arg in zip(flats, plan.args, strict=True)
        ]
    peers = common_peers(held_slots(flats), options.devices, where)
    if plan is None:
        plan = keep(fn, None if _has_values(flats) else signature, decide(flats, options, microbatches))
    same = {"axis_name": options.axis_name, "seed": options.seed, "splits": plan.sizes is not None, **options.same}
    call, own = peers.begin(where, plan.partition, flats, same)
    pieces = plan.pieces if own is plan.partition else microbatched(own, microbatches)
    return Call(flats, plan, pieces, call, len(args), tuple(kwargs))


def decide(flats: Sequence[Flat], options: Options, microbatches: int = 1) -> Plan:
    """Decide how a call is carried out; nothing here depends on values, unless the specs do."""
    slots, partition = plan_args(flats, options.devices, options.weights, options.where)
    pieces = microbatched(partition, microbatches)
    args = tuple(planned(flat, pieces) for flat in flats)
    return Plan(slots, partition, pieces, args, places_of(pieces, options.axis_name))


def _signature(
    fn: Function, flats: Sequence[Flat], args: Sequence[Arg], options: Options, n_args: int, microbatches: int
) -> Hashable | None:
    """All that a plan depends on; None if that cannot be said."""
    if torch.compiler.is_compiling() or torch_private.len_torch_dispatch_stack() or torch_private.get_tracing_state():
        return None
    weights = None if options.weights is None else tuple(options.weights)
    dims = [signature_of_dims(arg.dims) for arg in args]
    if None in dims or not all(type(weight) in (int, float) for weight in weights or ()):
        return None
    devices = options.devices
    if devices is not None or not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves):
        devices = as_devices(devices, options.where)
    trees = [(flat.structure, *map(kind_of, flat.leaves)) for flat in flats]
    names = tuple(arg.name for arg in args)
    return (
        options.where,
        how_called(fn),
        names,
        n_args,
        devices,
        weights,
        options.axis_name,
        microbatches,
        *dims,
        *trees,
    )


def _has_values(flats: Sequence[Flat]) -> bool:
    """Whether a plan may depend on the values of a leaf: what is split has been measured, or looked into."""
    return any(
        spec == "items" or not is_plain(leaf) or (isinstance(leaf, Sharded) and leaf.sizes is None and spec is not None)
        for flat in flats
        for leaf, spec in zip(flat.leaves, flat.specs, strict=True)
    )


leave_alone(globals())
