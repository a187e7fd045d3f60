"""Work that an interrupt cannot cut in two.

Python runs signal handlers in the main thread, after any of its bytecodes, and what they raise (KeyboardInterrupt)
ends what runs there. No code in that thread can rule this out. So what other threads depend on is done, for the main
thread, by a thread that no signal reaches. Any other thread does it itself.

What holds at any time:

- Work is done in the order in which the main thread asked for it, by one thread, also what nobody waits for (`soon`).
- Work that was handed over is done, whatever comes meanwhile: `shielded` returns or raises only after it. Handing over
  is one call of C, before which an interrupt means that nothing was begun.
- Work may wait for other threads, for a turn for instance. The main thread waits meanwhile, so nobody else needs the
  helper. It must not ask for shielded work itself; nothing does, because only the main thread is helped.

Both functions may be called from any thread and with locks held that the work does not take. `_ShieldedWork._over`
is a lock that is used as an event: nobody holds it. `_Helper._lock` is held for one look at a flag. A forked child
starts another helper.
"""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from fdp._placement.slot import start_apart

Work = Callable[[], None]


def shielded(work: Work) -> None:
    """Do it. An interrupt that comes meanwhile is raised when it is done."""
    if not _is_main():
        work()
        return
    helper, job = _HELPER, _ShieldedWork(work)
    helper.start()
    try:
        helper.jobs.put(job)  # no signal handler runs between the `try` and the end of this call
        job.wait()
    except BaseException:
        job.wait()
        raise
    error, job = job.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # no cycle


def soon(work: Work) -> None:
    """Do it, perhaps a little later, but before what is asked for afterwards. It must not raise."""
    if not _is_main():
        work()
        return
    _HELPER.start()
    _HELPER.jobs.put(_ShieldedWork(work))


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


@final
class _ShieldedWork:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.error: BaseException | None = None
        self._is_over = False
        self._over = threading.Lock()
        self._over.acquire()

    def do(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._is_over = True
            self._over.release()

    def wait(self) -> None:
        """Until it is done, however many interrupts come."""
        try:
            while not self._is_over:
                self._over.acquire()
        except BaseException:
            self.wait()
            raise


@final
class _Helper:
    """The thread that works for the main thread: one thing after the other."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_ShieldedWork] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_ready = False

    def start(self) -> None:
        if not self._is_ready:
            start_apart(threading.Thread(target=self._serve, name="fdp-shield", daemon=True))

    def _serve(self) -> None:
        with self._lock:  # an interrupt may have hidden from the main thread that there is one
            if self._is_ready:
                return
            self._is_ready = True
        while True:
            job = self.jobs.get()
            job.do()
            del job  # an idle thread keeps nothing alive


_HELPER = _Helper()


def _renew() -> None:
    """A forked child has none of its parent's threads."""
    global _HELPER
    _HELPER = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
