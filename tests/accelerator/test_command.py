"""`python -m fdp` with several accelerators: copies between every two of them."""

import re
import sys

import pytest
import torch

import fdp
from fdp.__main__ import main
from fdp._command import _copies

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
    wrong = "1 of 1024 elements wrong, from element 17 on"
    assert result.lines[0] == f"virtual:2 -> virtual:1, 4096 bytes, contiguous: {wrong}"


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert command("doctor", "--devices", "0,virtual:2") == 0
    out = capsys.readouterr().out
    assert re.search(r"^warning +threads +.*\n +-> more threads than cores slow torch down", out, re.MULTILINE)
    assert "devices   virtual:0, virtual:2\n" in out
    assert "contents arrive between all 6 pairs" in out
