"""`assert_data_parallel` across several accelerators."""

from typing import Any

import pytest
import torch

import fdp
from fdp.testing import assert_data_parallel

DEVICES = fdp.available_devices()[:3]
W, X, Y = {"w": torch.randn(3, 2)}, torch.randn(7, 3), torch.randn(7, 2)


def predict(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"]


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((predict(params, x) - y) ** 2).mean()


def stays(params: Any, x: torch.Tensor) -> torch.Tensor:
    return predict(params, x) + torch.ones(2, device="virtual:0")


def centred(params: Any, x: torch.Tensor) -> torch.Tensor:
    return predict(params, x - x.mean(0))


def test_functions_that_agree_across_devices():
    seen = set()
    assert_data_parallel(lambda w, x: seen.add(x.device) or predict(w, x), W, X, devices=DEVICES)
    assert seen == set(DEVICES)
    assert_data_parallel(loss, W, (X, Y), devices=DEVICES)
    assert_data_parallel(loss, W, (X, Y), devices=DEVICES, weights=(1, 4, 0, 2))
    assert_data_parallel(lambda w, x: predict(w, x["x"]), W, {"x": X}, dtype=torch.float64, devices=DEVICES)


@pytest.mark.parametrize(
    ("fn", "inputs", "options", "says"),
    [
        (loss, (X, Y), {"reduction": "sum"}, "loss differs"),
        (stays, X, {}, "there was a RuntimeError"),
        (centred, X, {}, "out differs"),
    ],
)
def test_functions_that_differ_across_devices(fn: Any, inputs: Any, options: Any, says: str):
    with pytest.raises(AssertionError, match=says) as caught:
        assert_data_parallel(fn, W, inputs, slots=(1,), devices=DEVICES, **options)
    assert caught.match("on virtual:0, virtual:1, virtual:2, executor 'auto'")
