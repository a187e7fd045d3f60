"""Means over slots: their weights, weights of 0, and the dtype of the result."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import W, each_count, each_executor, everywhere
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers


@each_executor
@pytest.mark.parametrize("empty", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["number", "float", "tensor", "float-tensor", "bool-tensor"])
def test_a_slot_of_weight_0_contributes_nothing(kind: str, empty: float, executor: Any):
    def weight(i: int) -> Any:
        value = {"number": int, "float": float}.get(kind, torch.tensor)(int(i != 1))
        return value.float() if kind == "float-tensor" else value.bool() if kind == "bool-tensor" else value

    def fn(w: Tensor, i: Tensor) -> Tensor:
        index = fdp.axis_index()
        own = w * (empty if index == 1 else index + 1.0)
        return fdp.pmean({"x": own, "n": empty if index == 1 else 1.0}, weight=weight(index))["x"] + 0 * i

    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = fdp.dp_apply(fn, w, torch.zeros(3), fdp.virtual_devices(3), executor=executor)
    assert torch.equal(out.double(), torch.full((3,), 2.0, dtype=torch.float64))


@each_count
@pytest.mark.parametrize(
    "zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=["int", "float", "tensor", "ftensor"]
)
def test_a_mean_over_nothing(zero: Any, n: int):
    with pytest.raises(ValueError, match="pmean: all weights are 0"):
        everywhere(lambda i: fdp.pmean(torch.ones(2), weight=zero), n=n)


def mean_of(value: float, n: int, weight: Any, dtype: torch.dtype = torch.float16) -> Tensor:
    """The mean over n slots that all have the same value, and the same weight."""
    x = torch.full((100 * n,), value, dtype=dtype)
    means = fdp.dp_apply(
        lambda _, x: fdp.pmean([x[0], x[:2]], weight=weight), None, x, fdp.virtual_devices(n), out_dims=None
    )
    assert torch.equal(*torch.broadcast_tensors(*means))
    return means[0]


WEIGHTS: dict[str, Any] = {
    "none": None,
    "rows": "rows",
    "tiny": 1e-9,
    "less-than-tiny": 1e-60,
    "uint8": torch.tensor(200, dtype=torch.uint8),
    "half": torch.tensor(40000.0).half(),
    "bool": torch.tensor(True),
    "wide": torch.tensor(2.0, dtype=torch.float64),
}


@few(3)
@each_count
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_a_mean_of_equal_values_is_the_value(dtype: torch.dtype, weight: Any, n: int):
    """Also where their sum, or that of the weights, would overflow."""
    found = mean_of(39936, n, weight, dtype)
    assert found.dtype is dtype
    assert found.item() == 39936


def test_weights_are_as_wide_as_the_leaves():
    assert mean_of(1000, 3, torch.tensor(0.1), torch.float64).item() == 1000


def test_numbers_stay_numbers_under_a_tensor_weight():
    found = fdp.dp_apply(
        lambda _, x: fdp.pmean({"a": 3.0 * fdp.axis_index(), "b": x.mean()}, weight=torch.tensor(2.0)),
        *(None, torch.ones(4), fdp.virtual_devices(2)),
        out_dims=None,
    )
    assert isinstance(found["a"], float)
    assert (found["a"], found["b"].item()) == (1.5, 1.0)


def of_empty(kind: str, x: Tensor, w: Tensor) -> Any:
    weight = torch.tensor(float(len(x)))
    return {"rows": "rows", "number": float(len(x)), "tensor": weight, "differentiated": weight * (1 + 0 * w.sum())}[
        kind
    ]


@each_executor
@pytest.mark.parametrize("kind", ["rows", "number", "tensor", "differentiated"])
def test_a_slot_of_weight_0_has_no_gradient(kind: str, executor: Any):
    """Where there are no rows, 0 times the gradient of their mean is NaN: differentiated outside and inside."""
    x, w = numbers(2, 3), W.clone().requires_grad_()
    shards = fdp.scatter(x, fdp.virtual_devices(3), keep_empty=True)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return fdp.pmean((x.mean(0) @ w) ** 2, weight=of_empty(kind, x, w))

    def call(w: Tensor) -> Any:
        return fdp.parallel_apply(loss, w, shards, executor=executor)[0]

    def by_func(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(loss)(w, x)

    def by_fdp(w: Tensor, x: Tensor) -> Tensor:
        return fdp.grad(lambda w: loss(w, x), reduction="sum", axis_name="inner")(w)

    (expected,) = torch.autograd.grad(((x @ w) ** 2).mean(), w)
    call(w).backward()
    assert_close_tree(w.grad, expected)
    for fn in (torch.func.grad(call), torch.func.jacfwd(call)):
        assert_close_tree(fn(W), expected)
    if kind != "differentiated":
        assert_close_tree(torch.func.vmap(torch.func.grad(call))(W.expand(2, 3).clone())[1], expected)
    for inside in (by_func, by_fdp):  # the others sum the gradients of 3 equal means
        found: Any = fdp.parallel_apply(inside, W, shards, executor=executor)
        assert_close_tree(found[0] + found[1], 3 * expected)
        assert_close_tree(found[2], torch.zeros(3, dtype=torch.float64))


@each_executor
def test_the_gradient_of_a_weight_that_is_0(executor: Any):
    x = torch.tensor([5.0, 2.0], dtype=torch.float64)
    a = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def mapped(a: Tensor, x: Tensor = x) -> Tensor:
        devices = fdp.virtual_devices(2)
        fn = lambda a, x: fdp.pmean(x.sum(), weight=a[fdp.axis_index()])  # noqa: E731
        return fdp.dp_apply(fn, a, x, devices, out_dims=None, executor=executor)

    def plainly(a: Tensor) -> Tensor:
        return (a * x).sum() / a.sum()

    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        assert_close_tree(transform(mapped)(a), transform(plainly)(a))
    own = a.clone().requires_grad_()
    assert_close_tree(torch.autograd.grad(mapped(own), own)[0], torch.tensor([3.0, 0.0], dtype=torch.float64))
    mixed = torch.func.vmap(torch.func.grad(mapped))(torch.stack([a, a + 1]))  # of the weights, one is 0
    assert_close_tree(mixed, torch.func.vmap(torch.func.grad(plainly))(torch.stack([a, a + 1])))
    per_x = torch.func.vmap(lambda x: torch.func.grad(mapped)(a, x))(torch.stack([x, x + 1]))
    assert_close_tree(per_x, torch.tensor([[3.0, 0.0], [3.0, 0.0]], dtype=torch.float64))
    x_with_nan = torch.tensor([float("nan"), 2.0], dtype=torch.float64)
    out = mapped(own, x_with_nan)
    assert out.item() == 2
    assert torch.autograd.grad(out, own)[0].isfinite().all()


@each_executor
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches(microbatches: int, executor: Any):
    x = numbers(12, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum() / fdp.psum(len(x))

    options: Any = {"devices": fdp.virtual_devices(2), "reduction": "sum", "executor": executor}
    found = fdp.value_and_grad(loss, microbatches=microbatches, **options)(W, x)
    grad, value = torch.func.grad_and_value(lambda w: (x @ w).square().mean() * microbatches)(W)
    assert_close_tree(found, (value, grad))
