"""A call over slots: bound to its arguments, planned, and carried out step by step.

`bind` looks at everything once: the leaves of the arguments, the options, and what is around the call. That is the
signature, and the plan depends on nothing else. The steps of the plan then work on lists of leaves.
"""

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fdp._execution.executor import check_executor
from fdp._execution.seeds import seed_options
from fdp._placement.common_rows import common_peers, partition_of
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.leaves import leaf_plans
from fdp._placement.partition import Partition, microbatched
from fdp._placement.peers import ALONE, PeerCall, Peers
from fdp._placement.plan import Plan, Step, places_of
from fdp._placement.planned_leaf import PlannedLeaf
from fdp._placement.sharded import Sharded, summary
from fdp._placement.slot import Slot
from fdp._placement.split_dims import check_lists, resolve
from fdp._placement.transfers import Transfer
from fdp._transforms.arguments import Arg, Options, check_several
from fdp._transforms.around import Around, look_around
from fdp._transforms.plans import find, held_in, keep, kinds_of, signature_of
from fdp._trees.listing import note_lists
from fdp._trees.profiling import is_profiling, stage
from fdp._trees.registry import is_plain, is_plain_structure
from fdp._trees.tree import Flat, flatten_all, flattened_all
from fdp._trees.types import Function, Tree

Begun: TypeAlias = tuple[PeerCall, Partition]


class CallKind(abc.ABC):
    """What kind of call it is.

    Attributes:
        key: Its own options: those that its plan depends on.
        microbatches: How many pieces each shard is run in.
        may_repeat: A call may be made once more, if it has failed.
    """

    key: Hashable = None
    microbatches: int = 1
    may_repeat: ClassVar[bool] = True

    def shares(self, flat: Flat, options: Options) -> tuple[tuple[torch.device, ...], Partition]:
        """The device of every slot, and the rows of each."""
        return partition_of([flat], options.devices, options.weights, options.where)

    @abc.abstractmethod
    def steps(self, known: "Known") -> tuple[Sequence[Step], Any]:
        """What the call does, and what its plan holds for that."""

    def begin(self, peers: Peers, plan: Plan, flats: Sequence[Flat], where: str, same: dict[str, Any]) -> Begun:
        """Agree on a call with other processes: what has to be the `same` in all, and which shards this one has."""
        return peers.begin(where, plan, flats, same)

    @abc.abstractmethod
    def on_one(self) -> "CallKind":
        """The same on one slot; what comes out is not needed."""

    def dry(self) -> "CallKind":
        """The same where tensors have no data."""
        return self

    def outputs(
        self, plan: Plan, values: Sequence[Any], results: Sequence[Tree], joined: Any, copies: Sequence[Transfer]
    ) -> Iterator[PlannedLeaf]:
        """What `explain` says of what comes out: the results of the shards, joined, and the copies that are made."""
        raise NotImplementedError


class Call(NamedTuple):
    """A call as it was made: the positional arguments, then those by name."""

    fn: Function
    args: Sequence[Arg]
    keywords: tuple[str, ...]
    options: Options
    kind: CallKind

    @property
    def n_args(self) -> int:
        return len(self.args) - len(self.keywords)


class Known(NamedTuple):
    """What steps are chosen from."""

    call: Call
    flat: Flat
    pieces: Partition
    leaves: tuple[LeafPlan, ...]
    around: Around
    peers: Peers


class State:
    """What a call has come to. Its steps read and change it.

    Attributes:
        values: The leaves of the arguments, as they were given.
        given: All tensors in them.
        around: What was around the call where it began.
        partition: The shards of this process.
        peers: What other processes do in the call; `flats` are the arguments as they know them.
        columns: The leaves of each shard.
        seed: What the shards draw from.
        watched: The tensors that the function can write to, with their `versions`.
        outputs: What each shard has returned.
        counts: What each shard counts in a loss.
        gradients: The sum of those of all shards so far; `aliases` are what their graph leads to.
        finish: Makes the result.
    """

    watched: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    counts: Any = None
    gradients: Any = None
    aliases: Any = ()
    is_used = False

    def __init__(
        self, call: Call, plan: Plan, flat: Flat, given: Sequence[Tensor], around: Around, peers: Peers
    ) -> None:
        options = call.options
        self.call, self.fn, self.where = call, call.fn, options.where
        self.kind: Any = call.kind
        self.flat, self.values, self.given, self.around, self.seed = flat, flat.leaves, given, around, options.seed
        same = {"axis_name": options.axis_name, **seed_options(options.seed), "splits": plan.sizes is not None}
        self.peers: PeerCall
        self.of, self.flats = peers, [] if peers is ALONE else flat.each()
        self.peers, own = call.kind.begin(peers, plan, self.flats, options.where, same)
        self.partition = own
        self.pieces = plan.pieces if own is plan.partition else microbatched(own, call.kind.microbatches)
        self.places: Sequence[Slot] = self.peers.places(plan.places)
        self.columns = [flat.leaves.copy() for _ in self.pieces.slots]
        self.memo: dict[Any, Any] = {}
        self.device = own.devices[0] if own.devices else plan.slots[0]
        self.outputs: list[Any] = []
        self.finish: Callable[[], Any] = tuple

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """What the function is called with: trees of these leaves."""
        trees: Any = self.flat.structure.unflatten(leaves)
        keywords = self.call.keywords
        if not keywords:
            return trees, {}
        n = len(trees) - len(keywords)
        return trees[:n], dict(zip(keywords, trees[n:], strict=True))

    def run_shard(self, leaves: Sequence[Any]) -> Any:
        return call_shard(self.fn, *self.arguments(leaves))


