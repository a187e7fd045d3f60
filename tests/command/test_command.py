"""`python -m fdp`: exit codes, what is printed where, and what the checks find."""

import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fdp
from fdp.__main__ import main
from fdp._command import _copies, _hardware, _versions
from tests.common.programs import run_program
from tests.common.threads import many_cores

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def command(*arguments: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fdp", *arguments])
        try:
            return main()
        except SystemExit as end:
            return end.code


# ---- the command line


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    assert command("--version") == 0
    assert capsys.readouterr().out == f"fdp {fdp.__version__}\n"
    assert command("doctor", "--help") == 0
    assert "usage: python -m fdp doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "arguments are required: COMMAND"),
        (["doktor"], "invalid choice"),
        (["doctor", "--devices", "cuda:99"], "--devices: device 'cuda:99' is not available"),
        (["doctor", "--devices", ""], "--devices: '' is no device"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert command(*arguments) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_module_runs_and_the_package_does_not_import_it():
    code = (
        "import fdp, runpy, sys\n"
        "print([name for name in sys.modules if name.startswith(('fdp._command', 'rich'))])\n"
        "runpy.run_module('fdp', run_name='__main__')"
    )
    done = run_program(code)
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr.startswith("usage: python -m fdp")


# ---- doctor


def test_a_machine_that_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert command("doctor", "--devices", "cpu,cpu") == 0
    found = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[:2] for line in found] == [
        ["ok", name] for name in ("versions", "devices", "copies", "threads")
    ]
    assert f"fdp {fdp.__version__}, torch 2.13.0, optree " in found[0]
    assert found[1] == "ok       devices   cpu"


def test_a_check_that_raises_has_failed_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(torch, "equal", broken)  # as a driver may be
    assert command("doctor", "--devices", "cpu") == 1
    out = capsys.readouterr().out
    assert "failed   devices   RuntimeError: no kernel image is available\n" in out
    assert " " * 19 + "-> the error is torch's" in out
    assert "ok       copies    only the CPU: nothing is copied between devices" in out


def test_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [project["requires-python"].replace(">=", "python>="), *project["dependencies"]]
    stated = {name: bound for name, bound in (need.split(">=") for need in needs) if name in _versions.OLDEST}
    assert stated == {name: ".".join(map(str, bound)) for name, bound in _versions.OLDEST.items()}
    page = (ROOT / "docs" / "explanation" / "compatibility.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| 3.")]
    tested = {tuple(map(int, row[2].strip().split(".")))[:2] for row in rows}
    assert (min(tested), max(tested)) == (_versions.OLDEST["torch"], _versions.TESTED)


@pytest.mark.parametrize(
    ("version", "status", "advice"),
    [
        ("1.13.1", "failed", "fdp needs torch 2.11 or newer: upgrade it"),
        ("2.9.1", "failed", "fdp needs torch 2.11 or newer: upgrade it"),
        ("2.13.1+cu130", "ok", ""),
        ("99.0a0+git1234", "warning", "fdp was tested up to torch 2.15: run your tests, or install that version"),
    ],
)
def test_versions(version: str, status: str, advice: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", version)
    result = _versions.check_versions("0.1.0")
    assert (result.status, result.advice) == (status, advice)
    assert f"torch {version}" in result.summary


def test_devices(monkeypatch: pytest.MonkeyPatch):
    result = _hardware.check_devices([CPU])
    assert (result.status, result.summary) == ("ok", "cpu")
    assert result.lines[0].startswith("cpu: ")
    with monkeypatch.context() as patch:
        patch.setattr(_hardware, "warn_of_imbalance", lambda _: warnings.warn("GPU 1 is small", stacklevel=1))
        result = _hardware.check_devices([CPU])
    assert (result.status, result.advice) == ("warning", "GPU 1 is small")
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    result = _hardware.check_devices([CPU])
    assert (result.status, result.lines[1]) == ("failed", "cpu: a product of matrices is wrong")
    assert "do not use cpu" in result.advice


def test_what_is_said_of_a_device(monkeypatch: pytest.MonkeyPatch):
    modules: Any = {
        "cuda": SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(name="X", total_memory=2**34))
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules.get(device.type))
    assert _hardware.described(torch.device("cuda:1")) == "X, 16.0 GiB"
    assert _hardware.described(torch.device("mps")) == "mps"


def test_copies_on_the_cpu():
    assert _copies.check_copies([CPU, CPU]).summary == "only the CPU: nothing is copied between devices"
    assert list(_copies.faults_of([(CPU, CPU)], lambda tensor, _: tensor.clone())) == []


def lost_element(tensor: torch.Tensor, _: torch.device) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(-1)[-1] = 0
    return copy


def stale_memory() -> _copies.Move:
    """What the copy before has left: https://github.com/pytorch/pytorch/issues/87363."""
    last: dict[Any, torch.Tensor] = {}

    def move(tensor: torch.Tensor, _: torch.device) -> torch.Tensor:
        before = last.get(tensor.shape, torch.zeros_like(tensor))
        last[tensor.shape] = tensor.clone()
        return before

    return move


def failing(tensor: torch.Tensor, _: torch.device) -> torch.Tensor:
    raise RuntimeError("peer access is not supported")


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (lost_element, "1 of 1024 elements wrong, from element 1023 on"),
        (stale_memory(), "1024 of 1024 elements wrong, from element 0 on"),
        (failing, "RuntimeError: peer access is not supported"),
    ],
    ids=["lost element", "stale memory", "error"],
)
def test_copies_that_go_wrong(move: _copies.Move, says: str):
    faults = list(_copies.faults_of([(CPU, CPU)], move))
    assert len(faults) == len(_copies.SIZES) * len(_copies.FORMS)
    assert faults[0] == ("cpu -> cpu", f"4096 bytes, contiguous: {says}")


def test_threads(monkeypatch: pytest.MonkeyPatch):
    result = _hardware.check_threads()
    assert f"torch uses {torch.get_num_threads()} threads on " in result.summary
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    with many_cores(2):
        result = _hardware.check_threads()
    assert (result.status, result.advice) == (
        "warning",
        "more threads than cores slow torch down: set OMP_NUM_THREADS=2",
    )
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    result = _hardware.check_threads()
    assert result.status == "ok"
    assert result.summary.endswith("Python runs without the GIL")
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    result = _hardware.check_threads()
    assert (result.status, "PYTHON_GIL=1" in result.advice) == ("failed", True)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    result = _hardware.check_threads()
    assert (result.status, "PYTHON_GIL=0" in result.advice) == ("warning", True)
    assert result.summary.endswith("Python runs with the GIL")
