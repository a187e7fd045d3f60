"""A process that waits long for others says so, once."""

import datetime
import logging
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from fdp.distributed import _meeting_place, init, launch
from fdp.distributed._epoch import Tag
from fdp.distributed._exchange import meet
from fdp.distributed._notices import Notices
from tests.distributed.pool import Pool


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def said_at(*seconds: float, begins: tuple[float, ...] = (0.0,)) -> list[float]:
    """When lines are said, if waits begin at these times, and each of them looks at these."""
    clock, found, waits = Clock(), list[float](), list[Any]()
    notices = Notices(10.0, 60.0, clock)
    for clock.now in sorted({*begins, *seconds}):
        if clock.now in begins:
            waits.append(notices.begin())
        for say in waits:
            say(lambda waited: found.append(clock.now) or "text")
    return found


def test_a_wait_is_told_once_after_a_while():
    assert said_at(9.0, 11.0, 12.0, 100.0) == [11.0]


def test_lines_are_a_minute_apart():
    assert said_at(11.0, 16.0, 70.0, 72.0, begins=(0.0, 5.0)) == [11.0, 72.0]


def test_nothing_is_said_of_a_wait_that_is_over(caplog: pytest.LogCaptureFixture):
    clock = Clock()
    say = Notices(10.0, 60.0, clock).begin()
    clock.now = 11.0
    say(lambda waited: None)
    assert not caplog.records
    say(lambda waited: f"waited {waited:g} s")
    assert [record.getMessage() for record in caplog.records] == ["waited 11 s"]


class Kept(logging.Handler):
    """Keeps what is logged, in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.path.write_text(record.getMessage())


def waits(mesh: Any, late: int, folder: Path) -> str:
    """What a process says that waits for one that comes when the others have said it."""
    paths = [folder / str(rank) for rank in range(len(mesh.slots))]
    kept, logger = Kept(paths[mesh.rank]), logging.getLogger("fdp.distributed")
    epoch = mesh.processes.world.epoch
    before, epoch.notices = epoch.notices, Notices(after=0.5)
    meet(epoch, Tag("all begin together"))
    logger.addHandler(kept)
    try:
        end = time.monotonic() + 7.0
        while mesh.rank == late and time.monotonic() < end:
            time.sleep(0.02)
            if sum(path.exists() for path in paths) == len(paths) - 1:
                break
        for _ in range(2):
            meet(epoch, Tag("this call"), [1, 2])
    finally:
        epoch.notices = before
        logger.removeHandler(kept)
    return paths[mesh.rank].read_text() if paths[mesh.rank].exists() else ""


def test_it_says_for_what_and_for_whom(two: Pool, tmp_path: Path):
    line, nothing = two(waits, 1, 1, tmp_path)
    assert re.fullmatch(r"fdp: this call: process 0 has waited \d s of at most 8 s for process 1", line), line
    assert nothing == ""


def test_it_says_who_has_come(four: Pool, tmp_path: Path):
    found = four(waits, 1, 2, tmp_path)
    assert found[2] == ""
    for rank in (0, 1, 3):
        others = ", ".join(str(other) for other in (0, 1, 3) if other != rank)
        assert found[rank].endswith(f"of at most 8 s for process 2. Process {others} has come"), found[rank]


class AskedFor:
    """A store in which this process is never answered."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.parametrize(("rank", "late"), [(0, "process 1, 2"), (1, "process 0")])
def test_init_says_for_whom_it_waits_and_hears_ctrl_c(
    rank: int, late: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(_meeting_place, "rendezvous", lambda *args, **options: iter([(AskedFor(), rank, 3)]))
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    hits = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    hits.start()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        _meeting_place.meeting_place(datetime.timedelta(seconds=20), Notices(after=0.1))
    hits.join()
    (record,) = caplog.records
    assert record.getMessage() == f"fdp: init: process {rank} has waited 0 s of at most 20 s for {late}"


def comes_late() -> None:
    logging.getLogger().handlers.clear()  # those of pytest, which a fork inherits
    with init(timeout=60.0) as mesh:
        if mesh.rank == 1:
            time.sleep(13.0)
        fdp.dp_apply(lambda _, x: x.sum(), None, torch.ones(4), mesh, out_dims="sum")


@pytest.mark.deep
def test_it_is_on_stderr_after_ten_seconds(capfd: pytest.CaptureFixture[str]):
    launch(comes_late, 2, timeout=60.0, start_method="fork")
    (line,) = capfd.readouterr().err.splitlines()
    start = "[rank 0] fdp: dp_apply: process 0 has waited 1"
    assert line.startswith(start)
    assert line.endswith(" s of at most 60 s for process 1")
