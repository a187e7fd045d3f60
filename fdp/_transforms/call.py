"""A call over slots: what it is made with, what its steps share, and how they are taken."""

import abc
import contextlib
from collections.abc import Hashable, Iterator, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from fdp._execution.seeds import Seed
from fdp._placement.common_rows import partition_of
from fdp._placement.leaf_plan import LeafPlan
from fdp._placement.moves import Memo
from fdp._placement.partition import Partition
from fdp._placement.peers import ALONE, ALONE_IN_CALL, PeerCall, Peers
from fdp._placement.plan import Plan, Step
from fdp._placement.planned_leaf import PlannedLeaf
from fdp._placement.sharded import summary
from fdp._placement.slot import Slot
from fdp._placement.transfer_log import Transfer
from fdp._transforms.arguments import Args
from fdp._transforms.around import Around
from fdp._trees.message_lists import note_lists
from fdp._trees.profiling import stage
from fdp._trees.tracebacks import text_of
from fdp._trees.tree import Flat
from fdp._trees.types import Devices, Executor, Function, Tree

Begun: TypeAlias = tuple[PeerCall, Partition]


class Options(NamedTuple):
    """How a call is mapped, and `where`: the public function that messages name."""

    where: str
    devices: Devices
    weights: Sequence[float] | None
    executor: Executor
    seed: Seed | None
    axis_name: str


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

    def outputs(
        self, plan: Plan, values: Sequence[Any], state: "State", copies: Sequence[Transfer]
    ) -> Iterator[PlannedLeaf]:
        """What `explain` says of what has come out, and of the copies that were made for it."""
        raise NotImplementedError


class Call(NamedTuple):
    """A call as it was made."""

    fn: Function
    args: Args
    options: Options
    kind: Any  # a CallKind


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
        values: The leaves of the arguments, as they were given; `structure` puts them together.
        given: All tensors in them.
        around: What is around the call.
        partition, pieces, places: The shards of this process.
        peers: What other processes do in the call; `flats` are the arguments as they know them.
        columns: The leaves of each shard.
        seed: What the shards draw from.
        watched: The tensors that the function can write to, with their `versions`.
        outputs: What each shard has returned.
        counts: What each shard counts in a loss, and `whole` says what all do.
        gradients: The sum of those of all shards so far; `aliases` are what their graph leads to.
        result: What the call returns.
    """

    of: Peers = ALONE
    peers: PeerCall = ALONE_IN_CALL
    flats: Sequence[Flat] = ()
    watched: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    outputs: Any = ()
    counts: Any = None
    gradients: Any = None
    aliases: Any = ()
    result: Any = None

    def __init__(self, call: Call, plan: Plan, values: list[Any], structure: Any, given: Sequence[Tensor]) -> None:
        self.call, self.fn, self.where, self.kind = call, call.fn, call.options.where, call.kind
        self.values, self.structure, self.given, self.seed = values, structure, given, call.options.seed
        self.around, self.partition, self.pieces = plan.around, plan.partition, plan.pieces
        self.places: Sequence[Slot] = plan.places
        self.columns: list[list[Any]] = list(map(list, repeat(values, len(plan.places))))
        self.memo: Memo = {}
        self.device = plan.partition.devices[0]

    def flat(self, plan: Plan) -> Flat:
        """The leaves of the arguments, with their names and specs."""
        return Flat(self.call.args.names, self.values, list(plan.specs), self.structure, [])

    def run_shard(self, leaves: Sequence[Any], fn: Function | None = None) -> Any:
        """Call the function, or another one, with trees of these leaves."""
        args, keywords, kwargs = self.structure.unflatten(leaves), self.call.args.keywords, {}
        if keywords:
            first = len(args) - len(keywords)
            args, kwargs = args[:first], dict(zip(keywords, args[first:], strict=True))
        try:
            return (fn or self.fn)(*args, **kwargs)
        except Exception as error:
            note_call(error, args, kwargs)
            raise


def note_call(error: Exception, args: Sequence[Tree], kwargs: dict[str, Tree]) -> None:
    """Say of what a function has raised what it was called with, where that may be the cause."""
    if isinstance(error, TypeError | AttributeError):
        note_lists(error, args, 0, "the function", _ELEMENTS)
        if "devices" in kwargs and "unexpected keyword argument 'devices'" in text_of(error):
            error.add_note("devices= is an option of fdp: write value_and_grad(loss, devices=...)(params, x)")
    elif isinstance(error, RuntimeError) and not getattr(error, "__notes__", ()):
        # Of shapes, perhaps: of arguments in another order, of a part that should be whole.
        with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
            error.add_note(f"the function was called with {summary((*args, *kwargs.values()))}")


_ELEMENTS = "pass tuple(batch) to dp_apply, *batch to others, and .unzip() of what is on slots"


def take_steps(plan: Plan, state: State) -> None:
    """Take the steps of a plan."""
    for do, _, name in plan.steps:
        if name and profiler._is_profiler_enabled:
            with stage(name):
                do(plan, state)
        else:
            do(plan, state)
