"""Messages about thousands of leaves: ten are named, among them the odd one, and the others counted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from tests.helpers import numbers

SLOTS = fdp.virtual_devices(2)
MANY = 4000
W = torch.tensor(2.0, dtype=torch.float64)


def many(make: Callable[[], Any]) -> dict[str, Any]:
    return {f"leaf{i}": make() for i in range(MANY)}


class Opaque:
    def __init__(self) -> None:
        self.x = torch.ones(1)


def writes(w: Any, x: Any) -> Any:
    for tensor in x.values():
        tensor.add_(1)
    return x


def loss(w: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mean()


FAILURES: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "opaque": (TypeError, lambda: fdp.scatter(many(Opaque), SLOTS)),
    "dims out of range": (ValueError, lambda: fdp.scatter(many(lambda: numbers(4)), SLOTS, 3)),
    "rows": (ValueError, lambda: fdp.scatter([many(lambda: numbers(4)), many(lambda: numbers(3))], SLOTS)),
    "written": (RuntimeError, lambda: fdp.dp_apply(writes, W, many(lambda: numbers(4)), SLOTS)),
    "not joined": (
        ValueError,
        lambda: fdp.dp_apply(lambda w, x: many(lambda: torch.ones(())), W, numbers(4), SLOTS),
    ),
    "not differentiable": (TypeError, lambda: fdp.grad(loss, devices=SLOTS)(many(lambda: 3), numbers(4))),
    "aux of rows": (
        ValueError,
        lambda: fdp.grad(lambda w, x: ((w * x).mean(), many(lambda: x)), has_aux=True, devices=SLOTS)(W, numbers(4)),
    ),
    "not exchanged": (
        TypeError,
        lambda: fdp.dp_apply(lambda w, x: fdp.psum(many(lambda: "text")), W, numbers(4), SLOTS),
    ),
    "no mean": (TypeError, lambda: fdp.dp_apply(lambda w, x: fdp.pmean(many(lambda: x > 0)), W, numbers(4), SLOTS)),
    "state": (
        ValueError,
        lambda: fdp.functional(torch.nn.Linear(1, 1))[0]((many(lambda: numbers(1)), {}), numbers(4, 1)),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_ten_of_many_leaves_are_named(name: str):
    kind, fail = FAILURES[name]
    with pytest.raises(kind, match=r"[,;] (3,990|7,990) more") as caught:
        fail()
    message = str(caught.value)
    assert len(re.findall(r"leaf\d+", message)) in (10, 20), message  # twice, where it also says what is inside
    assert len(message) < 3000


def test_the_odd_leaf_is_named_first():
    tree = [numbers(7)] * MANY + [numbers(3)] + [numbers(7)] * MANY
    message = (
        r"rows differ: tree\[0\] has 7 along dim 0, tree\[4000\] has 3 along dim 0, tree\[1\] has 7 .*, 7,991 more\."
    )
    with pytest.raises(ValueError, match=message):
        fdp.scatter(tree, SLOTS)


def test_ten_leaves_are_named_in_order():
    tree = [numbers(7)] * 9 + [numbers(3)]
    with pytest.raises(ValueError, match=r"rows differ: tree\[0\] has 7 along dim 0, tree\[1\].*tree\[9\] has 3 along"):
        fdp.scatter(tree, SLOTS)


# ---- dtypes that depend on the rows


def depends(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w * x).mean().to(torch.bfloat16 if len(x) == 2 else torch.float32)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_losses_of_different_dtypes_are_promoted(slots: int, transformed: bool):
    """As under autocast, where the choice of an operation may depend on the shape."""
    w, x = torch.tensor(2.0), torch.arange(3.0)
    with torch.inference_mode(transformed):
        value, grad = fdp.value_and_grad(depends, devices=fdp.virtual_devices(slots))(w, x)
    torch.testing.assert_close((value, grad), (torch.tensor(2.0), torch.tensor(1.0)), rtol=1e-2, atol=0)


def test_outputs_of_different_dtypes_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"has dtypes that differ, torch.bfloat16 in shard 0, torch.float32 in shard 1: convert it .*\.float\(\)",
    ):
        fdp.dp_apply(depends, torch.ones(()), torch.ones(3), SLOTS, out_dims="mean")


# ---- no rows


def test_gather_of_no_rows_with_their_weights():
    x = fdp.scatter(torch.zeros(0, 3), SLOTS)
    doubled = fdp.parallel_apply(lambda x: x * 2, x)
    assert isinstance(doubled, fdp.Sharded)
    assert fdp.gather(doubled, 0, weights=x.sizes).shape == (0, 3)
    with pytest.raises(ValueError, match="there are no rows: the mean over zero rows is not defined"):
        fdp.gather(doubled.map(torch.sum), "mean", weights=x.sizes)


# ---- tracing


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_tracing_a_split_is_refused(executor: Any):
    """What it recorded would hold for batches of this size."""
    w, x = numbers(3), numbers(5, 3)
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    message = "torch.jit traces here, and would record how this one batch is split.*map the traced one"
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(lambda w, x: fdp.dp_apply(torch.mul, w, x, SLOTS, executor=executor), (w, x))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(lambda w, x: fdp.grad(lambda w, x: (w * x).mean(), devices=SLOTS)(w, x), (w, x))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(fdp.DataParallel(module, ["cpu", "cpu"], executor=executor), x)
    inner: Any = torch.jit.trace(module, x)
    traced = fdp.DataParallel(inner, ["cpu", "cpu"], executor=executor)
    torch.testing.assert_close(traced(numbers(8, 3)), module(numbers(8, 3)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_on_one_slot():
    traced: Any = torch.jit.trace(lambda w, x: fdp.dp_apply(torch.mul, w, x, "cpu"), (numbers(3), numbers(5, 3)))
    torch.testing.assert_close(traced(numbers(3), numbers(8, 3)), numbers(3) * numbers(8, 3))
