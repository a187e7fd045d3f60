"""Plans that are kept, for each function by signature: a second call like one before decides nothing.

Those of a function go with it. There is no lock: each step is one call of C, and of two threads that make the same plan
one finds that of the other.
"""

import contextlib
import operator
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._placement.devices import as_devices
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots, leaf_tensors
from fdp._transforms.around import Around
from fdp._trees.functions import how_called, identity
from fdp._trees.prefix import signature_of_dims
from fdp._trees.registry import by_optree
from fdp._trees.types import Function

_MOST = 64  # of a function; the oldest go first
_PLANS: "weakref.WeakKeyDictionary[Any, dict[Hashable, Plan]]" = weakref.WeakKeyDictionary()


def signature_of(
    call: Any, structure: Any, kinds: Sequence[Any] | None, around: Around, is_spread: bool, has_slots: bool
) -> Hashable | None:
    """All that a plan depends on; None if that cannot be said."""
    options = call.options
    weights, axis_name, devices = options.weights, options.axis_name, options.devices
    if kinds is None or around.is_compiling or around.has_modes or type(axis_name) is not str:
        return None
    if weights is not None:
        if type(weights) not in (list, tuple) or not all(type(weight) in (int, float) for weight in weights):
            return None
        weights = tuple(weights)
    dims = [x if x is None or type(x) is int else signature_of_dims(x) or _UNKNOWN for _, _, x, _ in call.args]
    if _UNKNOWN in dims:
        return None
    draws = options.seed and options.seed.randomness
    own = options.where, how_called(call.fn), axis_name, weights, options.executor, draws, call.kind.key
    slots = None if devices is None and has_slots else as_devices(devices, options.where)
    return (*own, call.keywords, structure, *dims, *kinds, slots, around, is_spread)


_UNKNOWN = object()


def kinds_of(leaves: Sequence[Any]) -> tuple[list[Any] | None, Sequence[Tensor], Sequence[tuple[int, Slots]]]:
    """What a plan may depend on of the leaves, if that can be said; all tensors in them; what is on slots already."""
    if torch.compiler.is_compiling():  # nothing is kept
        return None, *held_in(leaves)
    if _TENSORS.issuperset(map(type, leaves)):
        with contextlib.suppress(RuntimeError):  # one is nested
            return [*map(type, leaves), *map(_kind_of_tensor, leaves)], leaves, ()
    kinds = list(map(_kind_of, leaves))
    return None if None in kinds else [*map(type, leaves), *kinds], *held_in(leaves)


def held_in(leaves: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[tuple[int, Slots]]]:
    """All tensors in leaves, and those that are on slots already, with their positions."""
    given = [x for leaf in leaves for x in ((leaf,) if isinstance(leaf, Tensor) else leaf_tensors(leaf))]
    return given, [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Slots)]


_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_kind_of_tensor = operator.attrgetter("dtype", "device", "requires_grad", "layout", "shape")


def _kind_of(leaf: Any) -> Any:
    """What a plan may depend on of a leaf; None if that cannot be said."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout, None if leaf.is_nested else leaf.shape
    if isinstance(leaf, Slots):
        dims = signature_of_dims(leaf.dims)
        inner = by_optree(leaf.shards[0])[0]
        kinds = tuple([(x.dtype, x.ndim) if isinstance(x, Tensor) else type(x) for x in inner])
        return dims and (leaf.devices, leaf.sizes, type(leaf.shards[0]), kinds, *dims)
    return type(leaf)


def find(fn: Function, signature: Hashable | None) -> Plan | None:
    """The plan that was kept."""
    if signature is None:
        return None
    try:
        return _PLANS.get(identity(fn), {}).get(signature)
    except Exception:  # no hash, as of a size that is a symbol; or an `==` that does not say yes or no
        return None


def keep(fn: Function, signature: Hashable | None, plan: Plan) -> Plan:
    """Keep a plan, unless another thread was faster: the one that is kept."""
    try:
        hash(signature)
    except TypeError:
        return plan
    if signature is None:
        return plan
    plans = _PLANS.setdefault(identity(fn), {})
    found = plans.setdefault(signature, plan)
    for old in list(plans)[:-_MOST]:
        plans.pop(old, None)
    return found
