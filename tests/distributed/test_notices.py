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
from fdp.distributed import _meeting_place, _work_in_thread, init, launch
from fdp.distributed._exchange import meet
from fdp.distributed._reports import Tag
from tests.distributed.pool import Pool


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([(0, 9), (0, 11), (0, 12), (0, 70), (0, 72)], [11, 72]),  # once after a while, and then a minute later
        ([(0, 11), (5, 16), (5, 70), (5, 72)], [11, 72]),  # also of other waits
        ([(0, 9), (9, 18), (18, 28.5)], [28.5]),  # nothing of a wait that is over
    ],
)
def test_when_lines_are_said(waits: Any, expected: list[float], monkeypatch: pytest.MonkeyPatch):
    found = list[float]()
    monkeypatch.setattr(_work_in_thread, "_told", float("-inf"))
    for began, now in waits:
        monkeypatch.setattr(_work_in_thread.time, "monotonic", lambda now=now: now)
        _work_in_thread.tell(began, lambda seconds, now=now: found.append(now) or "text")
    assert found == expected


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
    before, _work_in_thread._AFTER, _work_in_thread._told = _work_in_thread._AFTER, 0.5, float("-inf")
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
        _work_in_thread._AFTER = before
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
    monkeypatch.setattr(_work_in_thread, "_AFTER", 0.1)
    monkeypatch.setattr(_work_in_thread, "_told", float("-inf"))
    hits = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    hits.start()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        _meeting_place.meeting_place(datetime.timedelta(seconds=20))
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
