"""Plans that are kept, for each function by signature: a second call like one before decides nothing.

Those of a function go with it. There is no lock: each step is one call of C, and of two threads that make the same plan
one finds that of the other.
"""

import operator
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from fdp._placement.devices import as_devices
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots
from fdp._transforms.arguments import Arg, Options
from fdp._trees import torch_private
from fdp._trees.functions import how_called, identity
from fdp._trees.prefix import signature_of_dims
from fdp._trees.types import Function

_MOST = 64  # of a function; the oldest go first
_PLANS: "weakref.WeakKeyDictionary[Any, dict[Hashable, Plan]]" = weakref.WeakKeyDictionary()


def signature_of(
    fn: Function,
    args: Sequence[Arg],
    trees: Sequence[tuple[Sequence[Any], Any]],
    n_args: int,
    options: Options,
    microbatches: int,
) -> Hashable | None:
    """All that a plan depends on; None if that cannot be said. `trees` are leaves and structures."""
    if torch.compiler.is_compiling() or torch_private.len_torch_dispatch_stack() or torch_private.get_tracing_state():
        return None
    weights = options.weights
    if type(options.axis_name) is not str or not (weights is None or type(weights) in (list, tuple)):
        return None
    if weights is not None and not all(type(weight) in (int, float) for weight in weights):
        return None
    parts: list[Any] = [options.where, how_called(fn), n_args, options.axis_name, microbatches]
    parts.append(None if weights is None else tuple(weights))
    has_slots = False
    for arg, (leaves, structure) in zip(args, trees, strict=True):
        dims = arg.dims
        parts += arg.name, structure, dims if dims is None or type(dims) is int else signature_of_dims(dims)
        if dims is not None and parts[-1] is None:
            return None
        parts += map(type, leaves)
        try:
            kinds = list(map(_kind_of_tensor, leaves))
        except (AttributeError, RuntimeError):  # not all are tensors, or one is nested
            kinds = list(map(_kind_of, leaves))
            if None in kinds:
                return None
            has_slots = has_slots or any(isinstance(leaf, Slots) for leaf in leaves)
        parts += kinds
    devices = options.devices
    parts.append(None if devices is None and has_slots else as_devices(devices, options.where))
    return tuple(parts)


_kind_of_tensor = operator.attrgetter("dtype", "device", "requires_grad", "layout", "shape")


def _kind_of(leaf: Any) -> Any:
    """What a plan may depend on of a leaf; None if that cannot be said."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout, None if leaf.is_nested else leaf.shape
    if isinstance(leaf, Slots):
        dims = signature_of_dims(leaf.dims)
        return dims and (leaf.devices, leaf.sizes, type(leaf.shards[0]), *dims)
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
