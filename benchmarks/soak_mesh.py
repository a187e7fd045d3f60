"""Pairs of processes that take steps on a mesh, hit by a signal at a random moment: what becomes of them is counted.

Steps: small, large, with collectives, and a small one whose processes have two slots each. Hits: Ctrl-C of one process
or of both, SIGTERM, SIGKILL, SIGSTOP of one. After SIGSTOP with SIGCONT a moment later the job goes on; after a Ctrl-C
that is caught, too: the next calls work in both processes, with the same numbers.

Targets: a process that is hit ends by the signal, or by KeyboardInterrupt; the other ends by an error that says so.
Nobody aborts. All end within `PROMPT` seconds, or, where a process is stopped, within the time limit of `init`.
Ends with exit code 1 if one is missed.
"""

import argparse
import contextlib
import ctypes
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

import fdp

PROMPT = 20.0  # seconds after which a process that nobody stops has to have ended
LIMIT = 5.0  # of `init`, where a process is stopped
FOREVER = 600.0  # of `init`, elsewhere: longer than anybody waits here
SLACK = 20.0  # seconds beyond the limit: Python takes seconds of one core to end, and others use it too
LONGEST = 0.1  # seconds until the signal
INTERRUPTED = 130

START = 60.0  # seconds for the first steps

Step = Callable[[], Any]


class Hit(NamedTuple):
    """What is done to which processes."""

    name: str
    signals: Sequence[int]
    both: bool = False
    goes_on: bool = False


HITS = [
    Hit("SIGINT", (signal.SIGINT,)),
    Hit("SIGINT of both", (signal.SIGINT,), both=True),
    Hit("SIGINT, caught", (signal.SIGINT,), goes_on=True),
    Hit("SIGINT of both, caught", (signal.SIGINT,), both=True, goes_on=True),
    Hit("SIGTERM", (signal.SIGTERM,)),
    Hit("SIGKILL", (signal.SIGKILL,)),
    Hit("SIGSTOP", (signal.SIGSTOP,)),
    Hit("SIGSTOP, SIGCONT", (signal.SIGSTOP, signal.SIGCONT), goes_on=True),
]


class Verdict(NamedTuple):
    """What a round has been, and what is wrong with it, if anything."""

    way: str
    hit: Hit
    target: int
    problem: str
    texts: list[str]
    seconds: float


# ---- what the processes do


def small(mesh: Any) -> Step:
    step = fdp.value_and_grad(lambda p, x: torch.tanh(x @ p).square().mean(), devices=mesh)
    p, x = torch.ones(8, 8), torch.ones(4, 8)
    return lambda: step(p, x)


def large(mesh: Any) -> Step:
    params = [torch.ones(400, 400) / 400 for _ in range(4)]

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = torch.tanh(x @ p)
        return x.square().mean()

    step = fdp.value_and_grad(loss, devices=mesh)
    return lambda: step(params, torch.ones(16, 400))


def collectives(mesh: Any) -> Step:
    return lambda: fdp.grad(lambda p, x: (p * fdp.psum(x)).sum(), devices=mesh)(torch.ones(8), torch.ones(4, 8))


WAYS: dict[str, tuple[Callable[[Any], Step], int]] = {
    "small": (small, 1),
    "large": (large, 1),
    "collectives": (collectives, 1),
    "two slots": (small, 2),
}


