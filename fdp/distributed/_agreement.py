"""What of a call is the same in all processes: as numbers to be compared, and as text for people where they differ."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp._placement.moves import bytes_of
from fdp._placement.sharded import Sharded, Slots, leaf_tensors
from fdp._trees.message_lists import listed
from fdp._trees.tree import Flat, digest_of, flatten
from fdp.distributed._exchange import meet, objects
from fdp.distributed._reports import Elsewhere, Tag
from fdp.distributed._waits_and_failures import Epoch


def kinds_of(flats: Sequence[Flat]) -> list[Any]:
    """What of the arguments is the same in all processes: not the rows, of which each has its own."""
    return [(digest_of(flat), [_kind(*pair) for pair in zip(flat.leaves, flat.specs, strict=True)]) for flat in flats]


def said_of(flats: Sequence[Flat], same: Mapping[str, Any], *, values: bool = False) -> str:
    """The same for people, with the options, a line each; with the `values` of what is no tensor if asked for."""
    leaves = [line for flat in flats for line in _said(flat, values)]
    return "\n".join([*(f"{name}={value!r}" for name, value in same.items()), *leaves])


def _said(flat: Flat, values: bool) -> Iterator[str]:
    for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
        if isinstance(leaf, Slots):
            yield from _said(flatten(leaf.shards[0], flat.path(i), 0 if isinstance(leaf, Sharded) else None), values)
        elif isinstance(leaf, Tensor):
            shape = list(leaf.shape) if spec is None else f" of {leaf.ndim} dimensions"
            yield f"{flat.path(i)} {str(leaf.dtype).removeprefix('torch.')}{shape}"
        else:
            is_value = values and (leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes))
            yield f"{flat.path(i)} {repr(leaf) if is_value else type(leaf).__name__}"


def _kind(leaf: Any, spec: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.ndim if spec is not None else tuple(leaf.shape)
    if isinstance(leaf, Slots):
        inner = flatten(leaf.shards[0], "", None)
        return digest_of(inner), [_kind(x, spec if isinstance(leaf, Sharded) else None) for x in inner.leaves]
    return None


def check_values(epoch: Epoch, where: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise in all processes if parameters have other values in some: they would train different models."""
    every = unlike(epoch, Tag(f"the parameters of {where}"), paths, leaves)
    if wrong := [path for path in paths if any(path in own for own in every)]:
        raise Elsewhere(
            f"{where}: the processes begin with different values of {listed(wrong)}, and would train different models. "
            "Give all those of process 0: params = fdp.unreplicate(fdp.replicate(params, mesh)), or build the model "
            "after torch.manual_seed with the same number in all processes"
        )


def unlike(epoch: Epoch, tag: Tag, paths: Sequence[str], leaves: Sequence[Any]) -> list[list[str]]:
    """For each process the paths of leaves that have other values than in process 0."""
    digests = [_digest(leaf) for leaf in leaves]
    rows = meet(epoch, tag, [zlib.crc32(repr(digests).encode())])
    if all(row == rows[0] for row in rows):
        return []
    every = objects(epoch, digests, tag)
    return [[path for path, a, b in zip(paths, own, every[0], strict=True) if a != b] for own in every]


def _digest(leaf: Any) -> int:
    """Of the values of a leaf that every slot has whole; NaN is equal to itself."""
    found = 0
    for tensor in leaf_tensors(leaf.shards[0] if isinstance(leaf, Slots) else leaf):
        x = tensor.detach()
        x = (x if x.layout is torch.strided else x.to_dense()).resolve_conj().resolve_neg()
        found = zlib.crc32(bytes_of(x.to("cpu").contiguous()), found)
    return found
