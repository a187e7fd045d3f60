"""Random programs of collectives over some registers, and one process that simulates all slots."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import fdp
from tests.collectives.cases import Columns, exchanged, permuted, total, weighted

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


class Root(torch.autograd.Function):
    """A function with an infinite slope at 0: if its backward is visited, even with zeros, it gives NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (2 * ctx.saved_tensors[0])


def root_of_zero(x: Tensor) -> Tensor:
    return Root.apply(x - x.detach())


BY_SLOT: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "detach-in-some": lambda x, y, k, i: x.detach() * 1 if (i + k) % 2 else x,
    "drop-in-some": lambda x, y, k, i: x if (i + k) % 2 else y,
    "constant-in-some": lambda x, y, k, i: torch.ones_like(x.detach()) if (i + k) % 3 == 0 else y.cos(),
}
"""What each slot does by itself, by its number: only some of them have a gradient afterwards."""


def recorded_by_some(x: Tensor, y: Tensor, k: int) -> Tensor:
    with torch.set_grad_enabled((fdp.axis_index() + k) % 2 == 0):
        return fdp.psum(x)


def recorded(xs: Columns, ys: Columns, k: int) -> list[Tensor]:
    """For the others the sum is a constant, and they are one in it."""
    are = [(i + k) % 2 == 0 for i in range(len(xs))]
    whole = total([x if is_recorded else x.detach() for x, is_recorded in zip(xs, are, strict=True)])
    return [whole if is_recorded else whole.detach() for is_recorded in are]


IN_PART: dict[str, Collective] = {
    "psum-recorded-by-some": Collective(recorded_by_some, recorded),
    "psum-beside-a-root": Collective(
        lambda x, y, k: fdp.psum((x, (y - y.detach()).sqrt(), y))[0], lambda xs, ys, k: [total(xs)] * len(xs)
    ),
    "pmax-that-is-dropped": Collective(
        lambda x, y, k: (fdp.pmax(x), y.cos())[1], lambda xs, ys, k: [y.cos() for y in ys]
    ),
    "psum-that-is-dropped": Collective(
        lambda x, y, k: (fdp.psum(root_of_zero(x)), y.sin())[1], lambda xs, ys, k: [y.sin() for y in ys]
    ),
}
"""Collectives of which some results, or those of some slots, have no part in a gradient."""

small = st.integers(0, REGISTERS - 1)


def steps_of(names: Sequence[str]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.sampled_from(names), small, small, small, st.integers(0, 3))


steps = steps_of([*ELEMENTWISE, *COLLECTIVES, *COLLECTIVES])
programs = st.lists(steps, min_size=1, max_size=8)
partial_programs = st.lists(
    steps_of([*IN_PART] * 3 + [*BY_SLOT] * 2 + [*ELEMENTWISE, *COLLECTIVES]), min_size=3, max_size=8
)


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
        elif step.name in BY_SLOT:
            registers[step.target] = BY_SLOT[step.name](x, y, step.number, fdp.axis_index())
        else:
            found = (COLLECTIVES | IN_PART)[step.name].here(x, y, step.number)
            registers[step.target] = found.tanh()  # sums of sums grow
    return registers


def simulate(program: Sequence[Step], columns: list[list[Tensor]]) -> list[list[Tensor]]:
    """Run it on all slots at once: `columns` has a list with one tensor per slot for each register."""
    for name, target, source, other, number in program:
        xs, ys = columns[source], columns[other]
        if name in ELEMENTWISE:
            columns[target] = [ELEMENTWISE[name](x, y, number) for x, y in zip(xs, ys, strict=True)]
        elif name in BY_SLOT:
            columns[target] = [BY_SLOT[name](x, y, number, i) for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
        else:
            columns[target] = [x.tanh() for x in (COLLECTIVES | IN_PART)[name].simulated(xs, ys, number)]
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
