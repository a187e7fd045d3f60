"""Aux of a loss under "mean": by what it is weighted, and what is no mean over shards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.containers import Point
from tests.common.depth import few
from tests.common.numbers import numbers

W, X, Y = numbers(4), numbers(8, 4), numbers(8)
MASK = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.float64)
PIECES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 8), (8, 1)]
in_pieces = pytest.mark.parametrize(("slots", "microbatches"), PIECES)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ w - y) ** 2).mean()


# ---- what has rows is no mean


@in_pieces
@pytest.mark.parametrize("name", ["value_and_grad", "grad", "grad_and_value"])
def test_rows_are_not_averaged(name: str, slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss(w, x, y), {"pred": x @ w, "mean": x.mean(0), "loss": loss(w, x, y)}

    rows = 8 // (slots * microbatches)
    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "microbatches": microbatches}
    message = (
        rf"{name}: dim 0 of aux\['pred'\] of shape \({rows},\) is as long as the {rows} rows of a shard\. .*"
        r"aux_dims=\{'loss': 'mean', 'mean': 'mean', 'pred': 0\} concatenates them.*aux_dims='mean'"
    )
    if rows == 4:
        message = rf"{name}: dim 0 of aux\['mean'\] of shape \(4,\), aux\['pred'\] of shape \(4,\) is as long"
    with pytest.raises(ValueError, match=message):
        getattr(fdp, name)(fn, **options)(W, X, Y)
    dims = {"pred": 0, "mean": "mean", "loss": "mean"}
    (value, aux), _ = fdp.value_and_grad(fn, aux_dims=dims, **options)(W, X, Y)
    assert_close_tree((value, aux), fn(W, X, Y))


ROWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda w, x: x @ w,
    "bool": lambda w, x: x @ w > 0,
    "integer": lambda w, x: torch.zeros(len(x), dtype=torch.int64),
    "namedtuple": lambda w, x: Point(x, x.mean()),
    "list": lambda w, x: [x[:, None, :1]],
    "called like a buffer": lambda w, x: {"buffers": x[:, 0], "running_mean": x},
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("slots", [1, 2])
def test_rows_in_any_tree_and_dtype(name: str, reduction: Any, slots: int):
    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "reduction": reduction}
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):  # the second by torch.func
        with mode, pytest.raises(ValueError, match=r"^grad: dim 0 of aux.* is as long as the \d rows of a shard"):
            fdp.grad(lambda w, x, y: (loss(w, x, y), ROWS[name](w, x)), **options)(W, X, Y)


def test_rows_that_are_said_to_be_a_mean_are_one():
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss(w, x, y), {"features": x.mean(0)}

    for dims in ("mean", {"features": "mean"}):
        aux = fdp.grad(fn, has_aux=True, devices=fdp.virtual_devices(2), aux_dims=dims)(W, X, Y)[1]
        assert_close_tree(aux, {"features": X.mean(0)})


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_means_of_other_sizes_are_averaged(rows: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss(w, x, y), (x.mean(0), x.mean(0, keepdim=True), x.mean())

    for slots in (1, 2):
        aux = fdp.grad(fn, has_aux=True, devices=fdp.virtual_devices(slots))(W, X[:rows], Y[:rows])[1]
        assert_close_tree(aux, fn(W, X[:rows], Y[:rows])[1])


# ---- buffers are means, whatever their size


@dataclasses.dataclass
class Log:
    value: Tensor
    buffers: Any


NESTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "alone": lambda buffers, value: buffers,
    "pair": lambda buffers, value: (buffers, value),
    "dict": lambda buffers, value: {"state": [buffers], "value": value},
    "dataclass": lambda buffers, value: Log(value, buffers),
    "renamed": lambda buffers, value: {f"net.{name}": buffer for name, buffer in buffers.items()},
    "listed": lambda buffers, value: list(buffers.values()),
}


def normalised(features: int) -> tuple[Any, Any]:
    return fdp.functional(nn.Sequential(nn.BatchNorm1d(features, dtype=torch.float64), nn.Flatten(0)))


@few(2)
@in_pieces
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("inference", [False, True])
def test_buffers_of_a_module_are_averaged(nest: str, slots: int, microbatches: int, inference: bool):
    """Of as many features as a piece has rows, and captured, so that only `functional` knows them."""
    features = 8 // (slots * microbatches)
    if features == 1:
        return  # batch norm needs two rows
    apply, (params, buffers) = normalised(features)
    x = numbers(8, features)

    def fn(params: Any, x: Tensor) -> Any:
        out, new_buffers = apply((params, buffers), x)
        return out.square().mean(), NESTS[nest](new_buffers, out.mean())

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "microbatches": microbatches}
    with torch.inference_mode(inference):
        aux = fdp.grad(fn, **options)(params, x)[1]
    said = fdp.grad(fn, aux_dims="mean", **options)(params, x)[1]
    assert_close_tree(aux, said)


@pytest.mark.parametrize("change", [torch.clone, torch.detach, torch.square])
@pytest.mark.parametrize("replicated", [False, True])
def test_state_that_comes_in_and_goes_out_is_averaged(change: Callable[[Tensor], Tensor], replicated: bool):
    devices = fdp.virtual_devices(2)
    apply, (params, buffers) = normalised(4)
    if replicated:
        buffers = fdp.replicate(buffers, devices)

    def fn(params: Any, state: Any, x: Tensor) -> Any:
        out, new_buffers = apply((params, state), x)
        return out.square().mean(), {"state": {name: change(buffer) for name, buffer in new_buffers.items()}}

    options: Any = {"has_aux": True, "devices": devices, "in_dims": (None, None, 0)}
    aux = fdp.grad(fn, **options)(params, buffers, X)[1]
    assert_close_tree(aux, fdp.grad(fn, aux_dims="mean", **options)(params, buffers, X)[1])
    with pytest.raises(ValueError, match=r"dim 0 of aux\['pred'\]"):
        fdp.grad(lambda p, s, x: (loss(W, x, x[:, 0]), {"pred": x}), **options)(params, buffers, X)


# ---- weights


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_aux_is_weighted_by_rows_or_by_count(slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        tokens = mask.sum().clamp(min=1)
        return (((x @ w - y) ** 2) * mask).sum() / tokens, {"rows": y.mean(), "tokens": (y * mask).sum() / tokens}

    def count(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return mask.sum()

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "microbatches": microbatches}
    gradient, (value, want) = torch.func.grad_and_value(fn, has_aux=True)(W, X, Y, MASK)
    for weight, name in ((None, "rows"), ("rows", "rows"), ("count", "tokens")):
        chosen: Any = {} if weight is None else {"aux_weight": weight}
        for mode in (torch.enable_grad(), torch.inference_mode()):
            with mode:
                found = fdp.value_and_grad(fn, count=count, **options, **chosen)(W, X, Y, MASK)
            assert_close_tree((found[0][0], found[0][1][name], found[1]), (value, want[name], gradient))


def test_aux_of_a_sum_is_weighted_by_rows():
    def fn(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).sum(), x.mean()

    aux = fdp.grad(fn, has_aux=True, devices=fdp.virtual_devices(3), reduction="sum")(W, X)[1]
    assert_close_tree(aux, X.mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_weight": "tokens"}, "aux_weight must be 'rows' or 'count', got 'tokens'"),
        ({"aux_weight": "count"}, "aux_weight='count' needs count=, which says what a shard counts"),
    ],
)
@pytest.mark.parametrize("name", ["value_and_grad", "grad", "grad_and_value"])
def test_aux_weights_that_are_refused(name: str, options: Any, message: str):
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        getattr(fdp, name)(loss, **options)


def test_rows_that_are_not_known():
    """Shards that are no parts of a batch."""
    slots = fdp.virtual_devices(2)
    each = fdp.parallel_apply(lambda x: x.sum(), fdp.scatter(X, slots))
    assert isinstance(each, fdp.Sharded)

    def fn(w: Tensor, x: Tensor) -> Any:
        return (w * x).sum(), x

    options: Any = {"has_aux": True, "count": lambda w, x: 2}
    with pytest.raises(ValueError, match=r"rows of the shards are not known.*aux_weight='count'"):
        fdp.grad(fn, **options)(W, each)
    assert_close_tree(fdp.grad(fn, aux_weight="count", **options)(W, each)[1], X.sum() / 2)
