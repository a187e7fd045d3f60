"""Each model in a process of its own, forked so that nothing is imported again, with limits of time and memory."""

import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.check import ALONE, SLOW, Verdict, said, verdict
from benchmarks.zoo.model import Ways

SECONDS = 30  # of computing; on a busy machine that may take longer
PATIENCE = 20  # times as long by the clock
MEMORY = 4 * 2**30  # bytes besides what is mapped before


def verdicts(
    names: Sequence[str], ways: Callable[[str], Ways], jobs: int, seconds: int = SECONDS
) -> Iterator[tuple[str, Verdict]]:
    """The verdict on each model, as they come."""
    torch.set_num_threads(1)  # also before a fork: threads of operations do not survive it
    context: Any = multiprocessing.get_context("fork")
    waiting, running = list(reversed(names)), dict[Connection, tuple[str, Any, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                name = waiting.pop()
                process = context.Process(target=_serve, args=(theirs, ways, name, seconds))
                process.start()
                theirs.close()
                running[ours] = name, process, time.monotonic() + PATIENCE * seconds
            ready = wait(list(running), timeout=0.5)
            for pipe, (name, process, end) in list(running.items()):
                if pipe in ready:
                    yield name, _answer(pipe, process, seconds)
                elif time.monotonic() > end:
                    yield name, Verdict(SLOW, f"not done after {PATIENCE * seconds} seconds by the clock")
                else:
                    continue
                process.kill()
                process.join()
                del running[pipe]
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def _answer(pipe: Connection, process: Any, seconds: int) -> Verdict:
    try:
        return Verdict(*pipe.recv())
    except EOFError:
        process.join()
    if process.exitcode == -signal.SIGXCPU:
        return Verdict(SLOW, f"not done after {seconds} seconds")
    return Verdict(SLOW, f"its process ended with {process.exitcode}")


def _serve(pipe: Connection, ways: Callable[[str], Ways], name: str, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    mapped = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    warnings.simplefilter("ignore")
    try:
        found = verdict(ways(name))
    except BaseException as error:
        found = Verdict(ALONE, said(error))
    pipe.send(tuple(found))
