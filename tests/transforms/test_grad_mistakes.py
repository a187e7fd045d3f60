"""Losses, leaves and options of which there is no gradient, and losses over zero rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import unharmed
from tests.common.functions import never
from tests.common.numbers import COUNTS, numbers
from tests.transforms.losses import W, X, Y, loss

SLOTS = fdp.virtual_devices(3)


@pytest.mark.parametrize("slots", COUNTS)
def test_mean_over_zero_rows(slots: int):
    devices = fdp.virtual_devices(slots)
    with unharmed(W):
        options: Any
        for options in ({}, {"microbatches": 3}, {"weights": [1] * slots}):
            with pytest.raises(
                ValueError, match=r"^value_and_grad: there are no rows, and the mean over zero rows is not"
            ):
                fdp.value_and_grad(loss, devices=devices, **options)(W, X[:0], Y[:0])
        with pytest.raises(ValueError, match=r"^grad: there are no rows"):
            fdp.grad(loss)(W, fdp.scatter(X[:0], devices, keep_empty=True), Y[:0])


WRONG_LOSSES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "rows": (
        lambda w, x: x @ w,
        ValueError,
        r"the loss must be a 0-dim tensor, got shape \(\d,\); reduce it with .mean\(\)",
    ),
    "one": (lambda w, x: (x @ w).mean().reshape(1), ValueError, r"the loss must be a 0-dim tensor, got shape \(1,\)"),
    "integer": (
        lambda w, x: (x @ w).sum().long(),
        TypeError,
        "the loss must be a real floating-point tensor, got a tensor of torch.int64",
    ),
    "complex": (
        lambda w, x: (x @ w).sum() + 1j,
        TypeError,
        "the loss must be a real .*got a tensor of torch.complex128",
    ),
    "float": (lambda w, x: 3.0, TypeError, "the loss must be a real floating-point tensor, got a float"),
    "none": (lambda w, x: None, TypeError, "the loss must be a real floating-point tensor, got a NoneType"),
    "tuple": (
        lambda w, x: ((x @ w).mean(), x),
        TypeError,
        "the loss must be .*got a tuple. To return more .*has_aux=True",
    ),
    "dict": (
        lambda w, x: {"loss": (x @ w).mean()},
        TypeError,
        "the loss must be a real floating-point tensor, got a dict",
    ),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_wrong_losses(name: str, slots: int, transformed: bool):
    fn, error, message = WRONG_LOSSES[name]
    with unharmed(W, X), torch.inference_mode(transformed), pytest.raises(error, match=rf"^grad: {message}"):
        fdp.grad(fn, devices=fdp.virtual_devices(slots))(W, X)


@pytest.mark.parametrize("out", [X.mean(), (X.mean(),), (X.mean(), 1, 2), [X.mean(), 1], {"loss": X.mean()}])
def test_has_aux_means_a_pair(out: Any):
    with pytest.raises(TypeError, match=r"grad: with has_aux=True the function must return \(loss, aux\), got a"):
        fdp.grad(lambda w, x: out, has_aux=True, devices=SLOTS)(W, X)


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [
        (torch.tensor(3), r"torch.int64"),
        (torch.tensor([True]), "torch.bool"),
        (2.5, "a float"),
        (True, "a bool"),
        ("text", "a str"),
        (torch.float32, "a dtype"),
    ],
)
@pytest.mark.parametrize("replicated", [False, True])
def test_leaves_that_cannot_be_differentiated(leaf: Any, shown: str, replicated: bool):
    params = {"w": W, "b": [W, leaf]}
    with unharmed(params):
        state = fdp.replicate(params, SLOTS) if replicated else params
        message = r"only floating-point and complex tensors can be differentiated in, not args\[0\].*"
        with pytest.raises(TypeError, match=rf"^grad: {message}\({shown}\).*an argument that argnums does not name"):
            fdp.grad(never, devices=SLOTS)(state, X)


@pytest.mark.parametrize("replicated", [False, True])
def test_leaves_that_cannot_be_differentiated_are_named(replicated: bool):
    params = {"w": W, "b": [W, torch.tensor(3)], "c": 2.5}
    state = fdp.replicate(params, SLOTS) if replicated else params
    with pytest.raises(TypeError, match=r"args\[0\].*\['b'\]\[1\] \(torch.int64\), args\[0\].*\['c'\] \(a float\)\. "):
        fdp.grad(never, devices=SLOTS)(state, X)


def test_split_leaves_that_cannot_be_differentiated():
    with pytest.raises(TypeError, match=r"not args\[1\]\['i'\] \(torch.int64\)\."):
        fdp.grad(never, 1, devices=SLOTS, in_dims=(None, 0))(W, {"x": X, "i": torch.arange(7)})
    with pytest.raises(TypeError, match=r"not args\[1\].* \(a str\)"):
        fdp.grad(never, 1, devices=SLOTS, in_dims=(None, "items"))(W, ["a", "b", "c"])


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "reduction": ({"reduction": "max"}, ValueError, "reduction must be 'mean' or 'sum', got 'max'"),
    "sum-and-count": (
        {"reduction": "sum", "count": len},
        ValueError,
        "count says what a mean is over; reduction='sum' has no use",
    ),
    "argnums-none": ({"argnums": ()}, TypeError, r"argnums must be an int or a tuple of ints, got \(\)"),
    "argnums-list": ({"argnums": [0]}, TypeError, r"argnums must be an int or a tuple of ints, got \[0\]"),
    "argnums-name": ({"argnums": "w"}, TypeError, "argnums must be an int or a tuple of ints, got 'w'"),
    "argnums-bool": ({"argnums": True}, TypeError, "argnums must be an int or a tuple of ints, got True"),
    "argnums-range": ({"argnums": 2}, ValueError, "argnums is 2, but there are 2 positional arguments"),
    "argnums-negative": (
        {"argnums": (0, -3)},
        ValueError,
        r"argnums is \(0, -3\), but there are 2 positional arguments",
    ),
    "argnums-twice": ({"argnums": (0, -2)}, ValueError, r"argnums \(0, -2\) names an argument twice"),
    "create-graph": ({"create_graph": "yes"}, (TypeError, ValueError), "create_graph must be .*'yes'"),
    "aux-dims": ({"aux_dims": "avg", "has_aux": True}, ValueError, "aux has the out_dim 'avg'; expected an int"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name: str):
    options, error, message = WRONG_OPTIONS[name]
    with pytest.raises(error, match=rf"^value_and_grad: {message}"):
        fdp.value_and_grad(lambda w, x: ((x @ w).mean(), W), devices=SLOTS, **options)(W, X)


def test_no_positional_arguments():
    with pytest.raises(ValueError, match="grad: argnums is 0, but there are 0 positional arguments"):
        fdp.grad(never, devices=SLOTS)(w=W)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("slots", [1, 3])
def test_writes_in_place_are_found(slots: int):
    def writes_params(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            w.add_(1)
        return (w * x).mean()

    def writes_batch(w: Tensor, x: Tensor) -> Tensor:
        return (w * x.mul_(2)).mean()

    devices = fdp.virtual_devices(slots)
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[0\]\['w'\]\. "):
        fdp.grad(lambda p, x: writes_params(p["w"], x), devices=devices)({"w": numbers(4)}, X)
    with pytest.raises(RuntimeError, match=r"^value_and_grad: the function wrote in place to args\[1\]\[0\]\. "):
        fdp.value_and_grad(lambda w, x: writes_batch(w, x[0]), devices=devices)(W, [numbers(7, 4)])
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[0\]"):
        fdp.grad(writes_params, devices=devices)(fdp.replicate(numbers(4), devices), X)
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[1\]"):
        fdp.grad(writes_batch)(W, fdp.scatter(numbers(7, 4), devices))
    with unharmed(W), pytest.raises(RuntimeError, match=r"in-place|in place"):  # torch's own error comes first
        fdp.grad(lambda w, x: (w.add_(1) * x).mean(), devices=devices)(W, X)


def test_writes_by_count_are_found():
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[1\]"):
        fdp.grad(lambda w, x: (x @ w).mean(), devices=SLOTS, count=lambda w, x: len(x.mul_(2)))(W, numbers(7, 4))
