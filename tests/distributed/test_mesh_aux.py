"""Aux on a mesh: the weights of its means, and rows, which have none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, agree_on_failure, same_at_all_scales
from tests.distributed.test_mesh import LAYOUTS, batch, count, counted, params, predict, says

EVEN = Layout((2, 1), (4, 2))


def weighted(seat: Seat, weight: Any) -> Any:
    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        return counted(p, x, y), {"mean": y.mean(), "predicted": predict(p, x).mean()}

    step = fdp.value_and_grad(fn, has_aux=True, count=count, aux_weight=weight, **seat.on)
    return {"whole": step(params(), *seat.own(batch()))}


@pytest.mark.parametrize("layout", LAYOUTS, ids=says)
def test_aux_is_weighted_by_rows(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, weighted, "rows", one_device=True)


@pytest.mark.parametrize("layout", LAYOUTS[1:5], ids=says)
def test_aux_is_weighted_by_count(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, weighted, "count")


def rows_as_aux(seat: Seat, microbatches: int) -> Any:
    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        return (predict(p, x) - y).square().mean(), predict(p, x)

    x, y = batch(6)
    step = fdp.value_and_grad(fn, has_aux=True, microbatches=microbatches, **seat.on)
    return {"whole": step(params(), *seat.own((x, y)))}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("layout", [EVEN, Layout((2, 1), (5, 1)), Layout((2, 1), (6, 0))], ids=says)
def test_rows_are_not_averaged(two: Pool, layout: Layout, microbatches: int):
    message = agree_on_failure(two, layout, rows_as_aux, microbatches) or ""
    assert "aux has dims, and aux_dims does not say what they are" in message, message


def features_as_aux(seat: Seat) -> Any:
    """As many as this process has rows, but not as many as the other has."""

    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        return (predict(p, x) - y).square().mean(), x[:, :2].mean(0)

    x, y = batch(3)
    step = fdp.value_and_grad(fn, has_aux=True, aux_dims="mean", **seat.on)
    return {"whole": step(params(), *seat.own((x, y)))}


def test_features_are_averaged(two: Pool):
    same_at_all_scales(two, Layout((1, 1), (2, 1)), features_as_aux, one_device=True)


def buffers_as_aux(seat: Seat) -> Any:
    apply, (p, buffers) = fdp.functional(nn.BatchNorm1d(2, dtype=torch.float64))

    def fn(p: Any, x: Tensor) -> Any:
        out, new_buffers = apply((p, buffers), x)
        return (out * x).mean(), [new_buffers]

    return {"whole": fdp.value_and_grad(fn, has_aux=True, aux_dims="mean", **seat.on)(p, seat.own(batch(6)[0][:, :2]))}


def test_buffers_are_averaged(two: Pool):
    same_at_all_scales(two, EVEN, buffers_as_aux)
