"""Waits for other processes inside of torch, in code that would not hear Ctrl-C."""

import atexit
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from fdp.distributed._notices import Notices

T = TypeVar("T")
_SLICE = 0.5  # seconds between looks at the limit
_LAST = 5.0  # seconds that the end of the program waits for torch, which may try once more after its limit


@final
class Wait:
    """For other processes, up to a limit."""

    def __init__(self, name: str, rank: int | str, limit: datetime.timedelta, notices: Notices) -> None:
        self._name, self._rank, self._limit, self._say = name, rank, limit.total_seconds(), notices.begin()
        self._end = time.monotonic() + self._limit + 1  # what torch says of the same limit comes first

    def goes_on(self, who: str) -> None:
        """Raises where it is over, and says after a while who is waited for."""
        if time.monotonic() > self._end:
            raise RuntimeError(f"no sign of {who}")
        start = f"fdp: {self._name}: process {self._rank} has waited"
        self._say(lambda seconds: f"{start} {seconds:.0f} s of at most {self._limit:g} s for {who}")

    def result_of(self, work: Callable[[], T], who: str) -> T:
        """What the work returns or raises, which is done in a thread."""
        found: list[tuple[Any, Exception | None]] = []

        def run() -> None:
            try:
                found.append((work(), None))
            except Exception as error:
                found.append((None, error))

        thread = threading.Thread(target=run, name="fdp-wait", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_SLICE)
                if thread.is_alive():
                    self.goes_on(who)
        finally:
            if thread.is_alive():  # one that comes back from C++ while Python ends would abort the process
                atexit.register(thread.join, _LAST)
        result, error = found[0]
        if error is not None:
            raise error
        return result
