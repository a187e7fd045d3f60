"""Random programs of collectives of which only some slots, results or inputs have a gradient: as in one graph.

What has none is left out, and not multiplied by zero: 0 times infinity is NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import fdp
from property_tests.collective_programs import (
    REGISTERS,
    Step,
    arguments,
    beginning,
    execute,
    loss_of,
    partial_programs,
    root_of_zero,
    simulate,
)
from property_tests.places import spread
from tests.common.threads import within

Rows = Sequence[Sequence[Tensor]]
Call = Callable[[Tensor, Tensor], Rows]
"""Of `w` and `x` the registers of all slots at the end."""

Value = Callable[[Tensor, Tensor], Tensor]


def here(program: Sequence[Step], n: int, executor: Any, is_in_parts: bool) -> Call:
    """On slots; beside the registers come roots that nobody uses."""

    def fn(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        registers = execute(program, beginning(w, x[0]))
        return *registers, fdp.psum(root_of_zero(w)), root_of_zero(registers[0])

    def call(w: Tensor, x: Tensor) -> Rows:
        outs = fdp.dp_apply(fn, w, x, spread(n), out_dims="list", executor=executor)
        return [[x.to(w.device) for x in row] for row in zip(*outs[:REGISTERS], strict=True)]

    def by_parts(w: Tensor, x: Tensor) -> Rows:
        shards = fdp.scatter(x, spread(n))
        outs: Any = fdp.parallel_apply(fn, w, shards, executor=executor)
        columns = (fdp.gather(out, "stack", device=w.device).unbind() for out in outs[:REGISTERS])
        return list(zip(*columns, strict=True))

    return by_parts if is_in_parts else call


def simulated(program: Sequence[Step], n: int) -> Call:
    def call(w: Tensor, x: Tensor) -> Rows:
        columns = [list(column) for column in zip(*[beginning(w, row) for row in x.unbind()], strict=True)]
        return list(zip(*simulate(program, columns), strict=True))

    return call


def value_of(call: Call, used: Sequence[tuple[int, int]]) -> Value:
    """The sum over some registers of some slots, each in a way of its own."""

    def value(w: Tensor, x: Tensor) -> Tensor:
        rows = call(w, x)
        parts = [(rows[i % len(rows)][k].sin() * (i + 1 + k)).sum() for i, k in used]
        return torch.stack(parts).sum()

    return value


# ---- ways to differentiate


def by_grad(value: Value, w: Tensor, x: Tensor) -> Any:
    found = value(w, x)
    first = gradients(found, (w, x), retain_graph=True)
    return found, first, gradients(found, (w, x))


def gradients(value: Tensor, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Zeros where nothing depends on an input."""
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True, **options))


def by_backward(value: Value, w: Tensor, x: Tensor) -> Any:
    found = value(w * 1, x * 1)
    if found.requires_grad:
        found.backward()
    return found, [torch.zeros_like(x) if x.grad is None else x.grad for x in (w, x)]


def twice(value: Value, w: Tensor, x: Tensor) -> Any:
    grads = gradients(value(w, x), (w, x), create_graph=True)
    return grads, gradients(torch.stack([grad.sin().sum() for grad in grads]).sum(), (w, x))


def func(value: Value, w: Tensor, x: Tensor) -> Any:
    return torch.func.grad_and_value(value, (0, 1))(w.detach(), x.detach())


def func_twice(value: Value, w: Tensor, x: Tensor) -> Any:
    x = x.detach()
    return torch.func.grad(lambda w: torch.func.grad(value)(w, x).sin().sum())(w.detach())


def vmapped(value: Value, w: Tensor, x: Tensor) -> Any:
    ws, x = torch.stack([w.detach(), w.detach().cos()]), x.detach()
    return torch.func.vmap(lambda w: torch.func.grad(value)(w, x))(ws)


def of_vmapped(value: Value, w: Tensor, x: Tensor) -> Any:
    ws, x = torch.stack([w.detach(), w.detach().cos()]), x.detach()
    return torch.func.grad(lambda ws: torch.func.vmap(lambda w: value(w, x))(ws).sum())(ws)


WAYS = (by_grad, by_backward, twice, func, func_twice, vmapped, of_vmapped)
SEARCH = settings(max_examples=max(48, settings().max_examples))  # steps of many kinds have to come together


class Drawn(NamedTuple):
    program: Sequence[Step]
    n: int
    executor: Any


