"""L13: the same step gives the same numbers in one process on k slots, and in m processes of k/m slots."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fdp
from fdp.distributed import Mesh
from property_tests.collective_programs import SIZE, Step, execute, loss_of, programs
from property_tests.comparing import assert_same
from property_tests.places import cpu_only
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, agree_on_failure, alone, even, in_process, joined

pytestmark = cpu_only
GLOBAL = (None, "mean", "sum", "max", "min")


# ---- strategies


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Slots and rows of two or four processes: rows as `mesh.local` gives them, all in one process, or any."""
    slots = draw(st.sampled_from([2, 2, 2, 4]).flatmap(lambda n: st.lists(st.integers(1, 2), min_size=n, max_size=n)))
    count = sum(slots)
    rows = draw(st.sampled_from([count, count + 1, count - 1, 2 * count + 1, 1, 0]))
    if draw(st.booleans()):
        return even(slots, rows)
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=len(slots) - 1, max_size=len(slots) - 1)))
    return Layout(tuple(slots), tuple(b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)))


class Case(NamedTuple):
    """A step, in words that can be sent to another process."""

    program: Sequence[Step] = ()
    reduction: str = "mean"
    counts: bool = False
    microbatches: int = 1
    dims: Sequence[Any] = ()
    argnums: Any = 0
    replicated: bool = False
    seed: int | None = None
    executor: Any = "auto"
    transform: str = "value_and_grad"


collectives = st.one_of(st.just([]), programs)
row_dims = st.sampled_from([0, "list"])
vector_dims = st.sampled_from([0, "stack", "list", *GLOBAL])
number_dims = st.sampled_from(["stack", "list", *GLOBAL])
dims = st.tuples(row_dims, vector_dims, number_dims, number_dims)
executors = st.sampled_from(["auto", "sequential", "threads"])
cases = st.builds(
    Case,
    program=collectives,
    reduction=st.sampled_from(["mean", "sum"]),
    counts=st.booleans(),
    microbatches=st.sampled_from([1, 1, 2, 3]),
    dims=dims,
    argnums=st.sampled_from([0, 0, (0,), (0, 1), (1, 0)]),
    replicated=st.booleans(),
    seed=st.sampled_from([None, None, 0, 3]),
    executor=executors,
    transform=st.sampled_from(["value_and_grad", "grad", "grad_and_value"]),
)


# ---- programs


