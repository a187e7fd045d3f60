"""What it means for two trees to be the same."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.common.containers import children_of, tensors_of


def assert_same_tree(got: Any, want: Any, *, anywhere: bool = False) -> None:
    """Structure, types of containers, order of dicts, dtypes, values bit by bit, and leaves that are no tensors.

    `anywhere`: tensors may be on other devices.
    """
    _compare(got, want, _assert_same_bits, "tree", anywhere)


def assert_close_tree(got: Any, want: Any, rtol: float = 1e-10) -> None:
    """As `assert_same_tree`, but values up to rounding."""

    def close(a: Tensor, b: Tensor, path: str) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda message: f"{path}: {message}")

    _compare(got, want, close, "tree")


def _compare(
    got: Any, want: Any, compare: Callable[[Tensor, Tensor, str], None], path: str, anywhere: bool = False
) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{path}: {type(got)} is no tensor"
        one, other = ((t.dtype, t.shape, t.layout, anywhere or t.device) for t in (got, want))
        assert one == other, f"{path}: {one} != {other}"
        compare(got.detach(), want.detach(), path)
        return
    assert type(got) is type(want), f"{path}: {type(got)} != {type(want)}"
    parts, others = children_of(want), children_of(got)
    if parts is None or others is None:
        assert got is want or got == want or (got != got and want != want), f"{path}: {got!r} != {want!r}"
        return
    assert len(others) == len(parts), path
    if isinstance(want, dict):
        assert list(got) == list(want), f"{path}: keys {list(got)} != {list(want)}"
    if isinstance(want, defaultdict):
        assert got.default_factory is want.default_factory, path
    if isinstance(want, deque):
        assert got.maxlen == want.maxlen, path
    for i, (other, part) in enumerate(zip(others, parts, strict=True)):
        _compare(other, part, compare, f"{path}[{i}]", anywhere)


def _assert_same_bits(got: Tensor, want: Tensor, path: str) -> None:
    whole = {"memory_format": torch.contiguous_format}
    a, b = (t.cpu().resolve_conj().resolve_neg().clone(**whole).reshape(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(a, b), f"{path}: {got} != {want}"


@contextlib.contextmanager
def unharmed(*trees: Any) -> Iterator[None]:
    """Whatever happens inside, nobody writes to the tensors of these trees."""
    tensors = [tensor for tree in trees for tensor in tensors_of(tree)]
    before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
    yield
    for tensor, values, version in before:
        _assert_same_bits(tensor.detach(), values, "unharmed")
        assert tensor._version == version
