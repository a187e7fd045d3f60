"""`count`: what the mean of a loss is over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.functions import never
from tests.common.numbers import COUNTS
from tests.transforms.losses import MASK, W, X, Y, dual, loss, mask_sum, oracle, weighted_loss

SLOTS = fdp.virtual_devices(3)


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("kind", ["int", "float", "tensor", "bool-sum"])
def test_count_is_what_the_mean_is_over(slots: int, kind: str):
    counts: dict[str, Callable[..., Any]] = {
        "int": lambda w, x, y, mask: int(mask.sum()),
        "float": lambda w, x, y, mask: float(mask.sum()),
        "tensor": mask_sum,
        "bool-sum": lambda w, x, y, mask: (mask > 0).sum(),
    }
    got = fdp.value_and_grad(weighted_loss, devices=fdp.virtual_devices(slots), count=counts[kind])(W, X, Y, MASK)
    assert_close_tree(got, oracle(weighted_loss, W, X, Y, MASK))


def test_count_is_called_as_the_loss_is():
    seen: list[Any] = []

    def count(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs))
        return len(args[1])

    fdp.grad(lambda w, x, *, y: loss(w, x, y), devices=SLOTS, count=count)(W, X, y=Y)
    want = [((W, X[a:b]), {"y": Y[a:b]}) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert_same_tree(seen, want)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_shard_of_weight_0_is_left_out(slots: int, transformed: bool):
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0], dtype=torch.float64)  # without the mask the last shard divides 0 by 0

    def fn(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        value = weighted_loss(w, x, y, mask)
        return value, {"value": value * 2, "w": w * value}

    options: Any = {
        "has_aux": True,
        "devices": fdp.virtual_devices(slots),
        "count": mask_sum,
        "aux_weight": "count",
        "aux_dims": "mean",
    }
    with torch.inference_mode(transformed):
        (value, aux), grads = fdp.value_and_grad(fn, **options)(W, X, Y, mask)
    want = oracle(weighted_loss, W, X[:4], Y[:4], mask[:4])
    assert_close_tree((value, grads), want)
    assert_close_tree(aux, {"value": 2 * value, "w": W * value})


def test_a_count_that_each_shard_writes_to_one_tensor():
    held = torch.zeros((), dtype=torch.float64)
    got = fdp.value_and_grad(weighted_loss, devices=SLOTS, count=lambda *args: held.copy_(mask_sum(*args)))(
        W, X, Y, MASK
    )
    assert_close_tree(got, oracle(weighted_loss, W, X, Y, MASK))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_count_inside_of_transforms(transform: str):
    def call(w: Tensor) -> Tensor:
        return fdp.value_and_grad(weighted_loss, devices=SLOTS, count=mask_sum)(w, X, Y, MASK)[1]

    def plain(w: Tensor) -> Tensor:
        return torch.func.grad(weighted_loss)(w, X, Y, MASK)

    if transform == "grad":
        got, want = (torch.func.grad(lambda w, fn=fn: fn(w).square().sum())(W) for fn in (call, plain))
    else:
        got, want = (torch.func.vmap(fn)(torch.stack([W, W + 1])) for fn in (call, plain))
    assert_close_tree(got, want)


WRONG_COUNTS: dict[str, tuple[Callable[..., Any], str]] = {
    "zero": (lambda w, x: 0, "count is zero on all shards, and the mean over nothing is not defined"),
    "zero-tensor": (lambda w, x: x.new_zeros(()), "count is zero on all shards"),
    "negative": (lambda w, x: -1, r"count must return a finite number that is not negative, got \[-1.0"),
    "nan": (lambda w, x: float("nan"), r"count must return a finite number that is not negative, got \[nan"),
    "infinite": (lambda w, x: float("inf"), r"count must return a finite number that is not negative, got \[inf"),
    "rows": (lambda w, x: x, "count must return a .*number"),
    "none": (lambda w, x: None, "count must return a .*number"),
    "text": (lambda w, x: "seven", "count must return a .*number"),
}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_wrong_counts(name: str, slots: int):
    count, message = WRONG_COUNTS[name]
    with unharmed(W, X), pytest.raises((TypeError, ValueError), match=rf"^value_and_grad: {message}"):
        fdp.value_and_grad(lambda w, x: (w * x).mean(), devices=fdp.virtual_devices(slots), count=count)(W, X)


def test_negative_count_on_one_shard():
    with pytest.raises(ValueError, match=r"count must return .* not negative, got \[3.0, -2.0, 2.0\]"):
        fdp.grad(never, devices=SLOTS, count=lambda w, x: -2 if x[0, 0] == X[3, 0] else len(x))(W, X)


@pytest.mark.parametrize("count", [3, "tokens", MASK])
def test_count_that_is_no_function(count: Any):
    with pytest.raises(TypeError, match=r"^grad: .*count.*function"):
        fdp.grad(never, devices=SLOTS, count=count)(W, X)


def test_an_exception_in_count_says_where():
    def count(w: Tensor, x: Tensor) -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError, match="division by zero") as info:
        fdp.grad(never, devices=SLOTS, count=count)(W, X)
    assert "in shard 0 of 3" in "".join(info.value.__notes__)


def count_given_mask(mask: Tensor) -> Tensor:
    options: Any = {"in_dims": (None, 0, 0, 0), "devices": SLOTS, "count": mask_sum}
    return fdp.value_and_grad(weighted_loss, **options)(W, X, Y, mask)[0]


COUNT_OPTIONS: Any = {"devices": SLOTS, "count": mask_sum}
DIFFERENTIATED: dict[str, Callable[[Tensor], Any]] = {
    "argnums": lambda mask: fdp.grad(weighted_loss, 3, in_dims=(None, 0, 0, 0), **COUNT_OPTIONS)(W, X, Y, mask),
    "requires-grad": lambda mask: count_given_mask(mask.requires_grad_()),
    "grad": lambda mask: torch.func.grad(count_given_mask)(mask),
    "jvp": lambda mask: torch.func.jvp(count_given_mask, (mask,), (mask,)),
    "dual": lambda mask: dual(count_given_mask, mask, mask),
    "vmap-grad": lambda mask: torch.func.grad(lambda m: torch.func.vmap(lambda w: count_given_mask(m))(W).sum())(mask),
    "params": lambda mask: fdp.grad(loss, devices=SLOTS, count=lambda w, x, y: w.sum() * len(x))(W, X, Y),
}


@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_count_that_is_differentiated_is_refused(way: str):
    """The weights of the shards depend on it too, and the gradient would miss that part."""
    with pytest.raises(
        ValueError, match=r"what count returned depends on something that is differentiated.*count\.item"
    ):
        DIFFERENTIATED[way](MASK + 0.5)


def test_a_count_that_is_taken_for_a_constant():
    got = fdp.value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: w.sum().item() * len(x))(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))
    got = fdp.value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: (w > -9).sum() * len(x))(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))
