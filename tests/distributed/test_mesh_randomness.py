"""Each row draws what it draws on one device, on a mesh too, and whatever rows other processes have at a step."""

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import fdp
from tests.common.numbers import numbers
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, same_at_all_scales


def predict(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.4) + 0.1 * F.dropout(x, 0.5)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return predict(w, x).square().mean()


def trained(seat: Seat) -> Any:
    """Three steps with the same plan; in the second all rows but the first of each process are left out."""
    w, x = numbers(3, 3), seat.own(numbers(7, 3))
    step = fdp.value_and_grad(loss, microbatches=2, randomness="rows", seed=5, **seat.on)
    out = fdp.dp_apply(predict, w, x, randomness="rows", seed=5, **seat.on)
    values = []
    for _ in range(3):
        value, grad = step(w, x)
        values.append(value)
        w = w - 0.1 * grad
    return {"whole": (w, values), "rows": out}


@pytest.mark.parametrize(
    "layout", [Layout((1, 1), (4, 3)), Layout((2, 1), (5, 0)), Layout((1, 3), (3, 4))], ids=lambda x: str(x.slots)
)
def test_a_training_draws_the_same_at_all_scales(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, trained)


def with_fewer_rows(mesh: Any) -> list[Tensor]:
    """Steps in which the other process has fewer rows, and this one as many as before."""
    step = fdp.value_and_grad(loss, devices=mesh, randomness="rows", seed=5)
    found = []
    for rows in (4, 2, 4):
        own = numbers(7, 3)[4:] if mesh.rank else numbers(7, 3)[:rows]
        found += [step(numbers(3, 3), own)[0]]
    return found


def test_rows_of_others_may_change(two: Pool):
    step = fdp.value_and_grad(loss, devices="cpu", randomness="rows", seed=5)
    x = numbers(7, 3)
    want = [step(numbers(3, 3), batch)[0] for batch in (x, x[[0, 1, 4, 5, 6]], x)]
    for found in two.outcomes(with_fewer_rows, 1):
        for got, value in zip(found, want, strict=True):
            assert abs(got - value) < 1e-12
