"""Whether two trees hold the same values up to rounding, and where they differ."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.check_outputs import same_value
from fdp._placement.moves import is_inexact
from fdp._placement.sharded import summary
from fdp._trees.describe import first_difference
from fdp._trees.tree import flatten, leaves_up_to
from fdp._trees.types import Dims, Tree
from fdp.testing._sample import dense, same_bits

# As torch.testing.assert_close has them, but for the half types, of whose sums atol=1e-5 would ask too much.
_TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
NODES = "nodes"  # for a spec, where two trees have different nodes; what they have is said in words
_APART = ("stack", "list")  # specs of leaves that keep the slots apart, and have no counterpart on one device

Tolerance = tuple[float, float] | None
"""Relative and absolute; None: chosen by dtype, the absolute one in proportion to the numbers that are compared."""


class Leaf(NamedTuple):
    """A leaf of the one call on the whole batch, and what a run on slots has there."""

    path: str
    spec: Any
    want: Any
    got: Any


Difference = tuple[Leaf, str]
"""A leaf that differs, and how."""


def leaves_of(name: str, want: Tree, dims: Dims, got: Tree, where: str) -> list[Leaf]:
    """The leaves of two trees side by side, without those that keep the slots apart."""
    flat = flatten(want, name, dims, "aux_dims" if name == "aux" else "out_dims", where)
    try:
        others = leaves_up_to(flat.structure, got)
    except ValueError:
        return _side_by_side(name, NODES, want, got)
    return [
        leaf
        for i, spec in enumerate(flat.specs)
        if spec not in _APART
        for leaf in _side_by_side(flat.path(i), spec, flat.leaves[i], others[i])  # a list under "items" is one so far
    ]


def _side_by_side(path: str, spec: Any, want: Tree, got: Tree) -> list[Leaf]:
    one, other = flatten(want, path), flatten(got, path)
    if one.structure != other.structure:
        path, here, there = first_difference(one.structure, other.structure, path)
        return [Leaf(path, NODES, here, there)]
    pairs = zip(one.leaves, other.leaves, strict=True)
    return [Leaf(one.path(i), spec, a, b) for i, (a, b) in enumerate(pairs)]


def differing(
    leaves: Sequence[Leaf], tolerance: Tolerance, scale: float | None = None, *, bitwise: bool = False
) -> list[Difference]:
    """The leaves that differ. `scale` is the magnitude of the numbers; None: of each leaf, but at least 1."""
    found = [(leaf, _difference(leaf, tolerance, scale, bitwise)) for leaf in leaves]
    return [(leaf, text) for leaf, text in found if text]


def _difference(leaf: Leaf, tolerance: Tolerance, scale: float | None, bitwise: bool) -> str | None:
    want, got = leaf.want, leaf.got
    if leaf.spec == NODES:
        return f"it is {got}, where one device has {want}"
    tensors = isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
    if not tensors or (want.dtype, want.shape) != (got.dtype, got.shape):
        is_same = not tensors and same_value(want, got)
        return None if is_same else f"it is {summary(got)}, where one device has {summary(want)}"
    if same_bits(want, got):
        return None
    rtol, atol = tolerance or _TOLERANCES.get(want.dtype.to_real(), (0.0, 0.0))
    if tolerance is None:
        atol *= max(1.0, magnitude([want])) if scale is None else scale
    if bitwise or not is_inexact(want):
        rtol = atol = 0.0
    try:
        torch.testing.assert_close(wide(got), wide(want), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split()) + ("; expected the same bits" if bitwise else "")
    return "expected the same bits" if bitwise else None


def magnitude(tensors: Sequence[Any]) -> float:
    """The largest finite magnitude in tensors."""
    inexact = [each for each in tensors if isinstance(each, torch.Tensor) and is_inexact(each) and each.numel()]
    return max((wide(each).abs().nan_to_num(0, 0).max().item() for each in inexact), default=0.0)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, in double precision if it is inexact, to compare with."""
    plain = dense(tensor).cpu()
    return plain.to(torch.complex128 if plain.is_complex() else torch.float64) if is_inexact(plain) else plain
