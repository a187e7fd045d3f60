"""A mesh goes wherever devices go: k slots in each of m processes equal k x m slots in one."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common import depth
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import many_cores
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, even, same_at_all_scales

LAYOUTS = [
    Layout((1, 1), (4, 3)),
    Layout((2, 2), (4, 3)),
    Layout((1, 3), (3, 4)),
    Layout((3, 1), (1, 6)),
    Layout((2, 1), (5, 0)),  # no rows in a process
    Layout((1, 2), (0, 5)),
    Layout((2, 2), (1, 0)),
]
FEW = LAYOUTS[1], LAYOUTS[4], LAYOUTS[5]
NOTHING = Layout((2, 1), (0, 0))


def says(layout: Any) -> str | None:
    if not isinstance(layout, Layout):
        return None
    return " ".join(f"{slots}x{rows}" for slots, rows in zip(layout.slots, layout.rows, strict=True))


everywhere = pytest.mark.parametrize("layout", LAYOUTS, ids=says)
with_nothing = pytest.mark.parametrize("layout", [*LAYOUTS, NOTHING], ids=says)
in_few = pytest.mark.parametrize("layout", FEW, ids=says)


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    return numbers(rows, 3), torch.cos(numbers(rows))


def params() -> dict[str, Tensor]:
    return {"w": numbers(3) + 1, "b": numbers(), "unused": numbers(2)}


def predict(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def row_losses(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (predict(p, x) - y) ** 2


def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return row_losses(p, x, y).mean()


# ---- dp_apply and shard_map


class Both(NamedTuple):
    value: Any
    more: Any


def of_rows(p: Any, x: Tensor, names: Sequence[str]) -> Any:
    out = predict(p, x)
    rows = {"first": out, "turned": x.mT, "complex": torch.complex(out, -out), "small": out.half()}
    tops = Both(torch.cat([x, x.new_full((1, 3), -9.0)]).amax(0), (x > 0).all())
    reduced = {"sum": x.sum(0), "half": torch.full((2,), len(x)).half(), "count": len(x) * torch.ones(2)}
    return Both(rows, "text"), reduced, [tops, out.sum(), torch.tensor(7), 3.5, None, list(names)]


REDUCED = {"sum": "sum", "half": "sum", "count": "max"}
OUT_DIMS = ({"turned": 1, "first": 0, "complex": 0, "small": 0}, 0), REDUCED, ["max", None, "mean", None, None, "items"]


def applied(seat: Seat, how: str) -> Any:
    x, _ = batch()
    x, names = seat.own((x, [f"row {i}" for i in range(7)]))
    if how == "shard_map":
        fn = fdp.shard_map(of_rows, in_dims=(None, 0), kwarg_dims="items", out_dims=OUT_DIMS, **seat.on)
        (rows, text), reduced, rest = fn(params(), x, names=names)
    else:
        options: dict[str, Any] = {"in_dims": (0, "items"), "out_dims": OUT_DIMS}
        (rows, text), reduced, rest = fdp.dp_apply(of_rows, params(), (x, names), **seat.on, **options)
    rows["turned"] = rows["turned"].mT
    return {"whole": (text, reduced, rest[:5]), "rows": rows, "lists": {"names": rest[5]}}


@depth.few()
@pytest.mark.parametrize("how", ["dp_apply", "shard_map"])
@with_nothing
def test_outputs_under_every_dim(two: Pool, layout: Layout, how: str):
    found = same_at_all_scales(two, layout, applied, how)
    assert_close_tree(found["rows"]["first"], predict(params(), batch()[0])[: sum(layout.rows)])
    assert found["whole"][0] == "text"


def means(seat: Seat) -> Any:
    x, y = seat.own(batch())

    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        value = loss(p, x, y)
        return (
            {"mean": value, "min": x.amin(0), "bool": torch.tensor(True), "sum": len(x) * torch.ones(1)},
            value,
            value,
        )

    dims = {"mean": "mean", "min": "min", "bool": "mean", "sum": "sum"}, "stack", "list"
    whole, stack, each = fdp.dp_apply(fn, params(), (x, y), out_dims=dims, **seat.on)
    return {"whole": whole, "rows": stack, "lists": {"each": each}}


@everywhere
def test_means_stacks_and_lists(two: Pool, layout: Layout):
    x, y = batch()
    rows = sum(layout.rows)
    found = same_at_all_scales(two, layout, means)
    assert_close_tree(found["whole"]["mean"], loss(params(), x[:rows], y[:rows]))
    assert len(found["rows"]) == len(found["lists"]["each"]) == sum(size > 0 for size in layout.sizes)


def not_split(seat: Seat) -> Any:
    def fn(p: Tensor) -> Any:
        return p * 2, fdp.axis_size() + 10 * fdp.axis_index()

    mapped = fdp.shard_map(fn, in_dims=None, out_dims=None, devices=seat.devices)
    rows, slots = fdp.dp_apply(fn, numbers(2), (), seat.devices, out_dims=(0, None))
    return {"whole": (mapped(numbers(2)), slots), "rows": rows}


def test_nothing_to_split_runs_once(two: Pool):
    same_at_all_scales(two, NOTHING, not_split)


def side_by_side(seat: Seat, executor: Any, microbatches: int, outside: bool) -> Any:
    p = {name: tensor.requires_grad_(outside) for name, tensor in params().items()}

    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        return loss(p, x, y), predict(p, x).sum()

    options: dict[str, Any] = {"executor": executor, "microbatches": microbatches, "has_aux": True, "aux_dims": "sum"}
    x, y = seat.own(batch())
    with many_cores():
        step = fdp.value_and_grad(fn, **options, **seat.on)
        found = [step(p, x, y) for _ in range(10)]
        mapped = fdp.dp_apply(fn, p, (x, y), out_dims=("mean", "sum"), executor=executor, **seat.on)
    for again in found[1:]:
        assert_same_tree(again, found[0])
    return {"whole": (found[0], mapped)}


@depth.few(2)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("executor", ["auto", "threads"])
@in_few
def test_shards_side_by_side(two: Pool, layout: Layout, executor: str, microbatches: int, outside: bool):
    """All of them ask at once how many rows the others have."""
    found = same_at_all_scales(two, layout, side_by_side, executor, microbatches, outside, needs_rows=outside)
    if found is None:
        return
    x, y = batch()
    rows = sum(layout.rows)
    p = params()
    grads, value = torch.func.grad_and_value(loss)(p, x[:rows], y[:rows])
    assert_close_tree(found["whole"][0], ((value, predict(p, x[:rows]).sum()), grads))


@pytest.mark.parametrize("rows", [7, 1, 0])
@pytest.mark.parametrize("slots", [(1, 1), (2, 2), (1, 3)], ids=str)
def test_local_rows_are_those_of_the_plan(two: Pool, slots: Any, rows: int):
    tree = {"x": batch(rows)[0], "turned": batch(rows)[0].mT, "names": list(range(rows)), "whole": numbers(2), "n": 3}
    dims = {"x": 0, "turned": -1, "names": "items", "whole": None, "n": 0}
    found = two(local, slots, tree, dims, None)
    layout = even(slots, rows)
    starts = [0, *accumulate(layout.rows)]
    for part, a, b in zip(found, starts, starts[1:], strict=False):
        expected = {"x": tree["x"][a:b], "turned": tree["turned"][:, a:b], "names": tree["names"][a:b]}
        assert_same_tree(part, tree | expected)


def local(mesh: Any, tree: Any, dims: Any, weights: Any) -> Any:
    return mesh.local(tree, dims, weights=weights)


# ---- gradients


def counted(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mean over the rows that are not masked."""
    mask = y > 0
    return (row_losses(p, x, y) * mask).sum() / mask.sum()


