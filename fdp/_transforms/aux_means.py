"""Aux of a loss: what is no mean over shards unless the user says so."""

from collections.abc import Collection, Iterable, Sequence

import torch

from fdp._placement.sharded import Slots
from fdp._trees.listing import listed
from fdp._trees.prefix import named_spec
from fdp._trees.tree import Flat, flatten
from fdp._trees.types import Tree


def check_means(aux: Tree, buffers: Collection[int], rows: Collection[int], args: Sequence[Flat], where: str) -> None:
    """Raise if a leaf of a shard's aux has the rows of the shard: its mean over shards would be one of different rows.

    Buffers are means, also those that have as many elements: the leaves at the positions `buffers`, and whatever has
    the name and the shape of a tensor that came in whole with `args`. `rows` are those of all shards; where they are
    not the same, neither are the shapes of what has rows, and there is no mean anyway.
    """
    if len(set(rows)) != 1 or sum(rows) < 2:
        return
    flat, count = flatten(aux, "aux", where=where), next(iter(rows))
    found = [i for i, leaf in enumerate(flat.leaves) if i not in buffers and _has_rows(leaf, count)]
    if found:
        state = set(_state(args))
        found = [i for i in found if (flat.entry(i), flat.leaves[i].shape) not in state]
    if not found:
        return
    specs = [0 if i in found else "mean" for i in range(len(flat.leaves))]
    paths = listed(found, lambda i: f"{flat.path(i)} of shape {tuple(flat.leaves[i].shape)}")
    raise ValueError(
        f"{where}: dim 0 of {paths} is as long as the {count} rows of a shard. If these are rows, a mean over shards "
        f"would mix different ones: aux_dims={named_spec(flat.structure, specs)!r} concatenates them. If it is "
        "something else, say aux_dims='mean'"
    )


def _has_rows(leaf: object, count: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == count


def _state(args: Iterable[Flat]) -> Iterable[tuple[object, torch.Size]]:
    """Names and shapes of the tensors that every slot has whole."""
    for flat in args:
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
            if isinstance(leaf, torch.Tensor) and spec is None and isinstance(flat.entry(i), str):
                yield flat.entry(i), leaf.shape
            elif isinstance(leaf, Slots) and leaf.sizes is None:
                inner = flatten(leaf.shards[0], "state")
                yield from _state([inner._replace(specs=[None] * len(inner.leaves))])
