"""Collectives of trees, of every dtype, and gradients beside what has none."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import each_count, each_executor, everywhere, ring
from tests.common.comparing import assert_close_tree
from tests.common.containers import Point, tensors_of, with_tensors
from tests.common.depth import few
from tests.common.numbers import numbers


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


TREE_MAKERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda x: {"b": x, "a": (x + 1, x.reshape(1, -1))},
    "dataclass": lambda x: Pair(x, [x * 2]),
    "namedtuple": lambda x: Point(x, {"y": Point(x * 3, ())}),
    "dtypes": lambda x: {"f": x, "i": (10 * x).long(), "h": x.bfloat16(), "c": x + 1j, "f32": x.float()},
    "many": lambda x: [x + i for i in range(40)],
    "tied": lambda x: (x, x),
    "empty": lambda x: {"nothing": [], "none": None},
    "no-elements": lambda x: x[:0],
}


@few(2)
@each_executor
@each_count
@pytest.mark.parametrize("make", TREE_MAKERS.values(), ids=TREE_MAKERS)
def test_trees(make: Callable[[Any], Any], n: int, executor: Any):
    def value(i: int) -> Any:
        return make(numbers(4) * (i + 1))

    def summed(*xs: Tensor) -> Tensor:
        dtype = xs[0].dtype
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        return torch.stack([x.to(wide) for x in xs]).sum(0).to(dtype)

    def combine(fn: Callable[..., Any]) -> Any:
        columns = zip(*(tensors_of(value(i)) for i in range(n)), strict=True)
        return with_tensors(value(0), iter([fn(*column) for column in columns]))

    for got in everywhere(lambda i: fdp.psum(value(i)), n=n, executor=executor):
        assert_close_tree(got, combine(summed))
    for got in everywhere(lambda i: fdp.all_gather(value(i)), n=n, executor=executor):
        assert_close_tree(got, combine(lambda *xs: torch.cat(xs)))
    for i, got in enumerate(everywhere(lambda i: fdp.ppermute(value(i), ring(n)), n=n, executor=executor)):
        assert_close_tree(got, value((i - 1) % n))


@each_executor
@each_count
def test_numbers(n: int, executor: Any):
    def fn(i: int) -> Any:
        tree = {"x": i + 1, "y": [float(i), numbers(2) * i]}
        return fdp.psum(tree), fdp.pmax(tree), fdp.pmin(tree), fdp.pmean(tree), fdp.pmean(i, weight=i + 1)

    k = n - 1
    for total, most, least, mean, weighted in everywhere(fn, n=n, executor=executor):
        assert_close_tree(total, {"x": n * (n + 1) // 2, "y": [n * k / 2, numbers(2) * (n * k / 2)]})
        assert_close_tree(most["x"], n)
        assert_close_tree(least["y"][0], 0.0)
        assert_close_tree(mean, {"x": (n + 1) / 2, "y": [k / 2, numbers(2) * (k / 2)]})
        assert weighted == pytest.approx(sum(i * (i + 1) for i in range(n)) / (n * (n + 1) / 2))


@each_count
def test_integers(n: int):
    big = 2**53 + 1

    def fn(i: int) -> Any:
        return fdp.psum(torch.tensor([big])), fdp.pmax(torch.tensor([i])), fdp.pmin(torch.tensor([i > 0]))

    for total, most, least in everywhere(fn, n=n):
        assert torch.equal(total, torch.tensor([n * big]))
        assert torch.equal(most, torch.tensor([n - 1]))
        assert torch.equal(least, torch.tensor([False]))
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=r"pmean: integers have no mean: tree\['a'\]"):
            everywhere(lambda i, dtype=dtype: fdp.pmean({"a": torch.ones(2, dtype=dtype)}), n=n)


@each_executor
def test_complex_gradients(executor: Any):
    x = numbers(5, dtype=torch.complex128)
    w, v = (torch.tensor(2 - 1j, dtype=torch.complex128).requires_grad_() for _ in range(2))

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (fdp.psum((w * x).sum()) * x).abs()

    fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor=executor).sum().backward()
    ((v * x).sum() * x).abs().sum().backward()
    assert_close_tree(w.grad, v.grad)


@each_executor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_keep_the_dtype(dtype: Any, executor: Any):
    w = torch.ones(3, dtype=dtype, requires_grad=True)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return fdp.psum(w) * x

    out = fdp.dp_apply(fn, w, torch.ones(2, 3, dtype=dtype), fdp.virtual_devices(2), executor=executor)
    out.sum().backward()
    assert_close_tree(w.grad, torch.full((3,), 4, dtype=dtype))


@each_executor
def test_double_backward_beside_integers(executor: Any):
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        found = fdp.psum({"rows": torch.tensor(len(x)), "squares": (w * x).sum() ** 2})
        return found["squares"] * found["rows"] * x

    out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(2), executor=executor).sum()  # 58 w^2 * 4 * 10
    (grad,) = torch.autograd.grad(out, w, create_graph=True)
    assert_close_tree([grad, torch.autograd.grad(grad, w)[0]], [2 * 2320 * w, torch.tensor(4640.0).double()])


@pytest.mark.parametrize("slot", [0, 1])
def test_extremes_of_numbers_are_nan_if_one_is(slot: int):
    def fn(i: int) -> Any:
        x = float("nan") if i == slot else float(i)
        return [each(y) for each in (fdp.pmax, fdp.pmin) for y in (x, torch.tensor(x).double())]

    for found in everywhere(fn, n=3):
        assert all(x != x for x in found)


@each_count
def test_bools_are_counted(n: int):
    for number, tensor in everywhere(lambda i: fdp.psum([True, torch.tensor(True)]), n=n):
        assert type(number) is int
        assert number == tensor.item() == n
        assert tensor.dtype is torch.int64
