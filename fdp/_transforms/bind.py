"""Binding a call: its arguments, its options and what is around it are looked at once, and give its signature.

The plan depends on the signature alone. It is kept, for each function: a second call like one before decides nothing.
Kept plans go with their function. There is no lock: each step is one call of C, and of two threads that make the same
plan one finds that of the other.
"""

import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._execution.executor import check_executor
from fdp._execution.seeds import seed_options
from fdp._placement.common_rows import common_peers
from fdp._placement.devices import as_devices
from fdp._placement.leaves import leaf_plans
from fdp._placement.partition import microbatched
from fdp._placement.peers import ALONE, Peers, peers_of
from fdp._placement.plan import Plan, places_of
from fdp._placement.sharded import Sharded, Slots, leaf_tensors
from fdp._placement.split_dims import check_lists, resolve
from fdp._transforms.arguments import check_function
from fdp._transforms.around import Around, look_around
from fdp._transforms.call import Call, Known, State, take_steps
from fdp._trees.functions import known_by
from fdp._trees.prefix import signature_of_dims
from fdp._trees.registry import PLAIN_LEAVES, by_optree, flatten_plainly, is_plain, is_plain_structure
from fdp._trees.tree import Flat, flatten_all, flattened_all
from fdp._trees.types import Devices, Tree


def run(made: Callable[[], Call], where: str, devices: Devices, held: Iterable[Tree]) -> Any:
    """Make a call, bind it, and take the steps of its plan; with other processes, if it is spread over some."""
    peers = peers_of(devices, held)
    if peers is ALONE:
        plan, state = bind(made())
        take_steps(plan, state)
        return state.result
    with peers.begins(where):
        plan, state = bind(made())
        _agree(plan, state)
        take_steps(plan, state)
        return state.result


def bind(call: Call) -> tuple[Plan, State]:
    """Look at a call, and find its plan, or make it."""
    is_compiling = torch.compiler.is_dynamo_compiling()
    leaves, structure = _flattened(call, is_compiling)
    given, held = (leaves, ()) if _TENSORS.issuperset(map(type, leaves)) else held_in(leaves)
    around = look_around(given, is_compiling)
    peers, plan, signature, owner = ALONE, None, None, None
    if held or type(call.options.devices) is not tuple:
        named = Flat(call.args.names, leaves, [], structure, [])
        peers = common_peers([(named.path(i), x) for i, x in held], call.options.devices, call.options.where)
    if not around.has_modes:
        owner, how = known_by(call.fn)
        signature = _signature(call, how, structure, leaves, around, peers, bool(held))
        try:
            plan = _PLANS.get(weakref.ref(owner), _NONE).get(signature)
        except Exception:  # no hash, as of a size that is a symbol; or an `==` that does not say yes or no
            signature = None
    if plan is None:
        flat = flat_of(call)
        plan = decide(call, flat, around, peers)
        if signature is not None and not _has_values(flat):
            plan = _keep(owner, signature, plan)
        leaves, structure = flat.leaves, flat.structure
        given = held_in(leaves)[0]  # a container may make its leaves anew
    state = State(call, plan, leaves, structure, given)
    state.of = peers
    return plan, state


def _flattened(call: Call, is_compiling: bool) -> tuple[list[Any], Any]:
    """The leaves of the arguments, without their specs."""
    if not is_compiling:
        try:
            leaves, structure = flatten_plainly(call.args.trees)
            if PLAIN_LEAVES.issuperset(map(type, leaves)):
                return leaves, structure
        except (ValueError, RecursionError):  # one has no end
            pass
    try:
        return flattened_all(call.args.trees, call.args.names, call.options.where)
    except (TypeError, ValueError):
        _check(call)
        raise


def flat_of(call: Call) -> Flat:
    """The leaves of the arguments, each with its spec."""
    _check(call)
    args = call.args
    return flatten_all(args.trees, args.names, args.dims, args.choices, call.options.where)


def _check(call: Call) -> None:
    """What depends on the signature alone, and is not asked again."""
    where = call.options.where
    check_function(call.fn, where)
    check_executor(call.options.executor, where)


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
    return Plan(slots, partition, pieces, flat.specs, leaves, moved, cut, places, around, tuple(steps), gradients)


