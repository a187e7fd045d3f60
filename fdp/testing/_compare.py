"""Whether two trees hold the same values up to rounding, and where they first differ."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fdp._placement.moves import is_inexact
from fdp._trees.describe import first_difference
from fdp._trees.tree import Flat, flatten, is_array, leaves_up_to
from fdp._trees.types import Dims, Tree
from fdp.testing._sample import same_bits

# As torch.testing.assert_close has them, but for the half types, of whose sums atol=1e-5 would ask too much.
_TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
APART = ("stack", "list")
"""Specs of leaves that keep the slots apart, and have no counterpart on one device."""


class Leaf(NamedTuple):
    """A leaf of the one call on the whole batch, and what a run on slots has there."""

    path: str
    spec: Any
    want: Any
    got: Any


class Difference(NamedTuple):
    """The first leaf that differs, how, and how many others do."""

    leaf: Leaf
    text: str
    others: tuple[str, ...] = ()


class Tolerance(NamedTuple):
    """Relative and absolute; None: chosen by dtype, the absolute one in proportion to the numbers that are compared."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype, scale: float) -> tuple[float, float]:
        if self.rtol is not None and self.atol is not None:
            return self.rtol, self.atol
        rtol, atol = _TOLERANCES.get(dtype.to_real(), (0.0, 0.0))
        return rtol, atol * scale


class StructureError(Exception):
    """Two trees that have different nodes; the message says where."""


def leaves_of(name: str, want: Tree, dims: Dims, got: Tree, where: str) -> list[Leaf]:
    """The leaves of two trees side by side, without those that keep the slots apart."""
    choices = "aux_dims" if name == "aux" else "out_dims"
    flat = flatten(want, name, dims, choices, where)
    try:
        others = leaves_up_to(flat.structure, got)
    except ValueError:
        raise StructureError(_structures(flatten(want, name), flatten(got, name))) from None
    found = []
    for i, (spec, one, other) in enumerate(zip(flat.specs, flat.leaves, others, strict=True)):
        if spec not in APART:
            found += _below(flat.path(i), spec, one, other)
    return found


def _below(path: str, spec: Any, want: Any, got: Any) -> Iterator[Leaf]:
    one, other = flatten(want, path), flatten(got, path)  # a list under "items" is one leaf so far
    if one.structure != other.structure:
        raise StructureError(_structures(one, other))
    for i, (a, b) in enumerate(zip(one.leaves, other.leaves, strict=True)):
        yield Leaf(one.path(i), spec, a, b)


def _structures(one: Flat, other: Flat) -> str:
    path, here, there = first_difference(one.structure, other.structure, one.name)
    return f"{path} is {there}, where one device has {here}"


def first_of(leaves: Sequence[Leaf], tolerance: Tolerance, scale: float | None, *, bitwise: bool) -> Difference | None:
    """The first leaf that differs. `scale` is the magnitude of the numbers; None: of each leaf, but at least 1."""
    found = [(leaf, _difference(leaf, tolerance, scale, bitwise)) for leaf in leaves]
    wrong = [(leaf, text) for leaf, text in found if text is not None]
    if not wrong:
        return None
    return Difference(*wrong[0], tuple(leaf.path for leaf, _ in wrong[1:]))


def magnitude(tensors: Sequence[Any]) -> float:
    """The largest finite magnitude in tensors."""
    found = [0.0]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and is_inexact(tensor):
            sizes = wide(tensor).abs()
            found += [size.max().item() for size in [sizes[sizes.isfinite()]] if size.numel()]
    return max(found)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, detached and dense, to compare with."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _difference(leaf: Leaf, tolerance: Tolerance, scale: float | None, bitwise: bool) -> str | None:
    want, got = leaf.want, leaf.got
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if _equal(want, got) else f"is {_short(got)}, where one device has {_short(want)}"
    if want.dtype != got.dtype:
        return f"is {got.dtype}, where one device has {want.dtype}"
    if want.shape != got.shape:
        return f"has shape {tuple(got.shape)}, where one device has {tuple(want.shape)}"
    if same_bits(want, got):
        return None
    if scale is None:
        scale = max(1.0, magnitude([want]))
    rtol, atol = (0.0, 0.0) if bitwise or not is_inexact(want) else tolerance.of(want.dtype, scale)
    one, other = (wide(tensor) for tensor in (want, got)) if is_inexact(want) else (want.detach(), got.detach())
    close = torch.isclose(other, one, rtol=rtol, atol=atol, equal_nan=True)
    return None if close.all() and not bitwise else _numbers(one, other, ~close, rtol, atol)


def _numbers(want: torch.Tensor, got: torch.Tensor, wrong: torch.Tensor, rtol: float, atol: float) -> str:
    gaps = (got - want).abs() if is_inexact(want) else (got.to(torch.float64) - want.to(torch.float64)).abs()
    gaps = torch.where(wrong, gaps.nan_to_num(nan=float("inf")), 0.0)
    at = int(gaps.argmax()) if gaps.numel() else 0
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), want.shape)) if want.ndim else ()
    values = f"{got.reshape(-1)[at].item():.6g}, where one device has {want.reshape(-1)[at].item():.6g}"
    place = f" at index {index}, in {int(wrong.sum())} of {wrong.numel()} numbers" if want.ndim else ""
    allowed = f"allowed: rtol={rtol:.2g}, atol={atol:.2g}" if rtol or atol else "expected the same bits"
    return f"is {values}{place} (largest difference {gaps.reshape(-1)[at].item():.3g}; {allowed})"


def _equal(a: Any, b: Any) -> bool:
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)  # NaN equals NaN here
    except Exception:  # an `==` that does not say yes or no
        return False


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
