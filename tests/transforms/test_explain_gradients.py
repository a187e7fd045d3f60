"""`explain` of gradient functions (copies: tests/accelerator)."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.numbers import numbers

SLOTS, GPUS = fdp.virtual_devices(3), [f"cuda:{i}" for i in range(3)]
PARAMS, X, Y = {"w": numbers(3, 2), "b": numbers(2)}, numbers(7, 3), numbers(7)


def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]).sum(1) - y).square().mean()


def with_aux(params: Any, x: Tensor, y: Tensor) -> Any:
    return loss(params, x, y), {"pred": x @ params["w"], "norm": x.norm()}


def said(leaves: Any) -> list[tuple[Any, ...]]:
    return [(leaf.path, leaf.shape, leaf.how, leaf.rows) for leaf in leaves]


@pytest.mark.parametrize("name", ["value_and_grad", "grad", "grad_and_value"])
def test_what_comes_out(name: str):
    step = getattr(fdp, name)(with_aux, has_aux=True, devices=SLOTS, aux_dims={"pred": 0, "norm": "mean"})
    plan = fdp.explain(step, PARAMS, (X, Y))
    assert (plan.sizes, plan.problem, plan.differences) == ((3, 2, 2), None, ())
    assert said(plan.arguments) == [
        ("args[0]['b']", (2,), "whole", None),
        ("args[0]['w']", (3, 2), "whole", None),
        ("args[1]", (7, 3), "split along dim 0", (3, 2, 2)),
        ("args[2]", (7,), "split along dim 0", (3, 2, 2)),
    ]
    assert said(plan.outputs) == [
        ("loss", (), "mean by rows", None),
        ("aux['norm']", (), "mean by rows", None),
        ("aux['pred']", (7, 2), "concatenated along dim 0", (3, 2, 2)),
        ("grad of args[0]['b']", (2,), "sum", None),
        ("grad of args[0]['w']", (3, 2), "sum", None),
    ]
    assert plan.executor == "one shard after the other: executor='auto'"


def test_what_means_are_weighted_by():
    step = fdp.grad(
        with_aux,
        has_aux=True,
        devices=SLOTS,
        aux_dims={"pred": 0, "norm": "mean"},
        count=lambda p, x, y: y.sum(),
        aux_weight="count",
    )
    found = {leaf.path: leaf.how for leaf in fdp.explain(step, PARAMS, (X, Y)).outputs or ()}
    assert (found["loss"], found["aux['norm']"]) == ("mean by count", "mean by count")
    assert found["aux['pred']"] == "concatenated along dim 0"


def test_settings_are_those_of_the_function():
    options: Any = {"argnums": (1,), "in_dims": (None, 0, 0), "count": lambda p, x, y: y.sum(), "microbatches": 2}
    plan = fdp.explain(fdp.value_and_grad(loss, devices=SLOTS, executor="threads", **options), PARAMS, (X, Y))
    assert said(plan.outputs) == [
        ("loss", (), "mean by count", None),
        ("grad of args[1]", (7, 3), "concatenated along dim 0", (3, 2, 2)),
    ]
    assert plan.executor == "side by side in threads"
    named = fdp.explain(fdp.grad(loss, devices=SLOTS, kwarg_dims={"y": 0}), PARAMS, X, kwargs={"y": Y})
    assert said(named.arguments)[-1] == ("kwargs['y']", (7,), "split along dim 0", (3, 2, 2))
    state = fdp.replicate(PARAMS, SLOTS), fdp.scatter((X, Y), SLOTS).unzip()
    held = fdp.explain(fdp.value_and_grad(loss), *state)
    assert said(held.outputs)[1:] == [
        ("grad of args[0]['b']", (2,), "sum, on each slot", None),
        ("grad of args[0]['w']", (3, 2), "sum, on each slot", None),
    ]


def test_what_makes_numbers_differ():
    apply, state = fdp.functional(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    (text,) = fdp.explain(apply, state, X, SLOTS).differences
    assert text.startswith("Batch norm in train mode on 3 slots: ['1'] of a Sequential takes the statistics of")
    plan = fdp.explain(fdp.grad(lambda p, x: apply((p, state[1]), x)[0].square().mean(), devices=SLOTS), state[0], X)
    assert plan.differences == (text,)
    assert f"Differs from one device: {text}" in str(plan).replace("\n", " ")
    assert fdp.explain(apply, state, X, "cpu").differences == ()


def test_devices_that_are_not_here():
    if torch.cuda.is_available():
        pytest.skip("there are such devices here")
    plan = fdp.explain(fdp.value_and_grad(loss, devices=GPUS), PARAMS, (X, Y))
    assert "gradients cannot be explained on devices that are not here" in (plan.problem or "")
    assert len(plan.copies) == 3 * (2 + 2)
    assert plan.outputs is None


def test_functions_of_values_and_mistakes():
    plan = fdp.explain(fdp.grad(lambda w, x: (x @ w).mean() * x.sum().item(), devices=SLOTS), numbers(3), X)
    assert (plan.problem or "").startswith("the function depends on values")
    with pytest.raises(ValueError, match="explain: the loss must be a 0-dim tensor"):
        fdp.explain(fdp.grad(lambda w, x: x @ w, devices=SLOTS), numbers(3), X)
    step = fdp.value_and_grad(loss, devices=SLOTS)
    assert "missing 1 required positional argument: 'y'" in (fdp.explain(step, PARAMS, [X, Y]).problem or "")
    mistaken: Any = Y
    with pytest.raises(
        TypeError, match=r"explain: several inputs are a tuple: explain\(fn, params, \(x, y\), devices\)"
    ):
        fdp.explain(step, PARAMS, X, mistaken)
    with pytest.raises(TypeError, match=r"explain: devices, seed: .*Write value_and_grad\(loss, devices=\.\.\.\)"):
        fdp.explain(step, PARAMS, (X, Y), SLOTS, seed=0)


def test_a_wrapper_of_a_gradient_function_is_a_function():
    @functools.wraps(fdp.grad(loss))
    def wrapped(params: Any, x: Tensor) -> Tensor:
        return x @ params["w"]

    plan = fdp.explain(wrapped, PARAMS, X, SLOTS)
    assert said(plan.outputs) == [("out", (7, 2), "concatenated along dim 0", (3, 2, 2))]


def test_nothing_is_left():
    w = nn.Parameter(numbers(3))
    fdp.explain(fdp.value_and_grad(lambda w, x: (x @ w).mean(), devices=SLOTS), w, X)
    assert w.grad is None
    assert w._version == 0
