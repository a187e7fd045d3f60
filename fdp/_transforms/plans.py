"""Plans that are kept, for each function by signature: a second call like one before decides nothing.

Those of a function go with it. There is no lock: each step is one call of C, and of two threads that make the same plan
one finds that of the other.
"""

import weakref
from collections.abc import Hashable
from typing import Any

from fdp._execution.function_traits import identity
from fdp._placement.plan import Plan

_MOST = 64  # of a function; the oldest go first
_PLANS: "weakref.WeakKeyDictionary[Any, dict[Hashable, Plan]]" = weakref.WeakKeyDictionary()


def find(fn: Any, signature: Hashable | None) -> Plan | None:
    """The plan that was kept."""
    if signature is None:
        return None
    try:
        return _PLANS.get(identity(fn), {}).get(signature)
    except TypeError:  # an axis that has no hash, a size that is a symbol
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
