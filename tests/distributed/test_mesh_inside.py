"""What a function sees inside a call on a mesh: collectives, slot numbers, seeds, batch norm, notes on errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.distributed.pool import Failure, Pool
from tests.distributed.scales import Layout, Seat, agree_on_failure, in_process, same_at_all_scales
from tests.distributed.test_mesh import FEW, LAYOUTS, batch, loss, params, predict, says

everywhere = pytest.mark.parametrize("layout", LAYOUTS, ids=says)
in_few = pytest.mark.parametrize("layout", FEW, ids=says)


# ---- collectives


def square(x: Tensor) -> Tensor:
    """Of a slot, with the same shape on each."""
    rows = x.sum(0)
    return rows[:, None] * (1 + torch.arange(3)) if x.dtype is not torch.bool else (rows > 1)[:, None].expand(3, 3)


def uneven(x: Tensor) -> Tensor:
    return x[: 1 + fdp.axis_index() % 2]


def around(i: int, n: int) -> int:
    return (i + 1) % n


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "psum": lambda x: fdp.psum(square(x)),
    "psum-numbers": lambda x: fdp.psum({"tensor": square(x), "int": len(x), "float": 0.5}),
    "pmean": lambda x: fdp.pmean(square(x)),
    "pmean-rows": lambda x: fdp.pmean(square(x), weight="rows"),
    "pmean-weighted": lambda x: fdp.pmean(square(x), weight=1.5 + fdp.axis_index()),
    "pmean-one": lambda x: fdp.pmean(
        square(x) * (1 if fdp.axis_index() == 0 else torch.nan), weight=int(fdp.axis_index() == 0)
    ),
    "pmax": lambda x: fdp.pmax((square(x), len(x))),
    "pmin-nan": lambda x: fdp.pmin(
        torch.where(torch.eye(3) > fdp.axis_index(), torch.nan, square(x)) if x.is_floating_point() else square(x)
    ),
    "all_gather": lambda x: fdp.all_gather(x),
    "all_gather-uneven": lambda x: fdp.all_gather({"a": uneven(square(x)), "b": uneven(square(x))[:, None]})["a"],
    "all_gather-stack": lambda x: fdp.all_gather(square(x), dim=-1, stack=True),
    "psum_scatter": lambda x: fdp.psum_scatter(square(x)),
    "psum_scatter-1": lambda x: fdp.psum_scatter(square(x), dim=1),
    "all_to_all": lambda x: fdp.all_to_all(square(x), split_dim=1, concat_dim=0),
    "ppermute": lambda x: fdp.ppermute(square(x), [(i, around(i, fdp.axis_size())) for i in range(fdp.axis_size())]),
    "ppermute-0": lambda x: fdp.ppermute(square(x), [(fdp.axis_size() - 1, 0)]),
    "twice": lambda x: fdp.psum(fdp.psum(square(x)) * fdp.pmax(len(x))),
}
OTHERS = [torch.complex128, torch.int64, torch.int32, torch.bool, torch.bfloat16]
NO_ORDER = ("pmax", "pmin-nan", "twice")


def collective(seat: Seat, name: str, dtype: torch.dtype) -> Any:
    """On small whole numbers, so that also half precision is exact."""
    x = (numbers(7, 3) * 4).round().to(dtype) if dtype != torch.float64 else numbers(7, 3)
    fn = COLLECTIVES[name]
    each = fdp.dp_apply(lambda _, x: fn(x), None, seat.own(x), out_dims="list", **seat.on)
    return {"lists": {str(i): part for i, part in enumerate(each)} if isinstance(each, tuple) else flat(each)}


def flat(tree: Any) -> dict[str, Any]:
    """Lists under names."""
    return tree if isinstance(tree, dict) else {"all": tree}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective(two: Pool, name: str):
    for layout in LAYOUTS:
        same_at_all_scales(two, layout, collective, name, torch.float64, meets=True)


@few()
@pytest.mark.parametrize("dtype", OTHERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_dtype(two: Pool, name: str, dtype: torch.dtype):
    """Some have no order, some no mean: they fail as in one process."""
    agree_on_failure(two, LAYOUTS[1], collective, name, dtype)


def differentiated(seat: Seat, name: str, where: str) -> Any:
    fn = COLLECTIVES[name]
    x, w = batch()[0], numbers(3).requires_grad_()
    own = seat.own(x).requires_grad_()

    def value(w: Tensor, x: Tensor) -> Tensor:
        out = fn(x * w.sin())
        tensors = [part for part in (out.values() if isinstance(out, dict) else [out]) if isinstance(part, Tensor)]
        return torch.stack([(part * (2.0 + fdp.axis_index())).square().sum() for part in tensors]).sum()

    if where == "outside":
        total = fdp.dp_apply(value, w, own, out_dims="sum", **seat.on)
        total.backward()
        assert w.grad is not None
        return {"whole": (total, w.grad), "rows": own.detach() * 0 if own.grad is None else own.grad}
    grads = fdp.dp_apply(torch.func.grad(value), w.detach(), own.detach(), out_dims="list", **seat.on)
    return {"lists": {"grads": grads}}


@few()
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in NO_ORDER])
def test_collectives_are_differentiated(two: Pool, name: str, where: str):
    for layout in LAYOUTS[1:] if name in ("psum", "all_gather-uneven") else LAYOUTS[1:2]:
        same_at_all_scales(two, layout, differentiated, name, where, meets=True, needs_rows=where == "outside")


def stateful(seat: Seat) -> Any:
    """Slots in `parallel_apply`, some of them without rows."""
    x = fdp.scatter(seat.own(batch()[0]), seat.devices, weights=seat.weights, keep_empty=True)

    def fn(x: Tensor) -> Any:
        parts = fdp.all_gather(x), fdp.psum(len(x)), fdp.all_to_all(x.sum(0), split_dim=0, concat_dim=0)
        return *parts, (fdp.axis_index(), fdp.axis_size())

    everything, count, mine, where = fdp.parallel_apply(fn, x)
    whole = fdp.gather(everything, "max"), fdp.gather(count, 0)
    return {"whole": whole, "lists": {"mine": fdp.gather(mine, "list"), "where": list(where.shards)}}


@everywhere
def test_collectives_on_state(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, stateful)


# ---- which slot this is


def slots(seat: Seat) -> Any:
    def fn(_: Any, x: Tensor) -> Any:
        return [fdp.axis_index(), fdp.axis_rows()], fdp.axis_size(), x.clone()

    pairs, size, x = fdp.dp_apply(fn, None, seat.own(batch()[0]), out_dims=("list", None, 0), **seat.on)
    return {"whole": size, "lists": {"indices": pairs[0], "rows": pairs[1]}, "rows": x}


@everywhere
def test_slots_are_counted_over_all_processes(two: Pool, layout: Layout):
    found = same_at_all_scales(two, layout, slots)
    active = [size for size in layout.sizes if size]
    assert found["lists"] == {"indices": list(range(len(active))), "rows": active}
    assert found["whole"] == len(active)


def seeded(seat: Seat, executor: Any) -> Any:
    def fn(p: Any, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape) + fdp.psum(torch.rand((), dtype=torch.float64))

    def noisy(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(p, nn.functional.dropout(x), y) + torch.randn((), dtype=torch.float64)

    x, y = seat.own(batch())
    options: dict[str, Any] = seat.on | {"seed": 3, "executor": executor}
    rows = fdp.dp_apply(fn, None, x, **options)
    value = fdp.value_and_grad(noisy, microbatches=2, **options)(params(), x, y)
    held = fdp.scatter(x, seat.devices, weights=seat.weights)
    drawn = fdp.parallel_apply(lambda x: torch.rand(len(x), 1), held, seed=5)
    assert isinstance(drawn, fdp.Sharded)
    return {"rows": (rows, fdp.gather(drawn, 0)), "whole": value}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[2]], ids=says)
def test_seeds(two: Pool, layout: Layout, executor: str):
    same_at_all_scales(two, layout, seeded, executor, meets=True)


# ---- modules


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh(), nn.Linear(4, 2), norm(2)).double()
    for i, tensor in enumerate(module.parameters()):
        tensor.data = numbers(*tensor.shape) / (i + 1) + 0.3
    return module


def normalised(seat: Seat) -> Any:
    """Three steps of a network with batch norm: outputs, gradients from outside and inside, statistics."""
    on_one = seat.devices == fdp.virtual_devices(1)
    apply, (p, buffers) = fdp.functional(network(nn.BatchNorm1d if on_one else fdp.nn.SyncBatchNorm))
    rows, whole = [], []
    x, y = seat.own(batch())
    for step in range(3):
        leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
        out, buffers = fdp.dp_apply(apply, (leaves, buffers), x + step, **seat.on)
        (out * y[:, None]).square().sum().backward()

        def value(p: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
            out, buffers = apply((p, buffers), x)
            return (out.sum(1) - y).square().mean(), buffers

        (error, buffers), grads = fdp.value_and_grad(
            value, has_aux=True, aux_dims="mean", in_dims=(None, None, 0, 0), **seat.on
        )(p, buffers, x, y)
        rows.append(out)
        whole.append((error, grads, buffers, {name: leaf.grad for name, leaf in leaves.items()}))
        p = {name: value - 0.1 * grads[name] for name, value in p.items()}
    return {"rows": rows, "whole": whole}


@in_few
def test_batch_norm_over_all_processes(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, normalised, one_device=True, needs_rows=True)


def trained(seat: Seat, steps: int) -> Any:
    apply, (p, buffers) = fdp.functional(network(fdp.nn.SyncBatchNorm))
    x, y = seat.own(batch())

    def value(p: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        out, buffers = apply((p, buffers), nn.functional.dropout(x, 0.2))
        return (out.sum(1) - y).square().mean(), buffers

    step = fdp.value_and_grad(value, has_aux=True, aux_dims="mean", in_dims=(None, None, 0, 0), seed=1, **seat.on)
    values = []
    for _ in range(steps):
        (error, buffers), grads = step(p, buffers, x, y)
        p = {name: value - 0.05 * grads[name] for name, value in p.items()}
        values.append((error, grads))
    return {"whole": (values, p, buffers)}


@pytest.mark.parametrize("layout", [FEW[0], *(pytest.param(x, marks=pytest.mark.deep) for x in FEW[1:])], ids=says)
def test_every_process_has_the_same_bits_after_twenty_steps(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, trained, 20, needs_rows=True)  # which compares "whole" bit by bit between processes


def test_four_processes(four: Pool):
    uneven, lonely = Layout((2, 1, 1, 2), (3, 0, 1, 2)), Layout((1, 1, 1, 1), (0, 3, 0, 3))
    same_at_all_scales(four, Layout((2, 1, 1, 2), (3, 1, 1, 2)), trained, 4)
    for layout in (uneven, lonely):
        same_at_all_scales(four, layout, stateful)
        same_at_all_scales(four, layout, slots)


# ---- what cannot be


CAPTURED = torch.ones(3, dtype=torch.float64).requires_grad_()


def capturing(seat: Seat, how: str) -> Any:
    x, y = seat.own(batch())

    def fn(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(p, x * CAPTURED, y)

    if how == "value_and_grad":
        return {"whole": fdp.value_and_grad(fn, devices=seat.devices)(params(), x, y)}
    return {"whole": fdp.dp_apply(fn, params(), (x, y), seat.devices, out_dims="mean")}


@pytest.mark.parametrize("how", ["dp_apply", "value_and_grad"])
@in_few
def test_what_is_captured_has_no_gradient(two: Pool, layout: Layout, how: str):
    for found, rows in zip(two.outcomes(in_process, layout.slots, capturing, layout, how), layout.rows, strict=True):
        assert isinstance(found, Failure)
        assert found.kind == ("ValueError" if rows else "RuntimeError")
        assert "tensor that requires grad and is none of its arguments" in found.message
    assert_close_tree(two(in_process, layout.slots, slots, layout)[0]["whole"], sum(n > 0 for n in layout.sizes))


def failing(seat: Seat) -> Any:
    def fn(p: Any, x: Tensor) -> Tensor:
        if fdp.axis_index() == 2:
            raise KeyError("this one")
        return predict(p, x)

    return {"whole": fdp.dp_apply(fn, params(), seat.own(batch()[0]), seat.devices)}


def test_notes_count_slots_of_all_processes(two: Pool):
    layout = Layout((2, 2), (4, 3))
    first, second = two.outcomes(in_process, layout.slots, failing, layout)
    assert (first.kind, second.kind) == ("RuntimeError", "KeyError")
    assert any("in shard 2 of 4, rows 4:6" in note for note in second.notes), second.notes
    assert "dp_apply" in first.message
    assert "process 1 has raised KeyError: 'this one'" in first.message
