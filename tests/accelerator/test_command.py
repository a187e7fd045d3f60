"""`python -m fdp` with several accelerators: copies between every two of them, and functions across them."""

from typing import Any

import pytest
import torch

import fdp
from fdp._command import _across, _balance, _copies, run
from fdp._command._samples import Samples

DEVICES = fdp.available_devices()


def test_every_pair_is_tried():
    result = _copies.check_copies(DEVICES)
    assert result.status == "ok"
    assert result.details["pairs"] == 5 * 4  # the CPU too


def test_one_wrong_element_between_one_pair_is_found():
    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved = tensor.to(device)
        if (str(tensor.device), str(device)) == ("virtual:2", "virtual:1"):
            moved = moved.contiguous()
            moved.view(-1)[17] += 1
        return moved

    result = _copies.check_copies(DEVICES, move)
    assert result.status == "failed"
    assert result.summary == "wrong contents in 1 of 20 pairs: virtual:2 -> virtual:1"
    faults = result.details["faults"]
    assert len(faults) == len(_copies.SIZES) * len(_copies.FORMS)
    assert faults[0]["text"] == "1 of 1024 elements wrong, from element 17 on"


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(_balance, "_LARGE_SIDE", 64)
    assert run(["doctor", "--devices", "0,virtual:2"], fdp.__version__) == 0
    out = capsys.readouterr().out
    assert "2 slots on virtual:0, virtual:2" in out
    assert "contents arrive between all 6 pairs" in out


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] - y) ** 2).mean()


def predict(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"]


def stays(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"] + torch.ones(2, device="virtual:0")


def centred(params: Any, x: torch.Tensor) -> torch.Tensor:
    return predict(params, x - x.mean(0))


X, Y = torch.randn(7, 3), torch.randn(7, 2)
SAMPLES = Samples({"w": torch.randn(3, 2)}, X, {})


@pytest.mark.parametrize(
    ("fn", "samples", "says"),
    [
        (predict, SAMPLES, None),
        (loss, SAMPLES._replace(inputs=(X, Y)), None),
        (loss, SAMPLES._replace(inputs=(X, Y), options={"reduction": "sum"}), "loss differs"),
        (stays, SAMPLES, "there was a RuntimeError"),
        (centred, SAMPLES, "out differs"),
    ],
)
def test_functions_across_devices(fn: Any, samples: Samples, says: str | None):
    found = _across.difference_across(fn, samples.on(DEVICES[0]), DEVICES[:3])
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert says in found
        assert "virtual:0, virtual:1, virtual:2" in found