def count(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (y > 0).sum()


def few(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mean over rows that only one process has."""
    mask = y > 0.9
    return (row_losses(p, x, y) * mask).sum() / mask.sum()


def count_few(p: Any, x: Tensor, y: Tensor) -> float:
    return float((y > 0.9).sum())


def with_aux(p: Any, x: Tensor, y: Tensor) -> Any:
    return loss(p, x, y), {"mean": x.mean(0), "rows": predict(p, x), "largest": x.amax(), "name": "aux"}


def summed(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return row_losses(p, x, y).sum()


def centred(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """With collectives in the loss."""
    out = predict(p, x)
    out = out - fdp.pmean(out.mean(), weight="rows")
    others = fdp.all_gather(out)
    return ((out - y) ** 2).mean() + (others * fdp.psum(out.square().sum())).mean()


AUX_DIMS = {"mean": "mean", "rows": 0, "largest": "max", "name": None}
GRADIENTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mean": (loss, (), {}),
    "sum": (summed, (), {"reduction": "sum"}),
    "count": (counted, (), {"count": count}),
    "count-in-one-process": (few, (), {"count": count_few}),
    "aux": (with_aux, (0, True), {"aux_dims": AUX_DIMS}),
    "microbatches": (loss, (), {"microbatches": 2}),
    "aux-microbatches": (with_aux, (0, True), {"aux_dims": AUX_DIMS, "microbatches": 3}),
    "inputs": (loss, ((0, 1),), {"in_dims": (None, 0, 0)}),
    "inputs-alone": (loss, (2,), {"in_dims": (None, 0, 0)}),
    "not-differentiable": (loss, (), {"create_graph": False}),
    "collectives": (centred, (), {}),
}


def gradients(seat: Seat, kind: str, transform: str, on: str) -> Any:
    fn, numbers_of, options = GRADIENTS[kind]
    x, y = seat.own(batch())
    p: Any = params()
    if on == "replicated":
        p = fdp.replicate(p, seat.devices)
    out = getattr(fdp, transform)(fn, *numbers_of, **seat.on, **options)(p, x, y)
    if transform == "grad":
        grads, rest = out if "aux" in kind else (out, None)
    else:
        rest, grads = out if transform == "value_and_grad" else out[::-1]
    rows: dict[str, Any] = {}
    if "aux" in kind:
        assert rest is not None
        value, aux = rest if transform != "grad" else (None, rest)
        rows["aux"], rest = aux.pop("rows"), (value, aux)
    if kind.startswith("inputs"):
        several = isinstance(numbers_of[0], tuple)
        rows["grads"], grads = (grads[1], grads[0]) if several else (grads, None)
    if on == "replicated" and grads is not None:
        assert isinstance(grads, fdp.Replicated)
        for other in grads.shards:
            assert_same_tree(other, grads[0])
        grads = grads[0]
    return {"whole": (rest, grads), "rows": rows}


@depth.few(3)
@pytest.mark.parametrize("kind", GRADIENTS)
@everywhere
def test_gradients(two: Pool, layout: Layout, kind: str):
    if kind == "count-in-one-process" and layout.rows == (1, 0):
        return  # the row does not count
    if kind == "collectives" and layout.rows == (1, 0):
        return  # a single slot has nobody to meet: the other process may or may not follow it
    one_device = kind not in ("collectives", "count-in-one-process") and "aux" not in kind
    same_at_all_scales(
        two, layout, gradients, kind, "value_and_grad", "plain", one_device=one_device, needs_rows=kind == "collectives"
    )


@depth.few(6)
@pytest.mark.parametrize("on", ["plain", "replicated"])
@pytest.mark.parametrize("transform", ["grad", "grad_and_value", "value_and_grad"])
@pytest.mark.parametrize("kind", ["mean", "aux", "inputs"])
@in_few
def test_orders_and_replicated_parameters(two: Pool, layout: Layout, kind: str, transform: str, on: str):
    same_at_all_scales(two, layout, gradients, kind, transform, on)


def outside(seat: Seat, how: str) -> Any:
    x, y = batch()
    p = {name: value.requires_grad_() for name, value in params().items()}
    x.requires_grad_()
    own_x, own_y = seat.own((x, y))

    def total(p: Any, x: Tensor) -> Tensor:
        if how == "rows":  # the sum over processes is that of all rows
            return fdp.dp_apply(predict, p, x, **seat.on).square().sum()
        fn, dim = {"collectives": (centred, "mean"), "max": (loss, "max"), "mean": (loss, "mean")}[how]
        return fdp.dp_apply(fn, p, (x, own_y), out_dims=dim, **seat.on)

    total(p, own_x).backward()
    assert x.grad is not None
    return {"whole": [p[name].grad for name in ("w", "b")], "rows": seat.own(x.grad)}


@depth.few(2)
@pytest.mark.parametrize("how", ["rows", "mean", "max", "collectives"])
@everywhere
def test_differentiated_outside(two: Pool, layout: Layout, how: str):
    same_at_all_scales(two, layout, outside, how, needs_rows=True)


# ---- state on devices


def trained(seat: Seat, name: str) -> Any:
    """Steps whose state stays on its devices; the last batch is short."""

    def step(p: Any, rate: float, x: Tensor, y: Tensor) -> Any:
        def weighted(p: Any) -> Tensor:
            return row_losses(p, x, y).sum()

        grads, value = torch.func.grad_and_value(weighted)(p)
        grads, value, rows = fdp.psum((grads, value, len(x)))
        return {k: v - rate * grads[k] / rows for k, v in p.items()}, value / rows

    p = fdp.replicate(params(), seat.devices)
    losses = []
    for _ in range(3):
        own = fdp.scatter(seat.own(batch()), seat.devices, weights=seat.weights, keep_empty=True)
        x, y = own.unzip()
        p, value = fdp.parallel_apply(step, p, 0.1, x, y)
        losses.append(fdp.gather(value, "max"))
    return {"whole": (fdp.gather(p, None), losses, fdp.gather(p, "max"))}


@everywhere
def test_a_loop_with_state_on_devices(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, trained, "")


def trained_by_torch(seat: Seat, name: str) -> Any:
    """Two loops: a module with torch.optim, and an update of replicated parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), fdp.nn.SyncBatchNorm(4), nn.Linear(4, 1)).double()
    apply, (params, buffers) = fdp.functional(model)

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        out, new = apply((params, buffers), x)
        return out.square().mean(), new

    def update(params: Any, grads: Any) -> Any:
        return {name: p - 0.1 * grads[name] for name, p in params.items()}

    step = fdp.value_and_grad(loss, has_aux=True, aux_dims="mean", in_dims=(None, None, 0), **seat.on)
    optimizer, resident = torch.optim.SGD(model.parameters(), lr=0.1), fdp.replicate(params, seat.devices)
    for _ in range(3):
        x = seat.own(torch.arange(21.0, dtype=torch.float64).reshape(7, 3).sin())
        resident = resident.map(update, step(resident, buffers, x)[1])
        (_, new), grads = step(params, buffers, x)
        fdp.set_grads(model, grads)
        fdp.set_buffers(model, new)
        optimizer.step()
    return {"whole": (dict(model.state_dict()), fdp.unreplicate(resident))}


