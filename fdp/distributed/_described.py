"""What of a call is the same in all processes: as text where they differ, and as a number of its plan."""

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.plan import Plan
from fdp._placement.sharded import Sharded, Slots, leaf_tensors
from fdp._trees.functions import name_of
from fdp._trees.tree import Flat, digest_of, flatten


class Digest(NamedTuple):
    """A plan and the name of the function, as numbers that are the same in every process."""

    plan: int
    function: int


class Described(NamedTuple):
    """The digest of a call, and whether something in its arguments requires grad."""

    digest: Digest
    requires_grad: bool


_DESCRIBED: "weakref.WeakKeyDictionary[Plan, dict[Any, Described]]" = weakref.WeakKeyDictionary()


def described(where: str, plan: Plan, flats: Sequence[Flat], same: Mapping[str, Any]) -> Described:
    """That of a call. The seed is not in it: it may be another one at each step."""
    options = tuple((name, value) for name, value in same.items() if name not in ("seed", "function"))
    known = _DESCRIBED.setdefault(plan, {})
    if options not in known or plan.has_slots:  # a plan does not say what slots hold
        needs = any(x.requires_grad for flat in flats for leaf in flat.leaves for x in leaf_tensors(leaf))
        digest = Digest(number_of(repr((where, options, kinds_of(flats)))), number_of(name_of(same.get("function"))))
        known[options] = Described(digest, needs)
    return known[options]


def number_of(text: str) -> int:
    """The same in every process, and not zero."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") or 1


def compared(flats: Sequence[Flat], same: Mapping[str, Any]) -> Any:
    """What is compared: kinds of arguments, and options, but not which function it is."""
    return {name: value for name, value in same.items() if name != "function"}, kinds_of(flats)


def kinds_of(flats: Sequence[Flat]) -> list[Any]:
    """What of the arguments is the same in all processes."""
    return [(digest_of(flat), [_kind(*pair) for pair in zip(flat.leaves, flat.specs, strict=True)]) for flat in flats]


def said_of(flats: Sequence[Flat], same: Mapping[str, Any]) -> str:
    """The same for people, a line each."""
    leaves = [(f.path(i), x, d) for f in flats for i, (x, d) in enumerate(zip(f.leaves, f.specs, strict=True))]
    return "\n".join(
        [f"{k}={v!r}" for k, v in same.items() if k != "function"] + [f"{path} {_said(x, d)}" for path, x, d in leaves]
    )


def _kind(leaf: Any, spec: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.ndim if spec is not None else tuple(leaf.shape)
    if isinstance(leaf, Slots):
        inner = flatten(leaf.shards[0], "", None)
        return digest_of(inner), [_kind(x, spec if isinstance(leaf, Sharded) else None) for x in inner.leaves]
    return None


def _said(leaf: Any, spec: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = list(leaf.shape) if spec is None else f" of {leaf.ndim} dimensions"
        return f"{str(leaf.dtype).removeprefix('torch.')}{shape}"
    return str(leaf.shards[0] if isinstance(leaf, Slots) else type(leaf).__name__)[:200]
