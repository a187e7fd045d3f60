"""`fdp.backward` on a mesh: gradients and buffers of a module are those of one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.common.numbers import numbers
from tests.distributed.pool import Pool
from tests.distributed.scales import Layout, Seat, same_at_all_scales
from tests.nn.odd_modules import seeded

LAYOUTS = [Layout((1, 1), (4, 3)), Layout((2, 2), (4, 3)), Layout((1, 3), (3, 4)), Layout((2, 1), (5, 0))]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


class Net(nn.Module):
    """With a norm over all rows, a layer that is frozen, one that few rows use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), fdp.nn.SyncBatchNorm(4), nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.rare, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.norm(self.frozen(self.first(x).tanh()))).squeeze(1)
        wants = x[:, 0] > 0.5  # of the first rows only: not every slot has such
        return out + self.rare(x).squeeze(1) * wants if bool(wants.any()) else out


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def trained(seat: Seat, microbatches: int) -> Any:
    model = seeded(Net).double()
    x, y = numbers(7, 3) / 10, numbers(7)
    x[:2, 0] = 1.0
    step = fdp.backward(model, squares, microbatches=microbatches, **seat.on)
    values = [step(*seat.own((x, y))) for _ in range(2)]  # gradients are added
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"whole": (values, grads, dict(model.named_buffers()))}


@each_layout
def test_gradients_and_buffers(two: Pool, layout: Layout):
    found = same_at_all_scales(two, layout, trained, 1, one_device=True, meets=True)
    if found is None:
        return
    _, grads, buffers = found["whole"]
    without = {name for name, grad in grads.items() if grad is None}
    assert without == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
    assert buffers["norm.num_batches_tracked"] == 2


def test_microbatches(two: Pool):
    layout = Layout((2, 2), (8, 6))
    same_at_all_scales(two, layout, kept, 2)


def kept(seat: Seat, microbatches: int) -> Any:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))).double()
    step = fdp.backward(model, squares, microbatches=microbatches, **seat.on)
    value = step(*seat.own((numbers(14, 3), numbers(14))))
    return {"whole": (value, {name: p.grad for name, p in model.named_parameters()})}


def counted(seat: Seat) -> Any:
    model = seeded(lambda: nn.Linear(3, 1)).double()
    x, y, mask = numbers(7, 3), numbers(7), torch.arange(7) % 3 > 0

    def masked(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Any:
        errors = (model(x).squeeze(1) - y).square()
        return errors[mask].mean(), errors

    options: dict[str, Any] = {"count": lambda x, y, mask: mask.sum(), "has_aux": True, "aux_dims": 0}
    value, errors = fdp.backward(model, masked, **options, **seat.on)(*seat.own((x, y, mask)))
    return {"whole": (value, {name: p.grad for name, p in model.named_parameters()}), "rows": errors}


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_a_mean_over_what_is_counted(two: Pool, layout: Layout):
    same_at_all_scales(two, layout, counted, one_device=True)
