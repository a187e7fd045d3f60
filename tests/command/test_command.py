"""`python -m fdp`: exit codes, what is printed where, and what the checks find."""

import io
import json
import os
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from fdp.__main__ import main
from fdp._command import _balance, _copies, _hardware, _loopback, _results, _versions
from tests.common.programs import run_program
from tests.common.threads import many_cores

ROOT = Path(__file__).parents[2]
CPU, META = torch.device("cpu"), torch.device("meta")


def command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fdp", *arguments])
        return main()


# ---- the command line


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    assert command() == 2
    assert "doctor" in capsys.readouterr().out
    assert command("--version") == 0
    assert capsys.readouterr().out == f"fdp {fdp.__version__}\n"
    for name in ("doctor", "check"):
        assert command(name, "--help") == 0
        assert f"python -m fdp {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doktor"], "invalid choice"),
        (["doctor", "--devices", "cpu", "--virtual", "2"], "not allowed with"),
        (["doctor", "--virtual", "0"], "positive number of slots"),
        (["doctor", "--devices", "cuda:99"], "--devices: device 'cuda:99' is not available"),
        (["check"], "required"),
        (["bench"], "invalid choice: 'bench'"),
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
    assert done.stdout.startswith("[]\nusage: python -m fdp")


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "cpu_count", interrupted)
    assert command("doctor") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert command("--help") == 141


# ---- lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_unless_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    result = _results.Result("copies", "failed", "wrong contents " * 20 + "[bold]", "do this")
    result.show()
    plain = capsys.readouterr().out
    assert plain.isascii()
    assert "\x1b" not in plain
    assert "wrong contents " * 20 + "[bold]" in plain

    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    result.show()
    assert "\x1b[1;31mfailed" in terminal.getvalue()
    assert "[bold]" in terminal.getvalue()


# ---- doctor


def test_a_check_that_raises_has_failed_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> int:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(torch, "get_num_threads", broken)  # as a driver may be
    assert command("doctor", "--json", "--virtual", "3") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["fdp"], report["status"]) == (fdp.__version__, "failed")
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == ["versions", "devices", "balance", "copies", "threads", "distributed"]
    failed = checks.pop("threads")
    assert (failed["status"], failed["summary"]) == ("failed", "RuntimeError: no kernel image is available")
    for check in checks.values():
        assert check["status"] in ("ok", "warning"), check
        assert check["status"] == "ok" or check["advice"], check


def test_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [project["requires-python"].replace(">=", "python>="), *project["dependencies"]]
    stated = {name: bound for name, bound in (need.split(">=") for need in needs) if name in _versions.OLDEST}
    assert stated == {name: ".".join(map(str, bound)) for name, bound in _versions.OLDEST.items()}
    page = (ROOT / "docs" / "explanation" / "compatibility.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| 3.")]
    tested = {tuple(map(int, row[2].strip().split(".")))[:2] for row in rows}
    assert (min(tested), max(tested)) == (_versions.OLDEST["torch"], _versions.TESTED)


def test_versions():
    assert _versions.judge({"torch": "1.13.1"})[0] == "failed"
    assert _versions.judge({"torch": "99.0a0+git1234"})[0] == "warning"
    assert _versions.judge({"torch": "2.13.1+cu130", "optree": "unknown"}) == ("ok", None)


def test_balance():
    assert _balance.check_balance([CPU, CPU], lambda _: 3e9).status == "ok"
    assert _balance.check_balance([CPU, META], lambda _: 3e9).details["weights"] is None
    speeds = {CPU: 1e9, META: 4e9}
    result = _balance.check_balance([CPU, META, META], speeds.__getitem__)
    assert result.status == "warning"
    assert result.details["weights"] == [0.5, 1.0, 1.0]
    assert "weights=[0.5, 1.0, 1.0]" in (result.advice or "")
    assert _balance.product_rate(CPU) > 0


def test_devices():
    result = _hardware.check_devices([CPU, CPU])
    assert result.status == "ok"
    assert result.details["devices"]["cpu"]["cores"] >= 1
    text = _hardware.described({"name": "X", "memory": 2**34, "cores": 132, "capability": "9.0"})
    assert text == "X, 16.0 GiB, 132 multiprocessors, compute capability 9.0"


def test_copies_on_the_cpu():
    assert _copies.check_copies([CPU, CPU]).details["pairs"] == 0
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
        (lambda tensor, _: tensor[:1], "shape (1,), not (1024,)"),
    ],
    ids=["lost element", "stale memory", "error", "shape"],
)
def test_copies_that_go_wrong(move: _copies.Move, says: str):
    faults = list(_copies.faults_of([(CPU, CPU)], move))
    assert len(faults) == len(_copies.SIZES) * len(_copies.FORMS)
    assert faults[0].text == says


def test_threads(monkeypatch: pytest.MonkeyPatch):
    result = _hardware.check_threads()
    assert result.details["torch_threads"] == torch.get_num_threads()
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
    assert not result.details["gil"]
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    result = _hardware.check_threads()
    assert (result.status, "PYTHON_GIL=1" in str(result.advice)) == ("failed", True)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    result = _hardware.check_threads()
    assert (result.status, "PYTHON_GIL=0" in str(result.advice)) == ("warning", True)
    assert result.summary.endswith("Python runs with the GIL")


def test_processes_meet():
    result = _loopback.check_distributed(start_method="fork")
    assert result.status == "ok"
    assert result.summary.endswith("2 processes meet over gloo")
    assert set(result.details["backends"]) <= {"gloo", "nccl", "mpi", "ucc", "xccl"}


def comes_late() -> int:
    time.sleep(600)
    return 1


