"""Contenders in processes of their own, which answer one request at a time over a pipe.

A contender alone in its process cannot change the threads, the allocator or the flags of another. While one runs the
others wait for a request and use no core.
"""

import contextlib
import importlib
import io
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from benchmarks.peers.models import Figures

PATIENCE = 300.0  # seconds for one answer: the first call of a compiled model takes the longest
PAUSE = 0.003  # before each measurement, for the idle threads of the one before, which spin for a moment


class Unavailable(Exception):
    """A contender that cannot run here, and why."""


class Job(NamedTuple):
    """What a process runs: one contender, or one rank of it."""

    module: str
    function: str
    rank: int
    slots: int
    threads: int
    rendezvous: str


class Case(NamedTuple):
    """One forward and backward, and how to read the loss and the gradients of what it returned."""

    step: Callable[[], Any]
    read: Callable[[Any], Figures]


class Contender:
    """The processes of a contender. `ask` sends a request to all of them and returns all answers."""

    def __init__(self, name: str, jobs: Sequence[Job]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._processes, self._pipes = [], []
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job), daemon=True)
            with _deaf():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def ask(self, request: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((request, args))
        answers = [self._answer(pipe, request) for pipe in self._pipes]
        for kind, value in answers:
            if kind == "unavailable":
                raise Unavailable(value)
            if kind == "failed":
                raise RuntimeError(f"{self.name} failed at {request!r}:\n{value}")
        return [value for _, value in answers]

    def measure(self, repeats: int) -> float:
        """Seconds a call, from when all its processes have started until all are done.

        Each has just ended a call that was not timed; the clock is one for all processes. So nothing is charged for
        the pipe, nor for a barrier that only the measurement would need.
        """
        time.sleep(PAUSE)
        spans = self.ask("run", repeats)
        return (max(end for _, end in spans) - max(start for start, _ in spans)) / repeats

    def dismiss(self) -> None:
        """Have all children end that wait for a request."""
        for pipe in self._pipes:
            pipe.close()

    def close(self, until: float) -> None:
        """End the children: kill those that are still there at this time of the monotonic clock."""
        self.dismiss()
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)

    def _answer(self, pipe: Connection, request: str) -> tuple[str, Any]:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"{self.name} did not answer {request!r} in {PATIENCE:.0f} s")
        try:
            return pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended at {request!r}") from None


@contextlib.contextmanager
def opened(jobs: dict[str, list[Job]]) -> Iterator[dict[str, Contender]]:
    """Start all contenders; end all their processes, whatever happens."""
    contenders: dict[str, Contender] = {}
    try:
        for name, each in jobs.items():
            contenders[name] = Contender(name, each)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.dismiss()
        until = time.monotonic() + 5
        for contender in contenders.values():
            contender.close(until)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C: the parent does, and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it would take the mask off
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection, job: Job) -> None:
    """What runs in the child: answer requests until the other end is closed."""
    torch.set_num_threads(job.threads)
    case = None
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            request, args = pipe.recv()
            try:
                if request == "load":
                    case = getattr(importlib.import_module(job.module), job.function)(job, *args)
                    answer = None
                else:
                    assert case is not None
                    answer = _figures(case) if request == "check" else _span(case, *args)
                pipe.send(("done", answer))
            except Unavailable as error:
                pipe.send(("unavailable", str(error)))
            except ModuleNotFoundError as error:
                pipe.send(("unavailable", f'{error.name} is not installed: pip install -e ".[bench]"'))
            except Exception:
                pipe.send(("failed", traceback.format_exc()))


def _figures(case: Case) -> bytes:
    """As bytes: a pipe would send tensors as handles of memory that ends with the child."""
    loss, grads = case.read(case.step())
    torch.save((loss, {name: grad.float() for name, grad in grads.items()}), file := io.BytesIO())
    return file.getvalue()


def _span(case: Case, repeats: int) -> tuple[float, float]:
    case.step()  # wakes threads, warms caches, and brings ranks together
    start = time.perf_counter()
    for _ in range(repeats):
        case.step()
    return start, time.perf_counter()
