"""The example that is killed and goes on elsewhere: one loss curve, nothing left behind, and a slip is one message."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.common.programs import run_program

ROOT = Path(__file__).parents[2]
EXAMPLE, SCRIPT = "digits_elastic", ROOT / "examples" / "digits_elastic.py"
LIMIT = 120.0  # seconds after which the example is ended, with all that it has started


PROGRAM = f"""
import os, runpy, sys
from pathlib import Path

os.setsid()
Path({{group!r}}).write_text(str(os.getpid()))
os.environ |= {{{{"PYTHONPATH": {str(ROOT)!r}, "TMPDIR": {{temporary!r}}}}}}
sys.argv, sys.path[:0] = [{str(SCRIPT)!r}, *{{options}}], [{str(SCRIPT.parent)!r}]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@contextlib.contextmanager
def ended_group(path: Path) -> Iterator[Path]:
    """Where a program writes the number of its group of processes, which is ended at the latest afterwards."""
    try:
        yield path
    finally:
        if path.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(path.read_text()), signal.SIGKILL)


def is_there(group: int) -> bool:
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_that_is_killed_and_goes_on_elsewhere_has_the_losses_of_one_device(tmp_path: Path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ["--layouts", "1x2,2x1", "--steps", "20", "--output", str(tmp_path / "elastic.png")]
    with ended_group(tmp_path / "group") as group:
        done = run_program(PROGRAM.format(group=str(group), temporary=str(temporary), options=options), LIMIT)
        out = done.stdout
        assert done.returncode == 0, out + done.stderr
        assert not is_there(int(group.read_text()))
    parts = re.findall(r"(2 devices|2 × 1): steps (\d+) to (\d+), then (.*)", out)
    (_, first, killed, how), (_, resumed, last, end) = parts
    assert (first, how) == ("1", "process 0 was killed")
    assert 1 < int(resumed) <= int(killed) + 1 < 20
    assert (last, end) == ("20", "the end")
    found = re.search(r"Largest difference between the two loss curves: (.*)", out)
    assert found is not None
    assert float(found[1]) <= 1e-12
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own


def test_kills_are_repeatable_and_some_steps_apart(example: Any):
    layouts = example.layouts("1x1,1x4,2x2,1x3,2x3")
    found = example.kills(layouts, 120, 0)
    assert found == example.kills(layouts, 120, 0) != example.kills(layouts, 120, 1)
    assert found.pop() is None  # the last comes to the end
    steps = [0, *(kill.step for kill in found), 120]
    assert all(after - before >= 16 for before, after in pairwise(steps))
    assert all(kill.rank < on.processes for on, kill in zip(layouts, found, strict=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: [found[0]._replace(loss=found[0].loss + 1e-11), *found[1:]], "more than 1e-12"),
        (lambda found: [found[0]._replace(loss=float("nan")), *found[1:]], "more than 1e-12"),
        (lambda found: found[1:], "a step is missing"),
    ],
    ids=["another loss", "no number", "a step is missing"],
)
def test_a_disagreement_is_an_error(
    example: Any,
    change: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def numbers(steps: int) -> list[Any]:
        return [example.Note(1, step, 1 / (step + 1)) for step in range(steps)]

    def train(slots: int, folder: Path, steps: int, seed: int) -> None:
        for each in numbers(steps):
            example.write(folder / "rank-0", each)

    def run(on: Any, folder: Path, steps: int, seed: int, kill: Any) -> Any:
        return change(numbers(steps))

    monkeypatch.setattr(example, "train", train)
    monkeypatch.setattr(example, "run", run)
    assert example.main(["--layouts", "1x1,2x2", "--steps", "20", "--output", str(tmp_path / "elastic.png")]) == 1
    assert message in capsys.readouterr().err


def test_an_interrupt_is_one_line(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train", interrupted)
    assert example.main(["--output", str(tmp_path / "elastic.png")]) == 130
    assert capsys.readouterr().err == "digits_elastic.py: stopped\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "2"], "expected processes x slots, such as 1x4,2x3, got '2'"),
        (["--layouts", "1x1,0x2"], "expected processes x slots, such as 1x4,2x3, got '1x1,0x2'"),
        (["--layouts", "1x1,,2x2"], "expected processes x slots"),
        (["--layouts", ""], "expected processes x slots"),
        (["--steps", "49"], "--steps: expected at least 50, which is 10 a layout, got 49"),
        (["--output", "elastic.pdf"], "a name that ends in .png, got 'elastic.pdf'"),
    ],
)
def test_a_slip_is_one_message(example: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        example.main(options)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: digits_elastic.py [options]"
    assert message in error
