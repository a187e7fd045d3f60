"""Samples to batches: the tree of a sample, with a batch at each leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fdp._trees.tree import flatten_any, leaves_up_to, tree_map, unflatten
from fdp._trees.types import Tree

Collate = Callable[[list[Any]], Tree]


def collate(samples: Sequence[Tree]) -> Tree:
    """A tree like each of the samples. torch's own `default_collate` would make lists of tuples."""
    flat = flatten_any(samples[0], "sample")
    columns = [_leaves_like(flat.structure, sample) for sample in samples]
    batches: list[Any] = []
    for i, column in enumerate(zip(*columns, strict=True)):
        try:
            with torch.device("cpu"):  # numbers become tensors where those of the other leaves are
                batches.append(default_collate(list(column)))
        except Exception as error:
            error.add_note(f"as {flat.path(i)} of {len(samples)} rows; a collate_fn may join them in another way")
            raise
    return unflatten(flat.structure, batches)


def _leaves_like(structure: Any, sample: Tree) -> list[Any]:
    try:
        return leaves_up_to(structure, sample)
    except ValueError as error:
        raise ValueError(f"collate: the samples of a batch have different structures: {error}") from None


def collate_none(collate_fn: Collate, sample: Tree) -> Tree:
    """The batch of no rows, made of one sample: that of one row, cut."""
    if collate_fn is collate:
        structure = flatten_any(sample, "sample").structure
        return unflatten(structure, map(_without_row, leaves_up_to(structure, collate([sample]))))
    one, two = collate_fn([sample]), collate_fn([sample, sample])
    try:
        return tree_map(_cut, one, two)
    except ValueError as error:
        raise ValueError(
            "Batches.loader: this process has no rows at this step, and a batch of none can be made only if collate_fn "
            f"returns tensors with rows in dim 0: {error}. Pass Batches drop_last=True or a larger batch_size"
        ) from None


def _without_row(batch: Any) -> Any:
    return batch[:0] if isinstance(batch, Tensor | list) else batch


def _cut(one: Any, two: Any) -> Any:
    """No rows, of batches with one and two. What is no tensor, or has no dims, is the same for any rows."""
    if not isinstance(one, Tensor) or not one.ndim:
        return one
    if (len(one), len(two)) != (1, 2):
        raise ValueError(f"one row gave shape {tuple(one.shape)}, two rows {tuple(two.shape)}")
    return one[:0]