def fails() -> int:
    if os.environ["RANK"] == "1":
        raise OSError("no sockets here")
    return comes_late()


def finds_another_sum() -> int:
    return 14


@pytest.mark.parametrize(
    ("program", "seconds", "says"),
    [
        (comes_late, 1.0, "rank 0, 1 of 2 had not returned after 1 s"),
        (fails, 60.0, "rank 1 raised OSError: no sockets here"),
        (finds_another_sum, 60.0, "the sums of ranks are [14, 14], not [1, 1]"),
    ],
)
def test_processes_that_do_not_meet(program: Callable[[], int], seconds: float, says: str):
    result = _loopback.check_distributed(program, seconds, "fork")
    assert result.status == "failed"
    assert says in result.summary
    assert "\n" not in result.summary


# ---- check

MODULE = """
import torch

def loss(params, x, y):
    print("from the function")
    return torch.nn.functional.cross_entropy(x @ params, y)

def columns(params, x):
    return (x @ params).softmax(0)

def raising(params, x):
    raise KeyError("the user's own")

def asserting(params, x):
    assert x.shape == (1, 1), "the user's own"

def sample_inputs():
    return torch.eye(3)[:, :2], (torch.randn(7, 3), torch.arange(7) % 2)

def one_input():
    return torch.eye(3)[:, :2], torch.arange(21.0).view(7, 3).sin()

with_options = *one_input(), {"slots": (2,), "dtype": torch.float64}
misspelt = *one_input(), {"slot": (2,)}
flat = *one_input(), torch.arange(7)
number, one = 3, (torch.eye(3),)

def none():
    raise LookupError("the user's own")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, under a name that no other test has imported."""
    name = f"module_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize("suffix", ["", ".py"])
def test_function_that_passes(suffix: str, module: str, capsys: pytest.CaptureFixture[str]):
    assert command("check", f"{module}{suffix}:loss") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"ok  {module}{suffix}:loss gives on 1, 2, 3 and 4 slots what it gives on one device"
    assert command("check", f"{module}{suffix}:loss", "--json", "--virtual", "2") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "command": "check",
        "function": f"{module}{suffix}:loss",
        "status": "ok",
        "slots": [1, 2],
        "report": None,
    }
    assert "from the function" in said.err


@pytest.mark.parametrize("samples", ["one_input", "with_options"])
def test_function_that_differs(samples: str, module: str, capsys: pytest.CaptureFixture[str]):
    assert command("check", f"{module}:columns", "--samples", samples) == 1
    assert "assert_data_parallel: out differs on 2 slots" in capsys.readouterr().out
    assert command("check", f"{module}:columns", "--samples", f"{module}:{samples}", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "failed"
    assert "out differs on 2 slots" in document["report"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nothing_here:loss", "there is no module 'nothing_here', seen from"),
        ("nothing_here.py:loss", "there is no file nothing_here.py, seen from"),
        ("train", "'train' names no function: write package.module:NAME"),
        ("train.py", "'train.py' names no function: write train.py:NAME"),
        ("M:los", "M has no 'los'. Did you mean loss?"),
        ("M:number", "M:number is no function, but a int"),
        ("M:raising --samples one_input", 'in raising\n    raise KeyError("the user\'s own")'),
        ("M:asserting --samples one_input", "cannot be checked: AssertionError: the user's own"),
        ("M:columns", "columns() takes 2 positional arguments but 3 were given"),
        ("math:hypot", "math has no 'sample_inputs': write there a function sample_inputs() that returns"),
        ("M:loss --samples nowhere:samples", "there is no module 'nowhere'"),
        ("M:loss --samples number", "gives int; expected (params, inputs) or (params, inputs, options)"),
        ("M:loss --samples one", "gives (Tensor); expected (params, inputs)"),
        ("M:loss --samples none", "M:none() raised LookupError: the user's own"),
        ("M:loss --samples misspelt", "assert_data_parallel() got an unexpected keyword argument 'slot'"),
        (
            "M:loss --samples flat",
            "gives (Tensor, Tensor, Tensor); expected (params, inputs) or",
        ),
        ("M:columns --samples one_input --virtual 0", "positive number of slots"),
    ],
)
def test_what_cannot_be_checked(arguments: str, says: str, module: str, capsys: pytest.CaptureFixture[str]):
    assert command("check", *arguments.replace("M:", f"{module}:").split()) == 2
    said = capsys.readouterr()
    assert says.replace("M:", f"{module}:").replace("M has", f"{module} has") in said.err
    assert "Traceback" not in said.err
    assert "_command" not in said.err  # no frames of the library
    assert said.out == ""


def test_module_that_cannot_be_imported(module: str, capsys: pytest.CaptureFixture[str]):
    for text, says in (("import nothing_at_all", "No module named 'nothing_at_all'"), ("def f(:", "SyntaxError")):
        Path(f"{module}_broken.py").write_text(text)
        assert command("check", f"{module}_broken.py:f") == 2
        assert says in capsys.readouterr().err
    Path(f"{module}_exits.py").write_text("import sys; sys.exit(0)")
    assert command("check", f"{module}_exits:f", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "error"
    assert "SystemExit: 0" in document["report"]


def test_function_that_ends_the_program(module: str, capsys: pytest.CaptureFixture[str]):
    text = "import sys, torch\ndef f(p, x): sys.exit(0)\ndef sample_inputs(): return None, torch.ones(3, 2)\n"
    Path(f"{module}_ends.py").write_text(text)
    assert command("check", f"{module}_ends:f") == 2
    assert "SystemExit" in capsys.readouterr().err
