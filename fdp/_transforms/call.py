"""A call that is mapped over slots, in steps: `bind` its arguments, `plan` them, `place` them, run, join.

A plan is decided from the signature of a call and kept with it: the structures of the arguments, what is known of each
leaf without its values, specs and options. What depends on more is planned anew each time, by the same code.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._execution.executor import check_executor
from fdp._execution.seeds import Seed, seed_options
from fdp._placement.moves import Memo
from fdp._placement.partition import Partition, microbatched
from fdp._placement.peers import ALONE_IN_CALL, Joined, PeerCall
from fdp._placement.place import place, planned
from fdp._placement.plan import Plan, places_of
from fdp._placement.sharded import Sharded, Slots, leaf_tensors, summary
from fdp._placement.slot import Slot
from fdp._placement.split_dims import common_peers, flatten_args, held_slots, plan_args
from fdp._transforms.arguments import Arg, Options, check_several
from fdp._transforms.plans import find, keep, signature_of
from fdp._transforms.purity import MutationCheck
from fdp._transforms.row_seed import RowCall
from fdp._trees.listing import note_lists
from fdp._trees.profiling import stage
from fdp._trees.registry import TreeTypeError, TreeValueError, flattened, is_plain, is_plain_structure
from fdp._trees.tree import PLAIN_CONTAINERS, Flat
from fdp._trees.types import Dims, Function, Tree


class Shard(NamedTuple):
    """What the function is called with on one slot."""

    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


PLAIN_CONTAINERS.add(Shard)


def call_shard(fn: Function, shard: Shard) -> Any:
    """Call a function with a shard."""
    try:
        return fn(*shard.args, **shard.kwargs)
    except (TypeError, AttributeError) as error:
        note_lists(error, shard.args, 0, "the function", "pass tuple(batch) to dp_apply, *batch to others")
        if "devices" in shard.kwargs and "unexpected keyword argument 'devices'" in str(error):
            error.add_note("devices= is an option of fdp: write value_and_grad(loss, devices=...)(params, x)")
        raise
    except RuntimeError as error:  # of shapes, perhaps: of arguments in another order, of a part that should be whole
        if not getattr(error, "__notes__", ()):
            with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
                error.add_note(f"the function was called with {summary((*shard.args, *shard.kwargs.values()))}")
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

    def row_call(self, fn: Function, options: Options, again: Callable[[Sequence[Tree], Seed], object]) -> RowCall:
        """What its draws depend on. `again` makes it with other arguments, on one device."""
        sizes = self.partition.sizes
        if sizes is None and len(self.partition.slots) > 1:
            raise ValueError(
                f"{options.where}: randomness='rows' needs to know which rows each slot has. Split the batch with "
                "fdp.scatter, or pass it whole"
            )
        rows = None if sizes is None else int(self.peers.rows(sum(sizes)))
        same = [(name, value) for name, value in options.same.items() if name != "function"]  # by which it is kept
        key = options.where, self.n_args, self.keywords, *same
        return RowCall(options.where, fn, self.flats, rows, key, again, repeats=not self.peers.has_others())

    def place(self) -> tuple[list[Shard], MutationCheck]:
        """The arguments on each slot, and what sees that nobody writes to them."""
        self.peers.enter()
        if self.peers is not ALONE_IN_CALL:
            self.peers.begins_with([x for flat in self.flats for leaf in flat.leaves for x in leaf_tensors(leaf)])
        memo: Memo = {}
        columns = []
        for flat, arg in zip(self.flats, self.plan.args, strict=True):
            with stage(arg.stage):
                columns.append(place(flat, self.partition, memo, how=arg))
        n, keywords = self.n_args, self.keywords
        shards = [
            Shard(values[:n], dict(zip(keywords, values[n:], strict=True)) if keywords else {})
            for values in zip(*columns, strict=True)
        ]
        return shards, MutationCheck.over(self.flats, memo, has_copies=self.plan.moves)


def bind(
    fn: Function,
    args: Sequence[Arg],
    kwargs: Mapping[str, Arg],
    options: Options,
    microbatches: int = 1,
) -> Call:
    """Bind arguments and find their plan."""
    where = options.where
    check_executor(options.executor, where)
    named = [*args, *kwargs.values()] if kwargs else args
    try:
        trees = [flattened(arg.tree, arg.name) for arg in named]
        signature = signature_of(fn, named, trees, len(args), options, microbatches)
        plan = find(fn, signature)
    except (TreeTypeError, TreeValueError):  # flatten_args says where
        trees, signature, plan = [], None, None
    if plan is None:
        check_several(fn, args, kwargs, where)
        flats = flatten_args(named, where)
    else:
        columns = zip(named, trees, plan.args, strict=True)
        flats = [Flat(arg.name, leaves, a.specs, structure, []) for arg, (leaves, structure), a in columns]
    peers = common_peers(held_slots(flats) if plan is None or plan.has_slots else (), options.devices, where)
    if plan is None:
        plan = keep(fn, None if _has_values(flats) else signature, decide(flats, options, microbatches))
    same = {
        "axis_name": options.axis_name,
        **seed_options(options.seed),
        "splits": plan.sizes is not None,
        **options.same,
    }
    call, own = peers.begin(where, plan, flats, same)
    pieces = plan.pieces if own is plan.partition else microbatched(own, microbatches)
    return Call(flats, plan, pieces, call, len(args), tuple(kwargs))


def decide(flats: Sequence[Flat], options: Options, microbatches: int = 1) -> Plan:
    """Decide how a call is carried out; nothing here depends on values, unless the specs do."""
    slots, partition = plan_args(flats, options.devices, options.weights, options.where)
    pieces = microbatched(partition, microbatches)
    args = tuple(planned(flat, pieces) for flat in flats)
    has_slots = any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves)
    moves = any(arg.moves for arg in args)
    return Plan(slots, partition, pieces, args, places_of(pieces, options.axis_name), has_slots, moves)


def _has_values(flats: Sequence[Flat]) -> bool:
    """Whether a plan may depend on values, or would keep them alive: leaves that were looked into, odd keys."""
    if not all(is_plain_structure(flat.structure) for flat in flats):
        return True
    return any(
        spec == "items" or not is_plain(leaf) or (isinstance(leaf, Sharded) and leaf.sizes is None and spec is not None)
        for flat in flats
        for leaf, spec in zip(flat.leaves, flat.specs, strict=True)
    )
