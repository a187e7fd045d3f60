"""Plans that are kept, for each function by signature: a second call like one before decides nothing.

Those of a function go with it. There is no lock: each step is one call of C, and of two threads that make the same plan
one finds that of the other.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from fdp._execution.function_traits import how_called, identity
from fdp._placement.devices import as_devices
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots
from fdp._transforms.arguments import Arg, Options
from fdp._trees import torch_private
from fdp._trees.prefix import signature_of_dims
from fdp._trees.tree import Flat
from fdp._trees.types import Function

_MOST = 64  # of a function; the oldest go first
_PLANS: "weakref.WeakKeyDictionary[Any, dict[Hashable, Plan]]" = weakref.WeakKeyDictionary()


def signature_of(
    fn: Function, flats: Sequence[Flat], args: Sequence[Arg], n_args: int, options: Options, microbatches: int
) -> Hashable | None:
    """All that a plan depends on; None if that cannot be said."""
    if torch.compiler.is_compiling() or torch_private.len_torch_dispatch_stack() or torch_private.get_tracing_state():
        return None
    weights = () if options.weights is None else options.weights
    if type(options.axis_name) is not str or type(weights) not in (list, tuple):
        return None
    if not all(type(weight) in (int, float) for weight in weights):
        return None
    dims = [signature_of_dims(arg.dims) for arg in args]
    kinds = [list(map(_kind_of, flat.leaves)) for flat in flats]
    if None in dims or any(None in each for each in kinds):
        return None
    devices = options.devices
    if devices is not None or not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves):
        devices = as_devices(devices, options.where)
    trees = [(flat.structure, *each) for flat, each in zip(flats, kinds, strict=True)]
    names = tuple(arg.name for arg in args)
    return (
        options.where,
        how_called(fn),
        names,
        n_args,
        devices,
        None if options.weights is None else tuple(weights),
        options.axis_name,
        microbatches,
        *dims,
        *trees,
    )


def _kind_of(leaf: Any) -> Any:
    """What a plan may depend on of a leaf; None if that cannot be said."""
    if isinstance(leaf, torch.Tensor):
        shape = None if leaf.is_nested else leaf.shape
        return type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout, shape
    if isinstance(leaf, Slots):
        dims = signature_of_dims(leaf.dims)
        return dims and (type(leaf), leaf.devices, leaf.sizes, type(leaf.shards[0]), *dims)
    return type(leaf)


def find(fn: Any, signature: Hashable | None) -> Plan | None:
    """The plan that was kept."""
    if signature is None:
        return None
    try:
        return _PLANS.get(identity(fn), {}).get(signature)
    except Exception:  # no hash, as of a size that is a symbol; or an `==` that does not say yes or no
        return None


def keep(fn: Any, signature: Hashable | None, plan: Plan) -> Plan:
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
