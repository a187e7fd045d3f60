"""Each row draws what it draws on one device, on devices of an accelerator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp

ROWS: dict[str, Any] = {"seed": 3, "randomness": "rows"}
ONE = torch.device("virtual:0")
W = torch.linspace(-1, 1, 64, dtype=torch.float64).cos().reshape(8, 8).to(ONE)
X = torch.linspace(-2, 2, 13 * 8, dtype=torch.float64).sin().reshape(13, 8).to(ONE)


def drop(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w + torch.rand_like(x)), 0.4)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return drop(w, x).square().mean()


@pytest.mark.parametrize("devices", [2, [0, 1, 2], [3, 3, 1]])
def test_rows_draw_the_same_on_any_devices(devices: Any):
    slots = [f"virtual:{i}" for i in ([0, 1] if devices == 2 else devices)]
    states = [torch.get_device_module(ONE).default_generators[i].get_state() for i in range(4)]
    want = fdp.value_and_grad(loss, devices=[ONE], **ROWS)(W, X)
    found = fdp.value_and_grad(loss, devices=slots, output_device=ONE, microbatches=2, **ROWS)(W, X)
    torch.testing.assert_close([x.cpu() for x in found], [x.cpu() for x in want])
    one = fdp.dp_apply(drop, W, X, [ONE], **ROWS)
    assert torch.equal(fdp.dp_apply(drop, W, X, slots, output_device=ONE, **ROWS).cpu(), one.cpu())
    after = [torch.get_device_module(ONE).default_generators[i].get_state() for i in range(4)]
    assert all(map(torch.equal, states, after))


def test_a_draw_elsewhere_is_an_error():
    with pytest.raises(RuntimeError, match=r"draws on cpu, and the slot is on virtual:0. Draw where the inputs are"):
        fdp.dp_apply(lambda w, x: x * torch.rand(len(x), 1, device="cpu").to(x), W, X, [ONE, "virtual:1"], **ROWS)
