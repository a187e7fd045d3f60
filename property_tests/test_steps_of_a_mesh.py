"""L13 and L12 from step to step: a mesh gives the numbers of one device, and names who fails."""

from typing import Any, NamedTuple

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

import fdp
from property_tests.places import cpu_only
from tests.common.comparing import assert_close_tree
from tests.distributed.pool import Pool

pytestmark = cpu_only


class Step(NamedTuple):
    """The rows of each process, and the one that fails, if there is one, and where."""

    rows: tuple[int, ...]
    failing: int | None
    where: str


class Case(NamedTuple):
    """Leaves of parameters, options, and steps."""

    leaves: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    reduction: Any
    has_aux: bool
    microbatches: int
    slots: tuple[int, ...]
    steps: tuple[Step, ...]


dtypes = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.complex128])
shapes = st.sampled_from([(), (3,), (2, 2), (0,), (1, 5), (70_000,)])
trees = st.dictionaries(st.sampled_from("abcde"), st.tuples(dtypes, shapes), min_size=1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.sampled_from([2, 2, 2, 4]))
    usual = tuple(draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    odd = st.tuples(*[st.integers(0, 4)] * count).filter(any)
    rows = st.sampled_from([usual, usual, usual, draw(odd)])
    failing = st.one_of(st.none(), st.none(), st.integers(0, count - 1))
    wheres = st.sampled_from(["forward", "backward", "forward", "before"])
    steps = draw(st.lists(st.builds(Step, rows, failing, wheres), min_size=3, max_size=7))
    return Case(
        draw(trees),
        draw(st.sampled_from(["mean", "sum"])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
        tuple(draw(st.lists(st.integers(1, 2), min_size=count, max_size=count))),
        tuple(steps),
    )


def parameters(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
        for name, (dtype, shape) in case.leaves.items()
    }
    return {name: x.to(case.leaves[name][0]) for name, x in random.items()}


def row_values(p: dict[str, Tensor], x: Tensor) -> Tensor:
    wide = [leaf.abs().to(torch.float64).square().sum() for leaf in p.values()]
    return x[:, 0] * torch.stack(wide).sum() + x[:, 1]


def batch(count: int) -> Tensor:
    return torch.arange(2.0 * count, dtype=torch.float64).reshape(count, 2).cos()


def in_process(mesh: Any, case: Case) -> list[Any]:
    """What each step has come to: numbers, or the text of an error."""
    now: list[Any] = [None]

    def loss(p: dict[str, Tensor], x: Tensor) -> Any:
        step = now[0]
        fails = step.failing == mesh.rank
        if fails and step.where == "forward":
            raise KeyError("odd")
        if fails and step.where == "backward":
            x = x.clone().requires_grad_()
            x.register_hook(lambda grad: {}["odd"])
        values = row_values(p, x)
        value = values.mean() if case.reduction == "mean" else values.sum()
        return (value, {"first": x[:, 0].mean().detach()}) if case.has_aux else value

    options: Any = {"reduction": case.reduction, "microbatches": case.microbatches, "devices": mesh}
    fn = fdp.value_and_grad(loss, has_aux=case.has_aux, **options)
    found: list[Any] = []
    for now[0] in case.steps:
        step = now[0]
        first = sum(step.rows[: mesh.rank])
        x = batch(sum(step.rows))[first : first + step.rows[mesh.rank]]
        is_early = step.failing == mesh.rank and (step.where == "before" or not len(x))
        try:
            found.append((fdp.value_and_grad(loss, 7, **options) if is_early else fn)(parameters(case), x))
        except (RuntimeError, KeyError, ValueError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def of_one_device(case: Case, step: Step) -> Any:
    def loss(p: dict[str, Tensor]) -> Tensor:
        values = row_values(p, x)
        return values.mean() if case.reduction == "mean" else values.sum()

    x = batch(sum(step.rows))
    leaves = {name: leaf.requires_grad_() for name, leaf in parameters(case).items()}
    value = loss(leaves)
    grads = torch.autograd.grad(value, list(leaves.values()))
    value, found = value.detach(), dict(zip(leaves, grads, strict=True))
    return ((value, {"first": x[:, 0].mean()}) if case.has_aux else value), found


@given(cases())
def test_steps_of_a_mesh(pools: dict[int, Pool], case: Case):
    each = pools[len(case.slots)](in_process, case.slots, case)
    for i, step in enumerate(case.steps):
        event("works" if step.failing is None else f"fails {step.where}")
        for rank, found in enumerate(each):
            if step.failing is None:
                assert not isinstance(found[i], str), found[i]
                half = torch.bfloat16 in [dtype for dtype, _ in case.leaves.values()]
                single = torch.float32 in [dtype for dtype, _ in case.leaves.values()]
                assert_close_tree(found[i], of_one_device(case, step), rtol=2e-2 if half else 1e-4 if single else 1e-9)
                continue
            assert isinstance(found[i], str), found[i]
            assert "could not reach" not in found[i], found[i]
            assert rank == step.failing or f"process {step.failing} has raised" in found[i], found[i]
