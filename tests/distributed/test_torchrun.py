"""For real: the example under torchrun, ranks that raise, are killed or stall, and slips at the start.

Every process here ends by itself or at a hard limit. What needs no torchrun runs under `launch`, which starts at once.
"""

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch

import fdp
from fdp.distributed import init, launch

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds after which a run is ended, whatever it does
SAME = 1e-9  # of losses in float64: sums in another order differ by some 1e-16


# ---- torchrun and its workers


class Torchrun:
    """`torchrun` with two workers, which is gone at the end with all of them."""

    def __init__(self, *args: str | Path, restarts: int = 0) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed at the end)
        self._process = subprocess.Popen(
            [*command, "--max-restarts", str(restarts), *map(str, args)],
            env=environment,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    def workers(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if path.name.isdecimal() and parent == self._process.pid:
                    variables = (path / "environ").read_bytes().split(b"\0")
                    (rank,) = (int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK="))
                    found[rank] = int(path.name)
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.workers()[rank], signal.SIGKILL)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert self._process.poll() is None, self.out()
            assert time.monotonic() < end, self.out()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Wait for it; the exit status and what all have written."""
        try:
            return self._process.wait(LIMIT), self.out()
        except subprocess.TimeoutExpired:
            raise AssertionError(self.out()) from None

    def out(self) -> str:
        self._out.seek(0)
        return self._out.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process.poll() is None:
            workers = self.workers()
            self._process.terminate()  # it ends its workers
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                for pid in [self._process.pid, *workers.values()]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.wait()
        self._out.close()


# ---- the example


EXAMPLE = ROOT / "examples" / "digits_mesh.py"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    for package in ("matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        yield importlib.import_module("digits_mesh")
    torch.set_num_threads(before)


def losses(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().splitlines()]


def steps(directory: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return sorted(int(path.stem.split("-")[2]) for path in directory.glob("*.pt"))


def cut_newest(directory: Path) -> None:
    newest = max(directory.glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1000])


class Run(NamedTuple):
    """What a run under torchrun has printed, and its losses."""

    out: str
    losses: list[float]


@pytest.fixture(scope="module")
def one(example: Any, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one device."""
    path = tmp_path_factory.mktemp("one") / "losses"
    assert example.main(["--epochs", "3", "--losses", str(path)]) == 0
    return losses(path)


@pytest.fixture(scope="module")
def killed(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two processes with two slots each, of which one is killed.

    They begin with what another run left behind, of which the newest checkpoint has been cut short.
    """
    directory = tmp_path_factory.mktemp("killed")
    options = ["--every", "5", "--checkpoints", str(directory)]
    assert example.main(["--epochs", "1", *options]) == 0
    assert steps(directory) == [10, 15]
    cut_newest(directory)

    options += ["--epochs", "3", "--losses", str(directory / "losses")]
    with Torchrun(EXAMPLE, "--devices", "2", *options, restarts=2) as torchrun:
        torchrun.until(lambda: max(steps(directory)) >= 20)
        torchrun.kill(0)  # the one that writes the checkpoints
        status, out = torchrun.end()
    assert status == 0, out
    return Run(out, losses(directory / "losses"))


def test_the_same_losses_at_three_scales(example: Any, tmp_path: Path):
    options = ["--epochs", "1", "--losses"]
    assert example.main(["--devices", "4", *options, str(tmp_path / "four")]) == 0
    two = ["--devices", "2", *options, str(tmp_path / "two")]
    assert launch(example.main, 2, two, timeout=LIMIT, start_method="fork") == [0, 0]
    assert example.main([*options, str(tmp_path / "one")]) == 0
    one = losses(tmp_path / "one")
    assert len(one) == 15
    assert one[-1] < 0.5 * one[0]
    assert losses(tmp_path / "four") == pytest.approx(one, rel=0, abs=SAME)
    assert losses(tmp_path / "two") == pytest.approx(one, rel=0, abs=SAME)


@pytest.mark.deep
def test_a_run_whose_rank_is_killed_ends_as_if_nothing_had_happened(killed: Run, one: list[float]):
    assert killed.out.count("Mesh(process 0 of 2, 2 slots on cpu x 2)") == 2  # once, and once after the restart
    assert "is damaged or cut short: trying the one before" in killed.out
    begun = [int(step) for step in re.findall(r"going on from step (\d+)", killed.out)]
    assert begun[0] == 10
    assert begun[1] >= 20
    assert len(begun) == 2
    assert killed.losses == pytest.approx(one, rel=0, abs=SAME)


def test_a_run_goes_on_in_another_number_of_processes(example: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    directory = tmp_path / "checkpoints"
    options = ["--batch-size", "200", "--every", "3", "--checkpoints", str(directory), "--epochs"]
    assert launch(example.main, 2, [*options, "1"], timeout=LIMIT, start_method="fork") == [0, 0]
    assert steps(directory) == [3, 6]
    assert example.main(["--devices", "3", *options, "2"]) == 0
    assert steps(directory) == [12, 15]
    last = ["--devices", "2", *options, "3", "--losses", str(tmp_path / "changed")]
    assert launch(example.main, 2, last, timeout=LIMIT, start_method="fork") == [0, 0]
    out = capfd.readouterr().out
    assert re.findall(r"going on from step (\d+)", out) == ["6", "15"]
    assert re.findall(r"process 0 of \d", out) == ["process 0 of 2", "process 0 of 1", "process 0 of 2"]

    assert example.main([*options[:2], "--epochs", "3", "--losses", str(tmp_path / "one")]) == 0
    one = losses(tmp_path / "one")
    assert len(one) == 24
    assert losses(tmp_path / "changed") == pytest.approx(one, rel=0, abs=SAME)


@pytest.mark.parametrize(("option", "value"), [("--devices", "0"), ("--every", "0"), ("--epochs", "two")])
def test_a_slip_is_one_message(example: Any, option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main([option, value])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: digits_mesh.py [options]"
    assert re.search(rf"{option}: expected a whole number from 1 to \d+, got '{value}'", error)


# ---- a rank that fails


FAILS = """
import time
import torch
import fdp

def work(_, x):
    if mesh.rank == 1:
        raise ValueError("this one")
    return x.sum()

with fdp.distributed.init(timeout=60) as mesh:
    try:
        fdp.dp_apply(work, None, torch.ones(4), mesh, out_dims="sum")
    except ValueError:
        time.sleep(1)  # torchrun ends the others as soon as this one has ended: let them say something
        raise
"""


@pytest.mark.deep
def test_a_rank_that_raises_takes_the_job_down(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    start = time.monotonic()
    with Torchrun(script) as torchrun:
        status, out = torchrun.end()
    assert time.monotonic() - start < 45
    assert status == 1
    assert 'raise ValueError("this one")' in out
    assert "ValueError: this one" in out
    assert re.search(r"RuntimeError: .*dp_apply.* in process 0 fails: process 1 has raised ValueError: this one", out)


def said(work: Callable[[], object]) -> str:
    try:
        return f"nothing: {work()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def total(_: None, x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def stalls(where: str) -> None:
    with init(timeout=1) as mesh:

        def slow(_: None, x: torch.Tensor) -> torch.Tensor:
            if mesh.rank == 1:
                time.sleep(60)
            return x.sum()

        def slow_before_a_collective(_: None, x: torch.Tensor) -> torch.Tensor:
            return fdp.psum(slow(_, x))

        if where == "outside" and mesh.rank == 1:
            time.sleep(60)
        fn = {"outside": total, "in the function": slow, "in front of a collective": slow_before_a_collective}[where]
        fdp.dp_apply(fn, None, torch.ones(4), mesh, out_dims="sum")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("outside", "dp_apply"),
        ("in the function", "the end of dp_apply"),
        ("in front of a collective", "psum"),
    ],
)
def test_nobody_waits_longer_than_the_limit_for_a_rank_that_stalls(where: str, what: str):
    start = time.monotonic()
    message = rf"rank 0 raised RuntimeError: {what}: process 0 could not reach all .* within the 1 seconds of"
    with pytest.raises(RuntimeError, match=message):
        launch(stalls, 2, where, timeout=30, start_method="fork")
    assert time.monotonic() - start < 15


# ---- slips at the start


def in_process(variables: dict[str, str | None], **options: Any) -> tuple[str, float]:
    """What `init` says with some environment variables, and after how many seconds."""
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
    start = time.monotonic()
    return said(lambda: init(**options)), time.monotonic() - start


def joining(rank: int, port: int) -> dict[str, str | None]:
    """As a process of two that torchrun's agent does not help to meet."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": None,
    }


def refused(variables: dict[str, str | None], **options: Any) -> tuple[str, float]:
    (found,) = launch(lambda: in_process(variables, **options), 1, timeout=4, start_method="fork")
    return found


@pytest.mark.parametrize(("rank", "in_use"), [(0, True), (1, True), (0, False)])
def test_a_port_in_use_and_a_process_that_nobody_joins(rank: int, in_use: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it never answers
        port = listener.getsockname()[1]
        if not in_use:
            listener.close()
        message, seconds = refused(joining(rank, port), timeout=1.0)
    assert message.startswith(
        f"RuntimeError: init: process {rank} of 2 did not meet the others at 127.0.0.1:{port} in "
    )
    assert "Is the port free" in message
    assert seconds < 10


@pytest.mark.parametrize(
    ("missing", "backend", "message"),
    [
        (("MASTER_ADDR", "MASTER_PORT"), None, "ValueError: init: RANK is set, but not MASTER_ADDR, MASTER_PORT."),
        (("WORLD_SIZE",), None, "ValueError: init: RANK is set, but not WORLD_SIZE. Start the program by torchrun"),
        ((), "carrier-pigeon", "ValueError: init: there is no backend 'carrier-pigeon' here; there is "),
        ((), "cpu:gloo,cuda:no", "ValueError: init: there is no backend 'no' here"),
        ((), 2, "TypeError: init: backend must be a name such as 'gloo', got 2. Devices are init(devices=...)"),
    ],
)
def test_slips_that_need_nobody_else(missing: Sequence[str], backend: Any, message: str):
    found, seconds = refused(joining(0, 1) | dict.fromkeys(missing), backend=backend, timeout=5.0)
    assert message in found
    assert seconds < 1