def _agree(plan: Plan, state: State) -> None:
    """Agree with other processes on a call, and what of it this process has."""
    call, options = state.call, state.call.options
    state.flats = state.flat(plan).each()
    same = {"axis_name": options.axis_name, **seed_options(options.seed), "splits": plan.sizes is not None}
    state.peers, own = call.kind.begin(state.of, plan, state.flats, options.where, same)
    if own is not plan.partition:
        state.partition, state.pieces = own, microbatched(own, call.kind.microbatches)
        state.columns = [state.values.copy() for _ in state.pieces.slots]
        state.device = own.devices[0] if own.devices else plan.slots[0]
    state.places = state.peers.places(plan.places)


# ---- signatures


_MOST = 64  # of a function; the oldest go first
_NONE: dict[Hashable, Plan] = {}
_PLANS: dict["weakref.ref[Any]", dict[Hashable, Plan]] = {}


def _keep(owner: Any, signature: Hashable, plan: Plan) -> Plan:
    """Keep a plan, unless another thread was faster: the one that is kept."""
    plans = _PLANS.get(weakref.ref(owner)) or _PLANS.setdefault(weakref.ref(owner, _forget), {})
    found = plans.setdefault(signature, plan)
    for old in list(plans)[:-_MOST]:
        plans.pop(old, None)
    return found


def _forget(owner: Any) -> None:
    _PLANS.pop(owner, None)


def _signature(
    call: Call, how: Any, structure: Any, leaves: Sequence[Any], around: Around, peers: Peers, has_slots: bool
) -> Hashable | None:
    """All that a plan depends on; None if that cannot be said."""
    where, devices, weights, executor, seed, axis_name = call.options
    if weights is not None:
        if type(weights) not in (list, tuple) or not _NUMBERS.issuperset(map(type, weights)):
            return None
        weights = tuple(weights)
    dims = call.args.dims
    if not _DIMS.issuperset(map(type, dims)):
        found = tuple(map(signature_of_dims, dims))
        if None in found:
            return None
        dims = found
    try:
        kinds = list(map(_kind_of_tensor, leaves))
    except (RuntimeError, AttributeError):  # one is nested, or no tensor
        kinds = None
    if kinds is None:  # not in `except`: an interrupt here would have a context
        kinds = list(map(_kind_of, leaves))
    if type(axis_name) is not str or None in kinds:
        return None
    slots = None if devices is None and has_slots else as_devices(devices, where)
    own = where, how, call.kind.key, axis_name, weights, executor, seed and seed.randomness, call.args.keywords
    return own, structure, dims, slots, around, peers is ALONE, *map(type, leaves), *kinds


_NUMBERS, _DIMS = frozenset({int, float}), frozenset({int, type(None)})
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_kind_of_tensor: Callable[[Tensor], Any] = operator.attrgetter("dtype", "device", "requires_grad", "layout", "shape")


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout, None if leaf.is_nested else leaf.shape
    if isinstance(leaf, Slots):
        dims = signature_of_dims(leaf.dims)
        inner = by_optree(leaf.shards[0])[0]
        kinds = tuple(map(_kind_of, inner))
        return dims and (leaf.devices, leaf.sizes, type(leaf.shards[0]), kinds, *dims)
    return type(leaf)


def held_in(leaves: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[tuple[int, Slots]]]:
    """All tensors in leaves, and those that are on slots already, with their positions."""
    given = [x for leaf in leaves for x in ((leaf,) if isinstance(leaf, Tensor) else leaf_tensors(leaf))]
    return given, [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Slots)]


def _has_values(flat: Flat) -> bool:
    """Whether a plan may depend on values, or would keep them alive: leaves that were looked into, odd keys."""
    if not is_plain_structure(flat.structure):
        return True
    return any(
        spec == "items" or not is_plain(leaf) or (isinstance(leaf, Sharded) and leaf.sizes is None and spec is not None)
        for leaf, spec in zip(flat.leaves, flat.specs, strict=True)
    )
