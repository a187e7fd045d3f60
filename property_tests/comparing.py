"""Whether two trees are the same: bit by bit, or up to rounding."""

from collections import defaultdict, deque
from typing import Any

import torch

from property_tests.places import moved
from tests.common.containers import children_of, mapped, tensors_of


def assert_same(got: Any, want: Any, path: str = "tree") -> None:
    """Two trees are the same bit by bit: containers, dtypes, values with their NaNs and signs, and other leaves."""
    assert type(got) is type(want) or isinstance(want, torch.Tensor), f"{path}: {type(got)} != {type(want)}"
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), path
        assert got.dtype == want.dtype, f"{path}: {got.dtype} != {want.dtype}"
        assert got.shape == want.shape, f"{path}: {got.shape} != {want.shape}"
        assert torch.equal(_bits(got), _bits(want)), f"{path}: {got} != {want}"
        return
    parts = children_of(want)
    if parts is None:
        assert got is want or got == want or (got != got and want != want), f"{path}: {got!r} != {want!r}"
        return
    others = children_of(got)
    assert others is not None
    assert len(others) == len(parts), path
    if isinstance(want, dict):
        assert list(got) == list(want), f"{path}: keys {list(got)} != {list(want)}"
    if isinstance(want, defaultdict):
        assert got.default_factory is want.default_factory, path
    if isinstance(want, deque):
        assert got.maxlen == want.maxlen, path
    for i, (other, part) in enumerate(zip(others, parts, strict=True)):
        assert_same(other, part, f"{path}[{i}]")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().cpu().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def assert_close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    """Two trees are the same up to rounding, which is relative to the largest value of a tensor."""
    got, want = moved(got), moved(want)
    assert_same(mapped(_without_values, got), mapped(_without_values, want))
    for i, (a, b) in enumerate(zip(tensors_of(got), tensors_of(want), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"tensor {i}"
        if not b.dtype.is_floating_point and not b.dtype.is_complex:
            assert_same(a, b, f"tensor {i}")
            continue
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale, msg=lambda m, i=i: f"tensor {i}: {m}")


def _without_values(leaf: Any) -> Any:
    return "tensor" if isinstance(leaf, torch.Tensor) else leaf


def ties_of(tree: Any) -> list[int]:
    """For each tensor the place where the same object stands first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors_of(tree))]
