"""Whether two trees are the same: bit by bit, or up to rounding. On which devices they are makes no difference."""

from typing import Any

import torch

from property_tests.places import moved
from tests.common.comparing import assert_same_tree
from tests.common.containers import mapped, tensors_of


def assert_same(got: Any, want: Any) -> None:
    """Two trees are the same bit by bit: containers, dtypes, values with their NaNs and signs, and other leaves."""
    assert_same_tree(got, want, anywhere=True)


def assert_close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    """Two trees are the same up to rounding, which is relative to the largest value of a tensor."""
    got, want = moved(got), moved(want)
    assert_same(mapped(_without_values, got), mapped(_without_values, want))
    for i, (a, b) in enumerate(zip(tensors_of(got), tensors_of(want), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"tensor {i}"
        if not b.dtype.is_floating_point and not b.dtype.is_complex:
            assert_same(a, b)
            continue
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale, msg=lambda m, i=i: f"tensor {i}: {m}")


def _without_values(leaf: Any) -> Any:
    return "tensor" if isinstance(leaf, torch.Tensor) else leaf


def ties_of(tree: Any) -> list[int]:
    """For each tensor the place where the same object stands first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors_of(tree))]
