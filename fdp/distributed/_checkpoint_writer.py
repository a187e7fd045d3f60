"""Writes that go on while the program does. Each ends before the next begins, and before the program does.

The thread is no daemon, so Python waits for it at the end of a program. Its error is raised by who waits for it. If
nobody does, the program ends with the error on stderr, and with status 1, as if it had been raised last.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import final

_SLICE = 0.2  # seconds: on some systems Python cannot look at signals while it waits
_UNDERWAY: dict[tuple[int, Path], "_Write"] = {}
"""By process and directory. A fork has copies of its parent's, and no threads that would end them."""
_HAS_END: set[int] = set()  # processes in which `_end` will run


@final
class _Write:
    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._begins = threading.Lock()  # taken once: by the thread, or by who does not let it begin
        # Not Thread.join: Ctrl-C there makes Python take a thread for ended, and end the process under it.
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="fdp-checkpoint")

    def _run(self) -> None:
        if not self._begins.acquire(blocking=False):
            return
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # and with it the state
            self._is_over.set()

    def cancel(self) -> None:
        """If it has not begun, it will not."""
        if self._begins.acquire(blocking=False):
            self._is_over.set()

    def wait(self) -> BaseException | None:
        while not self._is_over.wait(_SLICE):
            pass
        return self._error


def begin(directory: Path, work: Callable[[], object]) -> None:
    """Do some work beside the program. For each directory one at a time."""
    key = _key(directory)
    assert key not in _UNDERWAY
    if os.getpid() not in _HAS_END:
        Finalize(None, _end, exitpriority=0)  # not by atexit: processes of multiprocessing end without it
        _HAS_END.add(os.getpid())
    write = _Write(work)
    try:
        _UNDERWAY[key] = write
        write.thread.start()
    except BaseException:  # Ctrl-C: it may have begun, and what comes next has to wait for it
        write.cancel()
        raise


def wait(directory: Path) -> None:
    """Until what is underway for a directory is done; its error is raised, once."""
    key = _key(directory)
    write = _UNDERWAY.get(key)
    if write is not None:
        error = write.wait()
        if _UNDERWAY.pop(key, None) is not None and error is not None:  # else another thread has raised it
            raise error


def _key(directory: Path) -> tuple[int, Path]:
    return os.getpid(), directory.resolve()


def _end() -> None:
    """The end of the program: see above."""
    failed = False
    for directory in [directory for process, directory in list(_UNDERWAY) if process == os.getpid()]:
        try:
            wait(directory)
        except BaseException:
            traceback.print_exc()
            failed = True
    if failed:
        with contextlib.suppress(Exception):  # streams may be closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
