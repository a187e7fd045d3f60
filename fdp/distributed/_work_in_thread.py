"""Long waits: work in threads, since torch does not hear Ctrl-C, and a line on stderr that says what is waited for."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_LOGGER = logging.getLogger("fdp.distributed")
_AFTER, _APART = 10.0, 60.0  # seconds of a wait until a line is said, and seconds between two lines
_LAST = 5.0  # seconds that the end of the program waits for a thread
_THREADS: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_told = float("-inf")


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """What the work returns or raises, some time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="fdp-wait", daemon=True)
    _THREADS.add(thread)
    thread.start()
    return future


def tell(began: float, text: Callable[[float], str]) -> None:
    """Say it on stderr, with the seconds since a wait began, if it is time."""
    global _told
    now = time.monotonic()
    if now > began + _AFTER and now > _told + _APART:
        _told = now
        _LOGGER.warning("%s", text(now - began))  # on stderr, unless the program has set up something else


@atexit.register
def _join() -> None:
    """A thread that comes back from C++ while Python ends would abort the process."""
    end = time.monotonic() + _LAST
    for thread in list(_THREADS):
        thread.join(max(0.0, end - time.monotonic()))