@in_few
def test_a_loop_with_torch_optim(two: Pool, layout: Layout):
    found = same_at_all_scales(two, layout, trained_by_torch, "", meets=True)
    if found is not None:
        assert_close_tree({n: found["whole"][0][n] for n in found["whole"][1]}, found["whole"][1])


def collected(seat: Seat, across: bool) -> Any:
    tree = {"x": batch()[0], "names": [f"row {i}" for i in range(7)], "turned": batch()[0].mT.contiguous()}
    own = seat.own({"x": tree["x"], "names": tree["names"]}) | {"turned": seat.own(tree["turned"], 1)}
    dims = {"x": 0, "names": "items", "turned": -1}
    sharded = fdp.scatter(own, seat.devices, dims, weights=seat.weights, keep_empty=True)
    assert sharded.sizes is not None
    back = fdp.gather(sharded, across=across)
    back["turned"] = back["turned"].mT
    sums = sharded.map(lambda shard: (shard["x"].sum(0), shard["x"].sum(0), len(shard["x"]), shard["x"].sum(0)))
    total, stack, sizes, mean = fdp.gather(sums, ("sum", "stack", "list", "mean"), weights=sharded.sizes, across=across)
    joint: dict[str, Any] = {"rows": (back["x"], back["turned"], stack), "lists": {"n": back["names"], "sizes": sizes}}
    return {"whole": (total, mean, joint)} if across else {"whole": (total, mean), **joint}


@pytest.mark.parametrize("across", [False, True])
@everywhere
def test_scatter_and_gather(two: Pool, layout: Layout, across: bool):
    found = same_at_all_scales(two, layout, collected, across)
    x = (found["whole"][2] if across else found)["rows"][0]
    assert_same_tree(x, batch()[0][: sum(layout.rows)])