def program(way: str, rank: int, port: int, limit: float, path: str, catches: bool) -> None:
    """A training as its own program, up to and with all that Python does at the end."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status = 0
    try:
        train(way, limit, f"{path}.steps", catches)
    except BaseException as error:
        traceback.print_exc()
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    ctypes.pythonapi.Py_Exit(status)  # a child of multiprocessing would end without it


def train(way: str, limit: float, path: str, catches: bool) -> None:
    """Steps with the same result, counted in a file. One that `catches` errors calls again: then all is well again."""
    make, slots = WAYS[way]
    mesh = fdp.distributed.init(devices=fdp.virtual_devices(slots), timeout=limit)
    step, count = make(mesh), os.open(path, os.O_WRONLY | os.O_CREAT)
    first = step()
    for i in itertools.count(1):
        try:
            found = step()
            if not all(map(torch.equal, tree_leaves(found), tree_leaves(first))):
                raise AssertionError(f"step {i} has other numbers: {found}")
            os.pwrite(count, struct.pack("<q", i), 0)
        except (KeyboardInterrupt, RuntimeError):
            if not catches:
                raise


# ---- what is done to them


def one_round(seed: int, folder: Path, context: Any, ways: Sequence[str], hits: Sequence[Hit]) -> Verdict:
    """Start two processes, hit them, and wait for their end."""
    draw = random.Random(seed)
    way, hit, target = draw.choice(ways), draw.choice(hits), draw.randrange(2)
    delay = draw.uniform(0, LONGEST)
    limit = LIMIT if signal.SIGSTOP in hit.signals else FOREVER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [folder / f"{seed}-{rank}" for rank in range(2)]
    catches = hit.goes_on and signal.SIGINT in hit.signals
    processes = [context.Process(target=program, args=(way, i, port, limit, str(paths[i]), catches)) for i in range(2)]
    for process in processes:
        process.start()
    pids = [process.pid for process in processes]
    try:
        if not until(lambda: min(map(steps, paths)) >= 3, START):
            return Verdict(way, hit, target, "did not start", [text_of(path) for path in paths], 0.0)
        time.sleep(delay)
        for i, number in enumerate(hit.signals):
            if i:
                time.sleep(draw.uniform(0, LIMIT / 4))
            for pid in pids if hit.both else [pids[target]]:
                os.kill(pid, number)
        start = time.monotonic()
        if hit.goes_on:
            reached = max(map(steps, paths))
            goes_on = until(lambda: min(map(steps, paths)) > reached + 3, LIMIT)
            problem = "" if goes_on else "the job does not go on"
            return Verdict(way, hit, target, problem, [text_of(path) for path in paths], time.monotonic() - start)
        waited = [process for i, process in enumerate(processes) if hit.signals[0] != signal.SIGSTOP or i != target]
        allowed = LIMIT + SLACK if hit.signals[0] == signal.SIGSTOP else PROMPT
        until(lambda: all(process.exitcode is not None for process in waited), allowed)
        seconds = time.monotonic() - start
        codes = [process.exitcode for process in processes]
        texts = [text_of(path) for path in paths]
        return Verdict(way, hit, target, judged(hit, target, codes, texts), texts, seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for path in paths:
            path.unlink(missing_ok=True)
            Path(f"{path}.steps").unlink(missing_ok=True)


def judged(hit: Hit, target: int, codes: Sequence[int | None], texts: Sequence[str]) -> str:
    """What is wrong with the ends of processes, if anything."""
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        is_hit, number = hit.both or rank == target, hit.signals[0]
        who = "hit" if is_hit else "other"
        last = (text.rstrip().splitlines() or [""])[-1]
        if number == signal.SIGSTOP and is_hit:
            continue
        if code is None:
            return f"the {who} hangs"
        if is_hit and number != signal.SIGINT:
            right = code == -number
        elif is_hit:
            right = code == INTERRUPTED and last == "KeyboardInterrupt"
            right = right or (hit.both and code == 1 and is_clear(text))  # whom the other has told first
        else:
            right = code == 1 and is_clear(text)
        if not right:
            return f"the {who} ends with {code}: {last[:200]}"
    return ""


def is_clear(text: str) -> bool:
    """Whether an error says that the other has gone, and nothing else is said."""
    found = [line for line in text.splitlines() if line.startswith(("RuntimeError: ", "terminate"))]
    last = found[-1] if found else ""
    return "One has ended" in last or "has raised KeyboardInterrupt" in last


def steps(path: Path) -> int:
    """How many steps a process has taken."""
    with contextlib.suppress(FileNotFoundError):
        data = Path(f"{path}.steps").read_bytes()
        return struct.unpack("<q", data)[0] if data else 0
    return 0


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=2, help="that run at once")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--hits", nargs="+", default=[hit.name for hit in HITS])
    parser.add_argument("--show", action="store_true", help="what processes have written where something is wrong")
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fdp.distributed", "torch.distributed", "torch._dynamo"])
    hits = [hit for hit in HITS if hit.name in options.hits]
    start = time.monotonic()
    counts, problems = Counter[str](), Counter[str]()
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fdp-soak-") as name, ThreadPoolExecutor(options.pairs) as pool:
        seeds = range(options.seed, options.seed + options.rounds)
        for seed, found in zip(
            seeds, pool.map(lambda s: one_round(s, Path(name), context, options.ways, hits), seeds), strict=True
        ):
            counts[found.hit.name] += 1
            slowest[found.hit.name] = max(slowest.get(found.hit.name, 0.0), found.seconds)
            if found.problem:
                problems[f"{found.way}, {found.hit.name} of process {found.target}: {found.problem}"] += 1
                if options.show:
                    print(
                        f"== round {seed}: {found.way}, {found.hit.name} of {found.target}: {found.problem}", flush=True
                    )
                    for rank, text in enumerate(found.texts):
                        print(f"-- process {rank}\n{text}", flush=True)
    print(f"{counts.total()} rounds in {time.monotonic() - start:.0f} s, torch {torch.__version__}")
    for hit, count in counts.items():
        print(f"  {hit}: {count}, the last to end after {slowest[hit]:.1f} s")
    print(f"{'MISSED' if problems else 'ok    '}  hangs, aborts, unclear ends: {problems.total()}")
    for problem, count in problems.most_common():
        print(f"  {count} x {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
