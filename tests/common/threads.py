"""Shards side by side as on a larger machine, and calls that may hang."""

import contextlib
import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fdp

HAS_LOCK: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether Python runs in one thread at a time, as it does unless it was built without its lock."""


def wake_workers() -> None:
    """Without Python's lock: have workers let go of objects that they have made, and other threads have dropped.

    There a thread alone frees what it has made, and looks for that when it runs Python, so not while it waits for work.
    One may let go of what another has made, so they are woken more than once.
    """
    count = max(2, sum(thread.name == "fdp-slot" for thread in threading.enumerate()))
    for _ in range(0 if HAS_LOCK else 3):
        fdp.dp_apply(lambda _, x: x * fdp.psum(1), None, torch.ones(count), fdp.virtual_devices(count))


@contextlib.contextmanager
def many_cores(count: int = 4) -> Iterator[None]:
    """As many shards at once as on a machine with that many cores."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # where something is compiled, the first shards run alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)), raising=False)
        yield


@contextlib.contextmanager
def side_by_side(count: int = 4) -> Iterator[None]:
    """`many_cores`, whose threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with many_cores(count):
            yield
    finally:
        sys.setswitchinterval(before)


def has_all_cores() -> bool:
    """Whether a call gets as many threads as there are cores: no call before it has left one reserved."""
    meeting = threading.Barrier(4)

    def meet(_: object, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(10)
        return x

    with many_cores(4):
        fdp.dp_apply(meet, None, torch.arange(4), fdp.virtual_devices(4), executor="threads")
    return not meeting.broken


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises; fail if it does neither in time, and show where all threads stand."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        pytest.fail("it hangs:\n" + "\n\n".join(stacks))
    result, error = found.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error
    return result
