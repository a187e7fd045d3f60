"""What test/test_cuda_multigpu.py of PyTorch asserts of broadcast, scatter and gather, on virtual devices."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel
from fdp.nn import gather, parallel_apply, replicate, scatter, scatter_kwargs
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers

TWO = ("cpu", "cpu")


pytestmark = pytest.mark.usefixtures("float64_side_by_side")


class Bag(nn.Module):
    """Tensors of any kind as parameters and buffers, to be broadcast by replicate."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self.register_parameter(f"t{i}", nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(f"t{i}", tensor)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f"t{i}") for i in range(len(self._parameters) + len(self._buffers))]


def sparse(rows: int, dtype: torch.dtype) -> Tensor:
    index = torch.tensor([[0, rows - 1, 0], [1, 0, 1]])  # one place twice
    return torch.sparse_coo_tensor(index, numbers(3, dtype=dtype), (rows, 3), check_invariants=True)


def dense_of_many_dtypes() -> list[Tensor]:
    dtypes = [torch.float64, torch.uint8, torch.float32, torch.int64, torch.float16, torch.bool, torch.complex128]
    return [numbers(7 + i, 2, dtype=dtype) for i, dtype in enumerate(dtypes * 2)]


def test_broadcast():
    x = numbers(5, 5)
    bag = Bag([x])
    replicas = replicate(bag, ["cpu"] * 3)
    for replica in replicas:
        assert_same_tree(replica.t0, x)
    assert len({replica.t0.data_ptr() for replica in replicas}) == 3


def test_broadcast_makes_no_copy_on_the_source():
    bag = Bag([numbers(5, 5), numbers(3).requires_grad_()])
    first, _ = replicate(bag, TWO)
    assert first.t0 is bag.t0
    assert first.t1 is bag.t1
    assert first.t1.data_ptr() == bag.t1.data_ptr()


BAGS: dict[str, Callable[[], list[Tensor]]] = {
    "dense": dense_of_many_dtypes,
    "sparse": lambda: [*dense_of_many_dtypes()[:3], sparse(4, torch.float64), sparse(5, torch.float32)],
    "empty": lambda: [*dense_of_many_dtypes(), torch.tensor([], dtype=torch.uint8), numbers(0, 16), numbers(3, 0, 8)],
}


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", BAGS)
def test_broadcast_coalesced(name: str, detach: bool):
    """Torch makes empty tensors flat."""
    bag = Bag(BAGS[name]())
    first, second, third = replicate(bag, ["cpu"] * 3, detach)
    assert all(copied is own for copied, own in zip(first.tensors(), bag.tensors(), strict=True))
    for replica in (second, third):
        for copied, own in zip(replica.tensors(), bag.tensors(), strict=True):
            assert copied is not own
            assert (copied.shape, copied.layout, copied.dtype) == (own.shape, own.layout, own.dtype)
            assert_same_tree(copied.to_dense(), own.to_dense())


@pytest.mark.parametrize("detach", [False, True])
def test_broadcast_coalesced_versions(detach: bool):
    """A write to one copy is no write to another, nor to the original."""
    bag = Bag([numbers(3), numbers(4), numbers(0), sparse(4, torch.float64)])
    own = [tensor._version for tensor in bag.tensors()]
    _, second, third = replicate(bag, ["cpu"] * 3, detach)
    copies = [*second.tensors(), *third.tensors()]
    before = [tensor._version for tensor in copies]
    for i, tensor in enumerate(copies):
        tensor.zero_()
        assert [t._version - v for t, v in zip(copies, before, strict=True)] == [1] * (i + 1) + [0] * (7 - i)
    assert [tensor._version for tensor in bag.tensors()] == own
    assert_same_tree(bag.t0, numbers(3))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_reduce_add(count: int):
    given = [numbers(5, 5), numbers(2, 0), numbers(3, dtype=torch.complex64)]
    bag = Bag([tensor.requires_grad_() for tensor in given])
    weights = [[numbers(*tensor.shape, dtype=tensor.dtype) * (i + 1) for tensor in bag.tensors()] for i in range(count)]
    losses = [
        (tensor * weight.conj()).real.sum() if tensor.is_complex() else (tensor * weight).sum()
        for replica, given in zip(replicate(bag, ["cpu"] * count), weights, strict=True)
        for tensor, weight in zip(replica.tensors(), given, strict=True)
    ]
    torch.stack([loss.double() for loss in losses]).sum().backward()
    want = [functools.reduce(torch.add, column) for column in zip(*weights, strict=True)]
    assert_close_tree([tensor.grad for tensor in bag.tensors()], want, rtol=1e-6)


