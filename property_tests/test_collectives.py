"""Random programs of collectives: what one process computes that simulates all slots, or an error, and never a hang."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import fdp
from property_tests.collective_programs import (
    COLLECTIVES,
    Fault,
    OddError,
    Step,
    arguments,
    beginning,
    execute,
    loss_of,
    programs,
    simulate,
    steps,
)
from property_tests.places import spread
from tests.common.threads import within


def oracle(program: Sequence[Step], n: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The losses of all slots, and the gradients of their sum in `w` of each slot, in `w` and in `x`."""
    w, x = arguments(n, attached=True)
    ws = [w * 1 for _ in range(n)]
    columns = [list(column) for column in zip(*map(beginning, ws, x), strict=True)]
    losses = [loss_of(row, i) for i, row in enumerate(zip(*simulate(program, columns), strict=True))]
    total = torch.stack(losses).sum() + 0 * (w.sum() + x.sum())
    *each, whole, rows = torch.autograd.grad(total, [*ws, w, x], allow_unused=True)
    each = [torch.zeros_like(w) if grad is None else grad for grad in each]
    assert whole is not None
    assert rows is not None
    return [loss.detach() for loss in losses], torch.stack(each), whole, rows


def outside(program: Sequence[Step], n: int, fault: Fault | None, executor: Any) -> Any:
    """The losses, and gradients that come from outside."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return loss_of(execute(program, beginning(w, x[0]), fault), fdp.axis_index())

    w, x = arguments(n, attached=True)
    losses = fdp.dp_apply(fn, w, x, spread(n), out_dims="list", executor=executor)
    total = torch.stack([loss.cpu() for loss in losses]).sum() + 0 * (w.sum() + x.sum())
    return [loss.detach() for loss in losses], *torch.autograd.grad(total, (w, x))


def inside(program: Sequence[Step], n: int, fault: Fault | None, executor: Any, functional: bool) -> Any:
    """The losses, and the gradient of each slot in its own `w`."""

    def fn(w: Tensor, x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            return loss_of(execute(program, beginning(w, x[0]), fault), fdp.axis_index())

        if functional:
            grad, value = torch.func.grad_and_value(loss)(w)
            return [value, grad]
        return [*fdp.value_and_grad(loss, reduction="sum", axis_name="inner")(w)]

    w, x = arguments(n, attached=False)
    losses, grads = fdp.dp_apply(fn, w, x, spread(n), out_dims="stack", executor=executor)
    return list(losses), grads


def value_and_grad(program: Sequence[Step], n: int, executor: Any) -> Any:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return loss_of(execute(program, beginning(w, x[0])), fdp.axis_index())

    w, x = arguments(n, attached=False)
    return fdp.value_and_grad(fn, devices=spread(n), reduction="sum", executor=executor)(w, x)


def transformed(program: Sequence[Step], n: int) -> Any:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return loss_of(execute(program, beginning(w, x[0])), fdp.axis_index())

    w, x = arguments(n, attached=False)

    def total(w: Tensor, x: Tensor) -> Tensor:
        return fdp.dp_apply(fn, w, x, spread(n), out_dims="stack").sum()

    return torch.func.grad_and_value(total, argnums=(0, 1))(w, x)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(tree_map(Tensor.cpu, found), tree_map(Tensor.cpu, expected), rtol=1e-8, atol=1e-9)


slot_counts = st.integers(1, 5)
executors = st.sampled_from(["sequential", "threads"])


@given(programs, slot_counts, executors)
def test_l5_differentiated_outside(program: list[Step], n: int, executor: str):
    losses, _, whole, rows = oracle(program, n)
    found = within(30, lambda: outside(program, n, None, executor))
    close(found, (losses, whole, rows))


@given(programs, slot_counts, executors, st.booleans())
def test_l5_differentiated_inside(program: list[Step], n: int, executor: str, functional: bool):
    losses, each, _, _ = oracle(program, n)
    found = within(30, lambda: inside(program, n, None, executor, functional))
    close(found, (losses, each))


@given(programs, slot_counts, executors)
def test_l6_value_and_grad(program: list[Step], n: int, executor: str):
    losses, _, whole, _ = oracle(program, n)
    close(within(30, lambda: value_and_grad(program, n, executor)), (torch.stack(losses).sum(), whole))


@given(programs, slot_counts)
def test_l9_transformed_outside(program: list[Step], n: int):
    losses, _, whole, rows = oracle(program, n)
    grads, value = within(30, lambda: transformed(program, n))
    close((grads, value), ((whole, rows), torch.stack(losses).sum()))


@given(programs, st.integers(2, 5))
def test_l8_executors_agree(program: list[Step], n: int):
    """Values bit by bit, and repeats of gradients; those of both are added up in another order."""
    runs = {
        executor: [within(30, lambda how=executor: outside(program, n, None, how)) for _ in range(2)]
        for executor in ("sequential", "threads")
    }
    for first, second in runs.values():
        torch.testing.assert_close(second, first, rtol=0, atol=0)
    one, other = (first for first, _ in runs.values())
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    close(one, other)


@given(programs, st.integers(2, 5), executors, st.sampled_from(["outside", "inside", "func"]), st.data())
def test_l12_a_fault_is_an_error_or_makes_no_difference(
    program: list[Step], n: int, executor: str, how: str, data: st.DataObject
):
    fault = data.draw(
        st.builds(
            Fault,
            st.integers(0, n - 1),
            st.integers(0, len(program) - 1),
            st.sampled_from(["raise", "return", "skip", "replace"]),
            steps,
        )
    )

    def run(fault: Fault | None) -> Any:
        if how == "outside":
            return outside(program, n, fault, executor)
        return inside(program, n, fault, executor, how == "func")

    try:
        within(30, lambda: run(fault))
    except OddError:
        assert fault.kind == "raise"
    except (RuntimeError, ValueError) as error:
        expected = ("shards call different", "waits for shard", "do not fit", "is called in some shards")
        if fault.kind == "raise" or not any(text in str(error) for text in expected):
            raise
    else:
        left_out = {"skip": program[fault.at : fault.at + 1], "return": program[fault.at :]}.get(fault.kind, [])
        assert fault.kind != "raise"
        assert not any(step.name in COLLECTIVES for step in left_out)
    losses, each, whole, rows = oracle(program, n)
    close(within(30, lambda: run(None)), (losses, whole, rows) if how == "outside" else (losses, each))
