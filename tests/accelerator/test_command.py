"""`python -m fdp` with several accelerators: copies between every two of them, and functions across them."""

import re
import sys
from pathlib import Path

import pytest
import torch

import fdp
from fdp.__main__ import main
from fdp._command import _balance, _copies

DEVICES = fdp.available_devices()


def command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fdp", *arguments])
        return main()


def test_one_wrong_element_between_one_pair_is_found():
    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved = tensor.to(device)
        if (str(tensor.device), str(device)) == ("virtual:2", "virtual:1"):
            moved = moved.contiguous()
            moved.view(-1)[17] += 1
        return moved

    result = _copies.check_copies(DEVICES[1:3], move)
    assert result.status == "failed"
    assert result.summary == "wrong contents in 1 of 6 pairs: virtual:2 -> virtual:1"
    faults = result.details["faults"]
    assert len(faults) == len(_copies.SIZES) * len(_copies.FORMS)
    assert faults[0]["text"] == "1 of 1024 elements wrong, from element 17 on"


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(_balance, "_LARGE_SIDE", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert command("doctor", "--devices", "0,virtual:2") == 0
    out = capsys.readouterr().out
    assert re.search(r"^warning +threads +.*\n +-> more threads than cores slow torch down", out, re.MULTILINE)
    assert "2 slots on virtual:0, virtual:2" in out
    assert "contents arrive between all 6 pairs" in out


MODULE = """
import torch

def stays(params, x):
    return x @ params + torch.ones(2, device="virtual:0")

def predict(params, x):
    return x @ params

def sample_inputs():
    return torch.ones(3, 2), torch.arange(21.0).view(7, 3)
"""


def test_check_of_functions_across_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "across_devices.py").write_text(MODULE)
    where, devices = f"{tmp_path}/across_devices.py", ["--devices", "0,virtual:2"]
    assert command("check", f"{where}:predict", *devices) == 0
    assert command("check", f"{where}:stays", *devices) == 1
    assert "but on virtual:0, virtual:2, executor 'auto', there was a RuntimeError" in capsys.readouterr().out