def test_reduce_add_of_sparse_gradients():
    layer, tokens = nn.Embedding(6, 2, sparse=True), [torch.tensor([0, 3, 3]), torch.tensor([5]), torch.tensor([3, 1])]
    parallel = parallel_apply(replicate(layer, ["cpu"] * 3), tokens)
    torch.cat([(i + 1) * output for i, output in enumerate(parallel)]).sum().backward()
    assert layer.weight.grad.is_sparse
    want = torch.tensor([1.0, 3, 0, 5, 0, 2])[:, None].expand(6, 2)
    assert_close_tree(layer.weight.grad.to_dense(), want)


def test_reduce_add_of_sparse_and_dense_gradients():
    layer, tokens = nn.Embedding(6, 2, sparse=True), torch.tensor([0, 3])
    first, second = replicate(layer, TWO)
    (first(tokens).sum() + (2 * second.weight).sum()).backward()
    assert_close_tree(layer.weight.grad.to_dense(), torch.tensor([3.0, 2, 2, 3, 2, 2])[:, None].expand(6, 2))


def test_reduce_add_leaves_independent_gradients():
    bag = Bag([numbers(3).requires_grad_(), numbers(3).cos().requires_grad_()])
    torch.stack([tensor.sum() for replica in replicate(bag, TWO) for tensor in replica.tensors()]).sum().backward()
    one, other = (tensor.grad for tensor in bag.tensors())
    version = other._version
    one.zero_()
    assert other._version == version
    assert_same_tree(other, torch.full((3,), 2.0))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_scatter_slices(dim: int):
    x = numbers(4, 6)
    parts = scatter(x, TWO, dim)
    size = x.shape[dim] // 2
    for i, part in enumerate(parts):
        assert_same_tree(part, x.narrow(dim, i * size, size))
        assert part.data_ptr() == x.narrow(dim, i * size, size).data_ptr()
        assert part._base is not None


def test_scatter_by_sizes():
    seen = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x * 2

    x = numbers(6, 3).requires_grad_()
    got = DataParallel(Seeing(), TWO, weights=(2, 4), executor="sequential")(x)
    assert_same_tree(got, 2 * x)
    assert seen == [2, 4]
    got.backward(numbers(6, 3))
    assert_same_tree(x.grad, 2 * numbers(6, 3))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_gather_order_and_size(dim: int):
    parts = [numbers(2, 5), numbers(2, 5).cos()] if dim in (0, -2) else [numbers(4, 2), numbers(4, 3)]
    assert_same_tree(gather(parts, "cpu", dim), torch.cat(parts, dim))
    with pytest.raises(ValueError, match="there are no outputs; expected at least one tree to gather from"):
        gather([], "cpu", dim)
    with pytest.raises(ValueError, match=r"which cannot be concatenated along dim"):
        gather([numbers(3, 3, 3), numbers(3, 3)], "cpu", dim)
    with pytest.raises(ValueError, match=r"has shapes .* which cannot be concatenated along dim"):
        gather([numbers(2, 5, 7), numbers(3, 4, 7)], "cpu", dim)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_memory_format_scatter_gather(layout: torch.memory_format):
    x = numbers(10, 3, 32, 32).contiguous(memory_format=layout)
    parts = scatter(x, ["cpu"] * 4)
    assert all(part.is_contiguous(memory_format=layout) for part in parts)
    joined = gather(parts, "cpu")
    assert joined.is_contiguous(memory_format=layout)
    assert_same_tree(joined, x)


Untyped = collections.namedtuple("Untyped", ("a", "b"))


class Typed(NamedTuple):
    a: Tensor
    b: Tensor


@pytest.mark.parametrize("kind", [Untyped, Typed])
def test_scatter_namedtuple(kind: Any):
    a, b = numbers(6), numbers(6, 2).cos()
    parts = scatter(kind(a, b), ["cpu"] * 3)
    assert_same_tree(parts, [kind(a[i : i + 2], b[i : i + 2]) for i in (0, 2, 4)])
    args, _ = scatter_kwargs((kind(a, b),), None, ["cpu"] * 3)
    assert_same_tree([part for (part,) in args], parts)
    assert parts[0]._fields == ("a", "b")


@pytest.mark.parametrize("kind", [Untyped, Typed])
def test_gather_namedtuple(kind: Any):
    parts = [kind(numbers(2), numbers(2, 2)), kind(numbers(3).cos(), numbers(3, 2).cos())]
    joined = gather(parts, "cpu")
    assert_same_tree(joined, kind(*(torch.cat(column) for column in zip(*parts, strict=True))))
