"""Some models after each other in a process, forked so that nothing is imported again, with limits."""

import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.zoo.check import ALONE, SLOW, Verdict, said, verdict
from benchmarks.zoo.model import Ways

SECONDS = 30  # of computing, for each model; on a busy machine that may take longer
PATIENCE = 20  # times as long by the clock
MEMORY = 8 * 2**30  # bytes besides what is mapped before
TOGETHER = 20  # models for a process: the first of each takes much longer than the others


class Running(NamedTuple):
    """A process, and the models that it has still to answer for."""

    process: Any
    names: list[str]
    end: float


def verdicts(
    names: Sequence[str], ways: Callable[[str], Ways], jobs: int, seconds: int = SECONDS
) -> Iterator[tuple[str, Verdict]]:
    """The verdict on each model, as they come."""
    torch.set_num_threads(1)  # also before a fork: threads of operations do not survive it
    waiting = [list(names[i : i + TOGETHER]) for i in range(0, len(names), TOGETHER)][::-1]
    running: dict[Connection, Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                pipe, process = _started(ways, waiting[-1], seconds)
                running[pipe] = Running(process, waiting.pop(), time.monotonic() + PATIENCE * seconds)
            ready = wait(list(running), timeout=0.5)
            for pipe, (process, left, end) in list(running.items()):
                if pipe not in ready and time.monotonic() < end:
                    continue
                found = _answer(pipe, process, seconds) if pipe in ready else Verdict(SLOW, "hangs")
                yield left.pop(0), found
                running[pipe] = Running(process, left, time.monotonic() + PATIENCE * seconds)
                if found.kind == SLOW or not left:
                    process.kill()
                    process.join()
                    del running[pipe]
                    waiting += [left] if left else []
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()


def _started(ways: Callable[[str], Ways], names: Sequence[str], seconds: int) -> tuple[Connection, Any]:
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, ways, list(names), seconds))
    process.start()
    theirs.close()
    return ours, process


def _answer(pipe: Connection, process: Any, seconds: int) -> Verdict:
    try:
        return Verdict(*pipe.recv())
    except EOFError:
        process.join()
    if process.exitcode == -signal.SIGPROF:
        return Verdict(SLOW, f"not done after {seconds} seconds")
    return Verdict(SLOW, f"its process ended with {process.exitcode}")


def _serve(pipe: Connection, ways: Callable[[str], Ways], names: Sequence[str], seconds: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    warnings.simplefilter("ignore")
    for name in names:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the whole process; it ends it
        try:
            found = verdict(ways(name))
        except BaseException as error:
            found = Verdict(ALONE, said(error))
        pipe.send(tuple(found))
