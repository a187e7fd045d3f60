"""The example with everything around a training loop: killed and resumed, it has the losses of an undisturbed run."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.programs import run_program

EXAMPLE, EXAMPLES = "gpt", Path(__file__).parents[2] / "examples"
SHORT = ["--steps", "4", "--every", "2", "--batch-size", "9", "--precision", "float64"]

KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import gpt

def clip(*args, count=iter(range(9)), clip=gpt.nn.utils.clip_grad_norm_):
    if next(count) == 2:  # in the middle of step 3
        gpt.fdp.distributed.Checkpoints({folder!r}).wait()  # the state of step 2 is written in the background
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*args)

gpt.nn.utils.clip_grad_norm_ = clip
sys.exit(gpt.main({options!r}))
"""


def losses(path: Path) -> torch.Tensor:
    return torch.tensor([float(line) for line in path.read_text().splitlines()], dtype=torch.float64)


def test_killed_and_resumed_on_other_devices(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def options(name: str, devices: int) -> list[str]:
        files = {"--losses": f"{name}.txt", "--output": f"{name}.png"}
        paths = [text for key, value in files.items() for text in (key, str(tmp_path / value))]
        return [*SHORT, *paths, "--checkpoints", str(tmp_path / name), "--devices", str(devices)]

    assert example.main(options("whole", 1)) == 0
    settings = {"examples": str(EXAMPLES), "folder": str(tmp_path / "killed"), "options": options("killed", 2)}
    killed = run_program(KILLED.format(**settings))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "killed.txt").exists()
    capsys.readouterr()
    assert example.main(options("killed", 3)) == 0
    out = capsys.readouterr().out
    assert "going on from step 2" in out
    assert "It writes, last digit first: 12+34=" in out
    expected, found = losses(tmp_path / "whole.txt"), losses(tmp_path / "killed.txt")
    assert len(expected) == 4
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert expected[-1] < expected[0]
    assert (tmp_path / "killed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"of a run with other options: \{'steps': 4, "):
        example.main([*options("killed", 1), "--seed", "3"])


def test_under_autocast_with_a_scaler(example: Any, tmp_path: Path):
    options = [*SHORT[:-1], "float16", "--output", str(tmp_path / "gpt.png"), "--losses", str(tmp_path / "losses")]
    assert example.main(options) == 0
    assert losses(tmp_path / "losses")[-1] < losses(tmp_path / "losses")[0]


@pytest.mark.parametrize("option", ["--lr=-1", "--lr=nan", "--losses=/nowhere/losses", "--output=/nowhere/gpt.png"])
def test_what_cannot_be_is_said_before_the_training(example: Any, option: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        example.main([option])
    assert f"argument {option.partition('=')[0]}: " in capsys.readouterr().err


def test_the_text_is_sums(example: Any):
    lines = ["".join(example.CHARACTERS[i] for i in tokens) for (tokens,) in example.sums()]
    assert len(set(lines)) == 10_000
    assert all(int(line[:2]) + int(line[3:5]) == int(line[:5:-1]) and line[2] + line[5] == "+=" for line in lines)
