"""Which dim of which leaf is split."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fdp._placement.partition import Partition
from fdp._placement.sharded import Slots
from fdp._trees.message_lists import listed, quoted
from fdp._trees.opaque import array_inside, is_array
from fdp._trees.tree import Flat, flatten, lists_in
from fdp._trees.types import Dims, Tree

WHOLE = "pass None in in_dims"


def flatten_args(args: Iterable[tuple[str, Tree, Dims, str]], where: str, whole: str = WHOLE) -> list[Flat]:
    """Flatten named trees; the spec of each leaf becomes the dim that it is split along, None if it is not.

    `whole` is what to do, in messages, for what should not be split.
    """
    flats = [flatten(tree, name, dims, choices, where) for name, tree, dims, choices in args]
    resolve(flats, where, whole)
    return flats


def resolve(flats: Sequence[Flat], where: str, whole: str = WHOLE) -> None:
    """Put the dim that each leaf is split along in the place of its spec, None if it is not."""
    problems: list[TypeError | ValueError] = []
    for flat in flats:
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
            if callable(spec) and not isinstance(leaf, Slots):
                spec = spec(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 else None
            try:
                flat.specs[i] = None if spec is None else _split_dim(leaf, spec, flat, i, whole)
            except (TypeError, ValueError) as error:
                problems.append(error)
    if problems:
        raise type(problems[0])(f"{where}: {listed(problems, separator='; ')}")


def _split_dim(leaf: Any, spec: Any, flat: Flat, index: int, whole: str) -> Any:
    """The dim that `spec` comes to for a leaf: an int, 'items', or None where there is nothing to split."""
    if isinstance(leaf, Slots):
        return spec
    if type(spec) is not int and not (isinstance(spec, str) and spec == "items"):
        raise ValueError(
            f"the dim for {flat.path(index)} is {quoted(spec)}; expected an int (split), None (whole), 'items' "
            "(split a list) or a function of the tensor that returns one of these"
        )
    if spec == "items":
        if type(leaf) not in (list, tuple):
            raise TypeError(f"{flat.path(index)} is a {type(leaf).__name__}; 'items' splits lists and tuples")
        return spec
    if not isinstance(leaf, torch.Tensor):
        if (shape := array_inside(leaf)) is not None:
            has = "is" if is_array(leaf) else "holds"
            raise TypeError(
                f"{flat.path(index)} {has} a numpy array of shape {shape}, which is not split. Pass "
                f"torch.as_tensor(array), or {whole} to give it whole to every slot"
            )
        return None
    if leaf.ndim == 0:
        return None
    if not -leaf.ndim <= spec < leaf.ndim:
        raise ValueError(f"dim {spec} is out of range for {flat.path(index)} of shape {tuple(leaf.shape)}")
    if leaf.is_nested or leaf.layout is not torch.strided:
        kind, way_out = ("nested", "a padded one") if leaf.is_nested else ("sparse", "it .to_dense()")
        raise TypeError(f"{flat.path(index)} is a {kind} tensor, which is not split. Pass {way_out}, or {whole}")
    return spec


def check_lists(flat: Flat, specs: Sequence[Any], partition: Partition, where: str) -> None:
    """Raise if a list has a value for each row: each slot would get all of them. `specs` are those that were given."""
    rows = sum(partition.sizes or ())
    are_values = [spec is not None and type(x) in _VALUES for x, spec in zip(flat.leaves, specs, strict=True)]
    if not rows or len(partition.slots) < 2 or sum(are_values) < rows:
        return
    for first, count, path in lists_in(flat):
        if count == rows and all(are_values[first : first + count]):
            raise ValueError(
                f"{where}: {path} is a list of as many values as there are rows, {rows}, and each slot would get all "
                "of them. Its spec is 'items' if each row has one, or None if it is to be whole"
            )


_VALUES = frozenset({int, float, complex, bool, str, bytes})


def rows_of(leaf: Any, spec: Any) -> int:
    """The rows of a tensor or list that is split, -1 for what is not."""
    if spec is None or not isinstance(leaf, torch.Tensor | list | tuple):
        return -1
    return leaf.shape[spec] if isinstance(leaf, torch.Tensor) else len(leaf)
