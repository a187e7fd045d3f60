"""Microbatches on accelerators, whose shards run in rounds: the first piece of every slot, then the second."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.numbers import numbers

ONE, TWO, THREE = (torch.device("virtual", i) for i in range(3))
CPU = torch.device("cpu")
SLOTS: dict[str, list[torch.device]] = {
    "two": [ONE, TWO],
    "uneven": [THREE, ONE, TWO],
    "two-on-one": [ONE, TWO, ONE],
    "with-cpu": [TWO, CPU],
}
ROWS = 11
PARAMS, X, TURNED = {"w": numbers(3)}, numbers(ROWS, 3), numbers(2, ROWS)
NAMES = [numbers(i % 3) for i in range(ROWS)]
ARGS = (PARAMS, X, TURNED, NAMES)
DIMS = (None, 0, -1, "items")


def rows_of(p: Any, x: Tensor, turned: Tensor, names: list[Tensor]) -> Tensor:
    """A number a row, to which every argument contributes otherwise in each row."""
    sums = torch.stack([name.square().sum() for name in names])
    return (x * x * p["w"]).sum(1).sin() + turned.exp().prod(0) * sums.cos()


def kept(x: Tensor) -> Tensor:
    return x[:, 0] > 0


def mean(*args: Any) -> Any:
    rows = rows_of(*args)
    return rows.mean(), {"rows": rows, "sum": rows.sum()}


def total(*args: Any) -> Any:
    rows = rows_of(*args)
    return rows.sum(), {"rows": rows, "sum": rows.sum()}


def mean_of_some(*args: Any) -> Any:
    rows, some = rows_of(*args), kept(args[1])
    return (rows * some).sum() / some.sum(), {"rows": rows, "sum": rows.sum()}


AUX = {"rows": 0, "sum": "sum"}
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mean": (mean, {}),
    "sum": (total, {"reduction": "sum"}),
    "count": (mean_of_some, {"count": lambda p, x, turned, names: kept(x).sum()}),
}


@pytest.mark.parametrize(
    ("kind", "microbatches", "weighted"), [("mean", 2, False), ("sum", 3, True), ("count", 50, True)]
)
@pytest.mark.parametrize("devices", SLOTS.values(), ids=SLOTS)
def test_l6_every_row_has_its_own_gradient(devices: Any, kind: str, microbatches: int, weighted: bool):
    function, more = LOSSES[kind]
    argnums = (3, 1, 0, 2)
    want = torch.func.grad_and_value(function, argnums, has_aux=True)(*ARGS)
    options: dict[str, Any] = {"devices": devices, "microbatches": microbatches, "in_dims": DIMS} | more
    options |= {"aux_dims": AUX, "weights": range(1, 1 + len(devices)) if weighted else None}
    found = [fdp.grad_and_value(function, argnums, True, **options)(*ARGS) for _ in range(2)]
    assert_close_tree(tree_map_only(Tensor, Tensor.cpu, found[0]), want)
    assert_same_tree(found[0], found[1])  # also in the order in which they are added up
    options["aux_dims"] = "mean"
    for argnum, grad in zip(argnums, found[0][0], strict=True):  # one alone, and without aux
        assert_same_tree(fdp.grad(lambda *args: function(*args)[0], argnum, **options)(*ARGS), grad)


@pytest.mark.parametrize("sizes", [(5, 6), (1, 10)], ids=str)
def test_l6_gradients_of_gradients(sizes: tuple[int, int]):
    x = X.clone().requires_grad_()
    options: dict[str, Any] = {"devices": [ONE, TWO], "weights": sizes, "in_dims": 0}

    def loss(x: Tensor) -> Tensor:
        return (x * x * x).sum(1).mean()

    (want,) = torch.autograd.grad((torch.func.grad(loss)(x) * X.exp()).sum(), x)
    for microbatches in (1, 2, 3):
        grad = fdp.grad(loss, microbatches=microbatches, **options)(x)
        assert_close_tree(torch.autograd.grad((grad * X.exp()).sum(), x), (want,))
