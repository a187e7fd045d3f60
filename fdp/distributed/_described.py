"""What of a call is the same in all processes: to be compared, and as text for people where it differs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp._placement.sharded import Sharded, Slots
from fdp._trees.tree import Flat, digest_of, flatten


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