def arguments(seat: Seat) -> tuple[Any, Tensor, Tensor]:
    """Parameters, and the own rows of a batch."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator) * 0.4

    params = {"a": random(SIZE, SIZE), "more": [random(SIZE), random()], "unused": random(2)}
    x, y = random(20, SIZE, SIZE), random(20)
    return params, *seat.own((x, y))


def row_values(p: Any, x: Tensor) -> Tensor:
    return torch.tanh((x * p["a"]).sum((1, 2)) + p["more"][1])  # (rows,)


def exchanged(case: Case, p: Any, x: Tensor) -> Tensor | float:
    """What the collectives of a case come to on this slot."""
    if not case.program:
        return 0.0
    mean = x.sum(0) / max(1, len(x))
    registers = execute(case.program, [p["a"].sin(), mean * p["a"], mean + 0.1 * p["more"][0]])
    return loss_of(registers, fdp.axis_index())


def outputs(case: Case, p: Any, x: Tensor) -> Any:
    """A row a row, a vector a slot, a number, and an integer."""
    rows = row_values(p, x)
    rows = rows * 1 if case.seed is None else rows + torch.rand((), dtype=torch.float64)
    return rows, x.sum((0, 1)) * p["more"][0] + exchanged(case, p, x), rows.sum(), torch.tensor(7)


def sorted_out(out: Any, dims: Sequence[Any]) -> dict[str, Any]:
    """Outputs by what they are compared as."""
    found: dict[str, Any] = {"whole": [], "rows": [], "lists": {}}
    for i, (value, dim) in enumerate(zip(out, dims, strict=False)):
        if dim == "list":
            found["lists"][f"output {i}"] = value
        else:
            found["whole" if dim in GLOBAL and dim != 0 else "rows"].append(value)
    return found


def options(seat: Seat, case: Case) -> dict[str, Any]:
    return seat.on | {"seed": case.seed, "executor": case.executor}


def gradient_step(seat: Seat, case: Case) -> dict[str, Any]:
    params, x, y = arguments(seat)

    def loss(p: Any, x: Tensor, y: Tensor) -> Any:
        losses = (row_values(p, x) - y) ** 2
        counted = losses if not case.counts else losses * (y > 0)
        if case.reduction == "sum":
            value = counted.sum()
        else:
            value = counted.sum() / (len(x) if not case.counts else (y > 0).sum())
        return value + exchanged(case, p, x), outputs(case, p, x)

    counts = case.counts and case.reduction == "mean"
    more = {"count": lambda p, x, y: (y > 0).sum()} if counts else {}
    p: Any = fdp.replicate(params, seat.devices) if case.replicated else params
    transform = getattr(fdp, case.transform)(
        *(loss, case.argnums, True),
        in_dims=(None, 0, 0),
        reduction=case.reduction,
        microbatches=case.microbatches,
        aux_dims=case.dims,
        **options(seat, case),
        **more,
    )
    first, second = transform(p, x, y)
    rest, grads = (first, second) if case.transform == "value_and_grad" else (second, first)
    value, aux = (None, rest) if case.transform == "grad" else rest
    found = sorted_out(aux, case.dims)
    for grad in grads if isinstance(case.argnums, tuple) else (grads,):
        if isinstance(grad, Tensor):
            found["rows"].append(grad)
        else:
            found["whole"].append(grad[0] if isinstance(grad, fdp.Replicated) else grad)
    return found | {"whole": [value, *found["whole"]]}


def mapped_step(seat: Seat, case: Case) -> dict[str, Any]:
    """Outputs under any dims, and gradients in the parameters and the rows that come from outside."""
    params, x, _ = arguments(seat)
    leaves = [params["a"], *params["more"], x]
    for leaf in leaves:
        leaf.requires_grad_()
    out = fdp.dp_apply(lambda p, x: outputs(case, p, x), params, x, out_dims=case.dims, **options(seat, case))
    found = sorted_out(out, case.dims)
    floats = [part for value in out[:3] for part in (value if isinstance(value, list) else [value])]
    total = torch.stack([part.sin().sum() for part in floats] + [0 * leaf.sum() for leaf in leaves]).sum()
    grads = torch.autograd.grad(total, leaves)
    return found | {"whole": [found["whole"], grads[:-1]], "rows": [found["rows"], grads[-1]]}


def loop(seat: Seat, case: Case) -> dict[str, Any]:
    """Two steps with state on the devices; slots without rows take part."""
    params, x, y = arguments(seat)
    held = fdp.replicate(params, seat.devices)
    batch = fdp.scatter((x, y), seat.devices, weights=seat.weights, keep_empty=True)

    def step(p: Any, batch: Any) -> Any:
        def loss(p: Any) -> Tensor:
            return ((row_values(p, batch[0]) - batch[1]) ** 2).sum() + exchanged(case, p, batch[0])

        grads, value = torch.func.grad_and_value(loss)(p)
        grads, value, rows = fdp.psum((grads, value, len(batch[0])))
        noise = 0.0 if case.seed is None else fdp.psum(torch.rand((), dtype=torch.float64))
        p = {name: [v - 0.1 * g for v, g in zip(value, grads[name], strict=True)] for name, value in p.items()}
        return p | {"a": torch.stack(p["a"]), "unused": torch.stack(p["unused"])}, value / (1 + rows) + noise

    values = []
    for _ in range(2):
        held, value = fdp.parallel_apply(step, held, batch, seed=case.seed, executor=case.executor)
        values.append(fdp.gather(value, "max"))
    back = fdp.gather(batch)
    lists = {"sizes": list(batch.sizes or ())}
    return {"whole": (fdp.gather(held, None), values, fdp.gather(batch, across=True)), "rows": back, "lists": lists}


def check(pools: dict[int, Pool], layout: Layout, program: Any, case: Case) -> None:
    error = agree_on_failure(pools[len(layout.slots)], layout, program, case)
    event("fails" if error else "works")


# ---- the law


@given(layouts(), cases)
def test_l13_gradients(pools: dict[int, Pool], layout: Layout, case: Case):
    check(pools, layout, gradient_step, case)


@given(layouts(), cases)
def test_l13_mapped(pools: dict[int, Pool], layout: Layout, case: Case):
    check(pools, layout, mapped_step, case)


@given(layouts(), cases)
@settings(max_examples=settings.default.max_examples // 2 if settings.default else 20)
def test_l13_state_on_devices(pools: dict[int, Pool], layout: Layout, case: Case):
    check(pools, layout, loop, case)


@given(layouts(), cases)
@settings(max_examples=settings.default.max_examples // 2 if settings.default else 20)
def test_l13_one_device(pools: dict[int, Pool], layout: Layout, case: Case):
    """Without collectives and what is a slot's own, the numbers are those of one device."""
    if not any(layout.rows):
        return
    case = case._replace(program=(), dims=(0, "sum", "sum", "max"), seed=None)
    same = {gradient_step: case._replace(microbatches=1, dims=(0, *["list"] * 3)), mapped_step: case}
    for program, own in same.items():
        if program is mapped_step and 0 in layout.rows:
            continue  # gradients around a call need rows in every process
        try:
            whole = alone(program, Layout((1,), (sum(layout.rows),)), own)
        except ValueError as error:
            assert "count is zero on all shards" in str(error)  # noqa: PT017
            continue
        found = joined(pools[len(layout.slots)](in_process, layout.slots, program, layout, own))
        found["lists"] = whole["lists"]
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


