"""Small tensors travel together: each is what it would be by itself, to the last bit, and free to be written to."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_executor, everywhere, ring

SLOTS = 3


def tree_of(i: int) -> list[Tensor]:
    """Many shapes, layouts in memory and dtypes; each slot has other numbers."""
    make = torch.Generator().manual_seed(i)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    images = floats(2, 3, 4, 5)
    return [
        *(floats(), floats(7), floats(2, 5), floats(3, 5), floats(5, 2), floats(1), floats()),
        *(floats(0), floats(0, 5), floats(3, 0), floats(2, 1, 5), floats(4, 3).t(), floats(9)[::2]),
        *(images, images.contiguous(memory_format=torch.channels_last), floats(1, 4).expand(3, 4)),
        *(floats(300, 300), floats(3).bfloat16(), floats(2, 2).half(), floats(5).double()),
        *(torch.complex(floats(3), floats(3)), torch.complex(floats(2, 3), floats(2, 3)).conj()),
        *(torch.arange(4) * i, torch.arange(6).reshape(2, 3).to(torch.uint8), floats(3) > 0, torch.tensor(i > 0)),
    ]


def summed(xs: list[Tensor]) -> Tensor:
    """In slot order, in float32 at least; bools are counted."""
    kind = torch.int64 if xs[0].dtype is torch.bool else xs[0].dtype
    wide = torch.promote_types(kind, torch.float32) if kind in (torch.float16, torch.bfloat16) else kind
    whole = xs[0].to(wide)
    for x in xs[1:]:
        whole = whole + x.to(wide)
    return whole.to(kind)


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), i
        assert torch.equal(a, b), i


@each_executor
def test_each_is_what_it_is_by_itself(executor: Any):
    columns = [list(column) for column in zip(*map(tree_of, range(SLOTS)), strict=True)]
    want = [summed(xs) for xs in columns]
    for got in everywhere(lambda i: fdp.psum(tree_of(i)), n=SLOTS, executor=executor):
        assert_same_bits(got, want)
    for i, got in enumerate(everywhere(lambda i: fdp.ppermute(tree_of(i), ring(SLOTS)), n=SLOTS, executor=executor)):
        assert_same_bits(got, tree_of((i - 1) % SLOTS))
    real = [xs for xs in columns if not xs[0].is_complex()]
    most = [torch.stack(xs).amax(0) for xs in real]
    for got in everywhere(
        lambda i: fdp.pmax([x for x in tree_of(i) if not x.is_complex()]), n=SLOTS, executor=executor
    ):
        assert_same_bits(got, most)


@each_executor
def test_each_result_can_be_written_to(executor: Any):
    def fn(i: int) -> Any:
        given = tree_of(i)
        before = [(x.clone(), x._version) for x in given]
        found = fdp.psum(given)
        kept = [(x.clone(), x._version) for x in found]
        for k, x in enumerate(found):
            x.fill_(1)
            for y, (value, version) in zip(found[k + 1 :], kept[k + 1 :], strict=True):
                assert y._version == version
                assert torch.equal(y, value)
        for x, (value, version) in zip(given, before, strict=True):
            assert x._version == version
            assert torch.equal(x, value)
        return True

    assert everywhere(fn, n=SLOTS, executor=executor) == [True] * SLOTS


@pytest.mark.parametrize("sparse", [{0}, {1}, {0, 1}], ids=str)
def test_sparse_beside_dense(sparse: set[int]):
    """A tensor may be sparse in some slots only: a gradient that a slot does not have is dense zeros."""
    eye = torch.eye(3)

    def fn(i: int) -> Any:
        return fdp.psum([eye.to_sparse() if i in sparse else eye, eye * i, torch.ones(3)])

    for first, second, third in everywhere(fn, n=2):
        assert torch.equal(first.to_dense(), 2 * eye)
        assert torch.equal(second, eye)
        assert torch.equal(third, torch.full((3,), 2.0))


@each_executor
def test_gradients_of_each(executor: Any):
    def leaves(i: int) -> list[Tensor]:
        return [x.double().requires_grad_() for x in tree_of(i)[:16]]

    rows = [leaves(i) for i in range(SLOTS)]

    def fn(i: int) -> Tensor:
        found = fdp.psum(rows[i])
        return torch.stack([(x.sin() * (i + 1)).sum() for x in found]).sum()

    losses = everywhere(fn, n=SLOTS, executor=executor)
    got = torch.autograd.grad(sum(losses, torch.zeros(())), [x for row in rows for x in row])
    wholes = [torch.stack(xs).sum(0) for xs in zip(*rows, strict=True)]
    loss = torch.stack([(x.sin() * (i + 1)).sum() for i in range(SLOTS) for x in wholes]).sum()
    want = torch.autograd.grad(loss, [x for row in rows for x in row])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
