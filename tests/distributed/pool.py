"""Processes that stay for all tests: each test runs functions of its module in them, with a mesh."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Self

import torch

import fdp

LIMIT = 60.0  # seconds that a function may take before the pool is ended
PATIENCE = 8.0  # seconds that a process waits for the others


def prepared() -> ForkServerContext:
    """Where processes come from that have imported everything already: there is one server of them for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.imported"])
    return context


class Pool:
    """`pool(fn, slots)` runs `fn(mesh)` in each process, with so many slots in each, and returns what each returned."""

    def __init__(self, count: int) -> None:
        self.count, self._context = count, prepared()
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, fn: Callable[..., Any], slots: int | tuple[int, ...] = 1, *args: Any) -> list[Any]:
        results = self.outcomes(fn, slots, *args)
        failures = [f"process {i}: {result.text}" for i, result in enumerate(results) if isinstance(result, Failure)]
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def outcomes(self, fn: Callable[..., Any], slots: int | tuple[int, ...] = 1, *args: Any) -> list[Any]:
        """The same, with a `Failure` in place of what a process that raised would have returned."""
        self._start()
        each = slots if isinstance(slots, tuple) else (slots,) * self.count
        for (_, pipe), own in zip(self._workers, each, strict=True):
            pipe.send((fn, own, args))
        found = []
        for rank, (_, pipe) in enumerate(self._workers):
            if not pipe.poll(LIMIT):
                self.close()
                raise AssertionError(f"process {rank} has not answered within {LIMIT:g} s")
            found.append(pipe.recv())
        if any(isinstance(result, Failure) and "could not reach" in result.message for result in found):
            self.close()  # a group in which one has not come is of no more use
        return found

    def _start(self) -> None:
        if self._workers and all(process.is_alive() for process, _ in self._workers):
            return
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs, rank, self.count, port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(2)
            process.kill()
            process.join()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class Failure:
    """What a process raised."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message = type(error).__name__, str(error)
        self.notes = getattr(error, "__notes__", [])
        self.text = "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"


def _work(pipe: Connection, rank: int, count: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = fdp.distributed.init(timeout=PATIENCE)
    while True:
        try:
            fn, slots, args = pipe.recv()
        except EOFError:
            break
        try:
            result = fn(fdp.distributed.init(devices=fdp.virtual_devices(slots), timeout=PATIENCE), *args)
        except BaseException as error:
            result = Failure(error)
        pipe.send(result)
    first.close()