drawn = st.builds(Drawn, partial_programs, st.sampled_from([2, 3, 4, 1]), st.sampled_from(["sequential", "threads"]))
some = st.lists(st.tuples(st.integers(0, 3), st.integers(0, REGISTERS - 1)), min_size=1, max_size=3)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(tree_map(Tensor.cpu, found), tree_map(Tensor.cpu, expected), rtol=1e-8, atol=1e-9)


@SEARCH
@given(drawn, st.booleans(), some, st.sampled_from(WAYS))
def test_l5_differentiated_in_part(
    drawn: Drawn, is_in_parts: bool, used: Sequence[tuple[int, int]], way: Callable[..., Any]
):
    found, expected = (
        within(30, lambda call=call: way(value_of(call, used), *arguments(drawn.n, attached=True)))
        for call in (here(*drawn, is_in_parts), simulated(drawn.program, drawn.n))
    )
    close(found, expected)


@pytest.mark.filterwarnings("ignore:value_and_grad. all gradients are 0")  # those of slots that count
@SEARCH
@given(drawn, some, st.lists(st.integers(0, 2), min_size=4, max_size=4), st.sampled_from(["func", "twice", "plain"]))
def test_l6_losses_in_part(drawn: Drawn, used: Sequence[tuple[int, int]], counts: Sequence[int], way: str):
    """The loss of a slot is made of some registers, and aux of all. A slot that counts nothing has no slope."""
    program, n, executor = drawn
    counts = [count + (i == n - 1) for i, count in enumerate(counts[:n])]

    def of(registers: Sequence[Tensor], i: int) -> Tensor:
        own = [registers[k] for slot, k in used if slot % n == i]
        return loss_of(own, i) if own else registers[0].new_zeros(())

    def loss(w: Tensor, x: Tensor) -> Any:
        registers, i = execute(program, beginning(w, x[0])), fdp.axis_index()
        root = root_of_zero(w).sum()
        return of(registers, i) + (0 if counts[i] else root), [*registers, fdp.psum(root)]

    def whole(w: Tensor, x: Tensor) -> Tensor:
        rows = simulated(program, n)(w, x)
        return torch.stack([of(row, i) * counts[i] for i, row in enumerate(rows)]).sum() / sum(counts)

    def step(w: Tensor, x: Tensor) -> Any:
        options: Any = {"in_dims": (None, 0), "aux_dims": "list", "devices": spread(n), "executor": executor}
        call = fdp.value_and_grad(loss, (0, 1), True, count=lambda w, x: counts[fdp.axis_index()], **options)
        with torch.inference_mode(way == "func"):
            (value, _), grads = call(w, x)
        return grads, value

    w, x = arguments(n, attached=way == "twice")
    found, value = within(30, lambda: step(w, x))
    expected = gradients(whole(w, x), (w, x), create_graph=True) if way == "twice" else ()
    close((found, value), torch.func.grad_and_value(whole, (0, 1))(w, x))
    if way == "twice":
        outs = (*found, value), (*expected, whole(w, x))
        sums = [torch.stack([out.sin().sum() for out in each]).sum() for each in outs]
        close(*(gradients(each, (w, x)) for each in sums))


def by_vmap(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda w: torch.func.vmap(torch.func.grad(loss))(torch.stack([w, w]))[1]


def by_fdp(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda w: fdp.grad(lambda w, x: loss(w), axis_name="inner")(w, torch.ones(2, device=w.device))


INSIDE = (torch.func.grad, by_vmap, by_fdp)


@SEARCH
@given(drawn, st.sampled_from(INSIDE))
def test_l12_a_gradient_inside_in_part_is_right_or_an_error(drawn: Drawn, inside: Callable[..., Any]):
    """There slots meet in the backward themselves, and one whose loss does not lead there does not come."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return inside(lambda w: loss_of(execute(drawn.program, beginning(w, x[0])), fdp.axis_index("data")))(w)

    w, x = arguments(drawn.n, attached=False)
    try:
        grads = within(30, lambda: fdp.dp_apply(fn, w, x, spread(drawn.n), out_dims="stack", executor=drawn.executor))
    except (RuntimeError, ValueError) as error:
        expected = "This is in a gradient", "call different collectives: the gradient of", "shards do not fit together"
        if any(text in str(error) for text in expected):
            return
        raise

    def whole(ws: Tensor) -> Tensor:
        columns = [list(column) for column in zip(*map(beginning, ws, x), strict=True)]
        rows = zip(*simulate(drawn.program, columns), strict=True)
        return torch.stack([loss_of(row, i) for i, row in enumerate(rows)]).sum()

    close(grads, torch.func.grad(whole)(torch.stack([w] * drawn.n)))
