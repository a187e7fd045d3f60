"""Random programs of collectives: what one process computes that simulates all slots, or an error, and never a hang."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import fdp
from property_tests.places import spread
from tests.collectives.cases import Columns, exchanged, permuted, total, weighted
from tests.common.threads import within

REGISTERS = 3
SIZE = 4  # of the square matrices that the registers hold


class Step(NamedTuple):
    """`target = name(source, other)`, with a small number that some steps have a use for."""

    name: str
    target: int
    source: int
    other: int
    number: int


class Fault(NamedTuple):
    """One slot skips a step, does another instead, or raises in front of it."""

    slot: int
    at: int
    kind: str
    instead: Step


class OddError(Exception):
    """That of the program."""


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda x, y, k: (x + y) / 2,
    "multiply": lambda x, y, k: x.tanh() * y,
    "sin": lambda x, y, k: x.sin(),
    "scale": lambda x, y, k: x * (k + 1) / 3,
    "matmul": lambda x, y, k: x @ y / SIZE,
    "detach": lambda x, y, k: x.detach() * 1,
}


def pairs_of(k: int, n: int) -> list[tuple[int, int]]:
    """Some permutations, whole and partial."""
    return [(i, (i + k) % n) for i in range(n) if k != 3 or i != 1]


def folded(x: Tensor) -> Tensor:
    """Back to the size of a register, whatever has been gathered or exchanged."""
    return x.sum() * torch.eye(SIZE, dtype=x.dtype, device=x.device) / 10 + x.flatten()[:1] * 0.1


def scattered(xs: Columns, dim: int) -> Sequence[Tensor]:
    return total(xs).tensor_split(len(xs), dim)


class Collective(NamedTuple):
    here: Callable[[Tensor, Tensor, int], Tensor]
    simulated: Callable[[Columns, Columns, int], Sequence[Tensor]]


COLLECTIVES: dict[str, Collective] = {
    "psum": Collective(lambda x, y, k: fdp.psum(x), lambda xs, ys, k: [total(xs)] * len(xs)),
    "psum-tree": Collective(
        lambda x, y, k: (lambda out: out["a"] + out["b"][0] * out["c"])(fdp.psum({"a": x, "b": [y], "c": k})),
        lambda xs, ys, k: [total(xs) + total(ys) * k * len(xs)] * len(xs),
    ),
    "pmean": Collective(lambda x, y, k: fdp.pmean(x), lambda xs, ys, k: weighted([1] * len(xs), xs)),
    "pmean-weighted": Collective(
        lambda x, y, k: fdp.pmean(x, weight=fdp.axis_index() + k + 1),
        lambda xs, ys, k: weighted([i + k + 1 for i in range(len(xs))], xs),
    ),
    "pmax-detached": Collective(
        lambda x, y, k: fdp.pmax(x.detach()),
        lambda xs, ys, k: [torch.stack([x.detach() for x in xs]).amax(0)] * len(xs),
    ),
    "all_gather": Collective(
        lambda x, y, k: folded(fdp.all_gather(x[: 1 + (fdp.axis_index() + k) % SIZE])),
        lambda xs, ys, k: [folded(torch.cat([x[: 1 + (i + k) % SIZE] for i, x in enumerate(xs)]))] * len(xs),
    ),
    "all_gather-stack": Collective(
        lambda x, y, k: folded(fdp.all_gather(x, dim=-1, stack=True).exp()),
        lambda xs, ys, k: [folded(torch.stack(list(xs), -1).exp())] * len(xs),
    ),
    "psum_scatter": Collective(
        lambda x, y, k: fdp.psum_scatter(x @ y, dim=k % 2).sum() * x / 10,
        lambda xs, ys, k: [
            part.sum() * x / 10
            for part, x in zip(scattered([x @ y for x, y in zip(xs, ys, strict=True)], k % 2), xs, strict=True)
        ],
    ),
    "all_to_all": Collective(
        lambda x, y, k: fdp.all_to_all(x, split_dim=k % 2, concat_dim=1 - k % 2).cos().sum() * y,
        lambda xs, ys, k: [part.cos().sum() * y for part, y in zip(exchanged(xs, k % 2, 1 - k % 2), ys, strict=True)],
    ),
    "ppermute": Collective(
        lambda x, y, k: fdp.ppermute(x, pairs_of(k, fdp.axis_size())),
        lambda xs, ys, k: permuted(xs, pairs_of(k, len(xs))),
    ),
}
small = st.integers(0, REGISTERS - 1)
steps = st.builds(
    Step, st.sampled_from([*ELEMENTWISE, *COLLECTIVES, *COLLECTIVES]), small, small, small, st.integers(0, 3)
)

programs = st.lists(steps, min_size=1, max_size=8)


def execute(program: Sequence[Step], registers: list[Tensor], fault: Fault | None = None) -> list[Tensor]:
    """Run a program on a slot."""
    for at, planned in enumerate(program):
        step = planned
        if fault is not None and at == fault.at and fdp.axis_index() == fault.slot:
            if fault.kind == "raise":
                raise OddError(at)
            if fault.kind == "return":
                return registers
            if fault.kind == "skip":
                continue
            step = fault.instead
        x, y = registers[step.source], registers[step.other]
        if step.name in ELEMENTWISE:
            registers[step.target] = ELEMENTWISE[step.name](x, y, step.number)
        else:
            registers[step.target] = COLLECTIVES[step.name].here(x, y, step.number).tanh()  # sums of sums grow
    return registers


def simulate(program: Sequence[Step], columns: list[list[Tensor]]) -> list[list[Tensor]]:
    """Run it on all slots at once: `columns` has a list with one tensor per slot for each register."""
    for name, target, source, other, number in program:
        xs, ys = columns[source], columns[other]
        if name in ELEMENTWISE:
            columns[target] = [ELEMENTWISE[name](x, y, number) for x, y in zip(xs, ys, strict=True)]
        else:
            columns[target] = [x.tanh() for x in COLLECTIVES[name].simulated(xs, ys, number)]
    return columns


def beginning(w: Tensor, x: Tensor) -> list[Tensor]:
    """The registers of a slot, from a parameter and its row."""
    return [w.sin(), x * w, x + 0.1 * w.cos()]


def arguments(n: int, attached: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    w = torch.randn(SIZE, SIZE, dtype=torch.float64) * 0.3
    x = torch.randn(n, SIZE, SIZE, dtype=torch.float64) * 0.3
    return w.requires_grad_(attached), x.requires_grad_(attached)


def loss_of(registers: Sequence[Tensor], i: int) -> Tensor:
    """The loss of a slot, different for each, and with a part in everything."""
    return torch.stack([(r.sin() * (i + 1 + k)).sum() for k, r in enumerate(registers)]).sum()


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
