"""What may go wrong where Python runs without its lock, and hardly ever elsewhere."""

import contextlib
import contextvars
import os
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.common.programs import ROOT
from tests.common.threads import many_cores, wake_workers

W, X = torch.ones(()), torch.ones(4)


@contextlib.contextmanager
def meanwhile(work: Callable[[int], object]) -> Iterator[None]:
    """Another thread does this again and again, with the numbers from 0 on."""
    is_over, errors = threading.Event(), []

    def run() -> None:
        number = 0
        while not is_over.is_set():
            try:
                work(number)
            except Exception as error:
                errors.append(error)
                return
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert errors == []


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has its lock always")
def test_the_lock_stays_off():
    """No module that fdp imports switches it on, as one would that was not made for this."""
    program = (
        "import sys, torch, fdp, fdp.nn, fdp.distributed, fdp.testing\n"
        "w, x = torch.ones(()), torch.ones(4)\n"
        "fdp.dp_apply(torch.mul, w, x, fdp.virtual_devices(4), executor='threads')\n"
        "fdp.grad(lambda w, x: (w * fdp.psum(x)).mean(), devices=fdp.virtual_devices(4))(w, x)\n"
        "print(sys._is_gil_enabled())\n"
    )
    own = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"} | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", program], env=own, text=True, timeout=120) == "False\n"


def test_a_worker_keeps_nothing_of_the_context_that_it_was_started_in():
    """Without its lock Python gives a new thread a copy of it."""

    class Value:
        pass

    def call(value: Value) -> None:
        contextvars.ContextVar[Value]("kept").set(value)
        workers = sum(thread.name == "fdp-slot" for thread in threading.enumerate())
        with many_cores(workers + 2):
            slots = fdp.virtual_devices(workers + 2)
            fdp.dp_apply(lambda w, x: w * fdp.psum(x), W, torch.ones(workers + 2), slots)

    value = Value()
    found = weakref.ref(value)
    contextvars.Context().run(call, value)
    del value
    wake_workers()
    end = time.monotonic() + 10
    while found() is not None and time.monotonic() < end:  # a thread has passed the baton on before it lets go
        time.sleep(0.001)
    assert found() is None


def test_functional_calls_of_many_modules_at_once():
    """Each forgets what calls inside of it have left in a table of all modules."""
    deep = nn.Sequential(*[nn.Identity() for _ in range(300)])

    def others(number: int) -> None:
        for _ in range(20):
            fdp.functional_call(nn.Identity(), {}, X)

    with meanwhile(others):
        for _ in range(50):
            assert fdp.functional_call(deep, {}, X) is X


class Counting(nn.Module):
    """Has a container to which others write."""

    def __init__(self, box: Any) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("kind", [OrderedDict, deque, set])
def test_a_container_that_another_thread_writes_to(kind: Callable[[], Any]):
    box = kind()
    for key in range(500):
        put(box, key)
    apply, state = fdp.functional(Counting(box))
    with meanwhile(lambda number: put(box, number % 1000)):
        for _ in range(100):
            assert apply(state, X)[0] is X


def put(box: Any, key: int) -> None:
    """Put something in or take it out again, so that the size stays about the same."""
    if isinstance(box, deque):
        box.append(key)
        if len(box) > 500:
            box.popleft()
    elif key in box:
        box.discard(key) if isinstance(box, set) else box.pop(key)
    else:
        box.add(key) if isinstance(box, set) else box.setdefault(key)