def call_shard(fn: Function, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Any:
    """Call a function with the arguments of a shard."""
    try:
        return fn(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        note_lists(error, args, 0, "the function", "pass tuple(batch) to dp_apply, *batch to others")
        if "devices" in kwargs and "unexpected keyword argument 'devices'" in str(error):
            error.add_note("devices= is an option of fdp: write value_and_grad(loss, devices=...)(params, x)")
        raise
    except RuntimeError as error:  # of shapes, perhaps: of arguments in another order, of a part that should be whole
        if not getattr(error, "__notes__", ()):
            with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
                error.add_note(f"the function was called with {summary((*args, *kwargs.values()))}")
        raise


def run(call: Call) -> Any:
    """Bind, plan, and take the steps of the plan."""
    plan, state = bind(call)
    return carry_out(plan, state)


def carry_out(plan: Plan, state: State) -> Any:
    """Take the steps of a plan."""
    with state.peers.part():
        for do, _, name in plan.steps:
            if name and is_profiling():
                with stage(name):
                    do(plan, state)
            else:
                do(plan, state)
    return state.finish()


def bind(call: Call) -> tuple[Plan, State]:
    """Look at the arguments and at what is around the call, and find its plan, or make it."""
    options = call.options
    check_executor(options.executor, options.where)
    trees, names = tuple([arg.tree for arg in call.args]), tuple([arg.name for arg in call.args])
    try:
        leaves, structure = flattened_all(trees, names, options.where)
    except (TypeError, ValueError):
        check_several(call.fn, call.args, call.keywords, options.where)
        raise
    kinds, given, held = kinds_of(leaves)
    around = look_around(given)
    flat = Flat(names, leaves, [], structure, [])
    peers = common_peers([(flat.path(i), leaf) for i, leaf in held], options.devices, options.where)
    signature = signature_of(call, structure, kinds, around, peers is not ALONE, bool(held))
    plan = find(call.fn, signature)
    if plan is None:
        flat = flat_of(call)
        given = held_in(flat.leaves)[0]  # a container may make its leaves anew
        plan = decide(call, flat, around, peers)
        plan = keep(call.fn, None if _has_values(flat) else signature, plan)
    else:
        flat = flat._replace(specs=plan.specs)
    return plan, State(call, plan, flat, given, around, peers)


def flat_of(call: Call) -> Flat:
    """The leaves of the arguments, each with its spec."""
    check_several(call.fn, call.args, call.keywords, call.options.where)
    names, trees = tuple([arg.name for arg in call.args]), tuple([arg.tree for arg in call.args])
    dims, choices = [arg.dims for arg in call.args], [arg.choices for arg in call.args]
    return flatten_all(trees, names, dims, choices, call.options.where)


def made_of(call: Call, flat: Flat) -> tuple[Plan, State]:
    """The plan and the state of a call with these leaves, in this process alone."""
    given = held_in(flat.leaves)[0]
    around = look_around(given)
    plan = decide(call, flat, around, ALONE)
    return plan, State(call, plan, flat, given, around, ALONE)


def decide(call: Call, flat: Flat, around: Around, peers: Peers) -> Plan:
    """Decide how a call is carried out; nothing here depends on values, unless the specs do."""
    options, specs = call.options, list(flat.specs)
    resolve([flat], options.where)
    slots, partition = call.kind.shares(flat, options)
    check_lists(flat, specs, partition, options.where)
    pieces = microbatched(partition, call.kind.microbatches)
    leaves = leaf_plans(flat, pieces)
    steps, gradients = call.kind.steps(Known(call, flat, pieces, leaves, around, peers))
    places = places_of(pieces, options.axis_name)
    moved = tuple([leaf for leaf in leaves if leaf.moves and not leaf.is_cut])
    cut = tuple([leaf for leaf in leaves if leaf.is_cut])
    return Plan(slots, partition, pieces, flat.specs, leaves, moved, cut, places, tuple(steps), gradients)


def _has_values(flat: Flat) -> bool:
    """Whether a plan may depend on values, or would keep them alive: leaves that were looked into, odd keys."""
    if not is_plain_structure(flat.structure):
        return True
    return any(
        spec == "items" or not is_plain(leaf) or (isinstance(leaf, Sharded) and leaf.sizes is None and spec is not None)
        for leaf, spec in zip(flat.leaves, flat.specs, strict=True)
    )
