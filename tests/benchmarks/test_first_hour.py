"""The first hour, rehearsed with tiny sizes: its steps, its limits, and what it writes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from benchmarks.first_hour import __main__ as first_hour
from benchmarks.first_hour import laws, models, steps


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(steps, "TINY", True)
    monkeypatch.setattr(steps, "OUT", tmp_path)


@pytest.mark.parametrize("name", laws.LAWS)
def test_laws_are_right_on_the_cpu(name: str):
    for how in ("sequential", "threads"):
        said = steps.tried(lambda: laws.law(name, fdp.virtual_devices(2), how))  # noqa: B023
        assert said == "right"


def test_a_wrong_number_is_said(monkeypatch: pytest.MonkeyPatch):
    numbers = iter([1.0, 2.0])
    monkeypatch.setitem(laws.LAWS, "odd", (lambda devices, how: torch.tensor(next(numbers)), 1e-9))
    assert laws.law("odd", fdp.virtual_devices(2), "sequential") == "WRONG: off by 0.5"


def test_seeds_and_loops():
    devices = fdp.virtual_devices(2)
    assert laws.seeds(devices, "sequential") == "right"
    with pytest.warns(UserWarning, match="Calls of this InPlace run on the module itself"):
        results = {name: step() for name, step in laws.loops(devices, "sequential")}
    assert len(results) == 10


def test_the_models_have_the_sizes_that_they_are_named_after():
    with torch.device("meta"):
        module = models.FULL["ResNet-50"].model()
    assert (len(list(module.parameters())), sum(p.numel() for p in module.parameters())) == (161, 25_557_032)


def test_steps_are_measured():
    rows = list(steps.measured_here(fdp.virtual_devices(2)))
    assert {row["model"] for row in rows} == {"ResNet-50", "GPT"}
    ours = [row for row in rows if row["way"].startswith("fdp")]
    assert len(ours) == 6
    assert all(row["ms"] > 0 for row in ours), ours


@pytest.mark.deep  # each step imports torch anew
@pytest.mark.parametrize("virtual", [0, 2])
def test_a_rehearsal(virtual: int, tmp_path: Path):
    arguments = ["--tiny", "--virtual", str(virtual), "--out", str(tmp_path)]
    assert first_hour.main(arguments) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [step["step"] for step in found] == list(first_hour.LIMITS)
    assert all(step["code"] == 0 and step["rows"] for step in found)
    text = (tmp_path / "results.md").read_text()
    assert "a rehearsal: the times say nothing" in text
    assert "WRONG" not in text


def test_a_step_that_hangs_shows_where():
    step = first_hour.run("hangs", 0.5, {})
    assert step["code"] != 0
    text = "\n".join(step["output"])
    assert re.search("Timeout.*\n(.*\n)*.*File", text), text


def test_the_table():
    row: dict[str, Any] = {"what": "a|b", "result": "right\nso"}
    steps = [
        {"step": "laws", "seconds": 1.0, "code": 0, "rows": [row]},
        {"step": "hangs", "seconds": 2.0, "code": 1, "rows": []},
    ]
    assert first_hour.table(steps, "two").split("\n") == [
        "Devices: two.",
        "",
        "**laws**: 1.0 s",
        "",
        "| what | result |",
        "|---|---|",
        "| a/b | right so |",
        "",
        "**hangs**: 2.0 s, FAILED",
        "",
    ]