# ---- mesh.local, for which no processes are needed


def seats(slots: Sequence[int]) -> list[Mesh]:
    """The mesh as each process has it."""
    found = []
    for rank, count in enumerate(slots):
        mesh = Mesh(tuple([torch.device("cpu")] * count), None, owns_group=False)
        mesh.rank, mesh.slots = rank, tuple(slots)
        found.append(mesh)
    return found


shares = st.one_of(st.integers(0, 4), st.floats(0, 3, allow_subnormal=False), st.sampled_from([1 / 3, 1e300, 1e-300]))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 20), st.data())
def test_l13_local_rows_are_those_of_the_plan(slots: list[int], rows: int, data: st.DataObject):
    count = sum(slots)
    numbers = st.lists(shares, min_size=count, max_size=count).filter(lambda numbers: sum(numbers) > 0)
    weights = data.draw(st.one_of(st.none(), numbers))
    batch = {"x": torch.arange(rows), "turned": torch.arange(2 * rows).reshape(2, rows), "names": list(range(rows))}
    in_dims = {"x": 0, "turned": -1, "names": "items"}
    everything = fdp.scatter(batch, fdp.virtual_devices(count), in_dims, weights=weights, keep_empty=True)
    found = []
    for first, mesh in zip([0, *accumulate(slots)], seats(slots), strict=False):
        own = slice(first, first + len(mesh))
        local = mesh.local(batch, in_dims, weights=weights)
        part = None if weights is None or sum(weights[own]) == 0 else weights[own]
        shards = fdp.scatter(local, mesh.devices, in_dims, weights=part, keep_empty=True)
        found.append(local)
        planned = (everything.sizes or ())[own]
        assert sum(shards.sizes or ()) == sum(planned)
        if weights is None:  # with them a process rounds anew
            assert shards.sizes == planned
    assert_same(torch.cat([local["x"] for local in found]), batch["x"])
    assert_same(torch.cat([local["turned"] for local in found], 1), batch["turned"])
    assert [name for local in found for name in local["names"]] == batch["names"]
