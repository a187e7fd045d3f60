"""Aux of a loss: what is a mean by default, by what it is weighted, and new buffers that are dropped."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp.nn import convert_sync_batchnorm
from tests.common.comparing import assert_close_tree
from tests.common.containers import Point
from tests.common.numbers import numbers

W, X, Y = numbers(4), numbers(8, 4), numbers(8)
MASK = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.float64)
PIECES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 8), (8, 1)]
in_pieces = pytest.mark.parametrize(("slots", "microbatches"), PIECES)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ w - y) ** 2).mean()


# ---- what has dims is no mean by default


@in_pieces
@pytest.mark.parametrize("name", ["value_and_grad", "grad", "grad_and_value"])
def test_rows_are_not_averaged(name: str, slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss(w, x, y), {"pred": x @ w, "mean": x.mean(0), "loss": loss(w, x, y)}

    rows = 8 // (slots * microbatches)
    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "microbatches": microbatches}
    message = (
        rf"{name}: aux has dims, and aux_dims does not say what they are: aux\['mean'\] of shape \(4,\), "
        rf"aux\['pred'\] of shape \({rows},\)\. For new buffers and averages pass aux_dims='mean', for rows "
        r"aux_dims=\{'loss': 'mean', 'mean': 0, 'pred': 0\}"
    )
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
        with mode, pytest.raises(ValueError, match=r"^grad: aux has dims, and aux_dims does not say"):
            fdp.grad(lambda w, x, y: (loss(w, x, y), ROWS[name](w, x)), **options)(W, X, Y)


def test_rows_that_are_said_to_be_a_mean_are_one():
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss(w, x, y), {"features": x.mean(0)}

    for dims in ("mean", {"features": "mean"}):
        aux = fdp.grad(fn, has_aux=True, devices=fdp.virtual_devices(2), aux_dims=dims)(W, X, Y)[1]
        assert_close_tree(aux, {"features": X.mean(0)})


# ---- new buffers of a module


class Other(nn.Module):
    """Two batch norms, of which forward takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return x


Keep = Callable[[Tensor, Any], Any]
RETURNED: dict[str, Keep] = {
    "alone": lambda loss, new: (loss, new),
    "pair": lambda loss, new: (loss, (new, loss)),
    "detached": lambda loss, new: (loss, [{name: x.detach() for name, x in new.items()}]),
    "some": lambda loss, new: (loss, {name: x for name, x in new.items() if "mean" in name}),
}
DROPPED: dict[str, Keep] = {
    "none": lambda loss, new: (loss, {"loss": loss}),
    "old": lambda loss, new: (loss, {name: torch.zeros_like(x) for name, x in new.items()}),
}


def step_of(module: nn.Module, keep: Keep, inner: bool = False, **options: Any) -> Callable[[], Any]:
    apply, (params, buffers) = fdp.functional(module)

    def fn(params: Any, x: Tensor) -> Any:
        out, new = apply((params, buffers), x)
        return keep(out.square().mean(), new)

    def nested(params: Any, x: Tensor) -> Any:
        return torch.func.grad_and_value(fn, has_aux=True)(params, x)[1]

    step = fdp.value_and_grad(nested if inner else fn, has_aux=True, aux_dims="mean", **options)
    return lambda: step(params, X)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("slots", [1, 2])
def test_new_buffers_that_are_returned_are_no_warning(name: str, slots: int, inner: bool):
    module = convert_sync_batchnorm(Other()) if not inner else Other()
    step = step_of(module, RETURNED[name], inner, devices=fdp.virtual_devices(slots))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fdp.nn.BatchNormWarning)
        step()


@pytest.mark.parametrize("make", [Other, lambda: convert_sync_batchnorm(Other())], ids=["plain", "over all slots"])
@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("slots", [1, 2])
def test_new_buffers_that_are_dropped_are_a_warning_once(make: Any, name: str, slots: int):
    module = make()
    for microbatches in (1, 2):
        step = step_of(module, DROPPED[name], devices=fdp.virtual_devices(slots), microbatches=microbatches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", fdp.nn.BatchNormWarning)
            step()
            step()
        texts = [str(each.message) for each in caught]
        assert len(texts) == (microbatches == 1)
        for text in texts:
            assert text.startswith("value_and_grad: the loss does not return the new buffers of a Other in train mode:")
            assert "'norms.0.running_mean'" in text
            assert "has_aux=True and aux_dims='mean'" in text


def test_a_loss_without_aux_drops_new_buffers():
    module = nn.BatchNorm1d(4, dtype=torch.float64)
    apply, (params, buffers) = fdp.functional(module)
    step = fdp.grad(lambda params, x: apply((params, buffers), x)[0].square().mean(), devices="cpu")
    with pytest.warns(UserWarning, match=r"grad: the loss does not return the new buffers of a BatchNorm1d"):
        step(params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(module.eval(), DROPPED["none"], devices="cpu")()
        step_of(nn.Linear(4, 1).double(), DROPPED["none"], devices="cpu")()


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
        fdp.grad(fn, aux_dims="mean", **options)(W, each)
    assert_close_tree(fdp.grad(fn, aux_dims="mean", aux_weight="count", **options)(W, each)[1], X.sum() / 2)
