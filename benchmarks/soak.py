"""Thousands of calls from eight threads at once through the public API, with faults in 1 % of them; then interrupts.

Calls: dp_apply, value_and_grad, parallel_apply, nested dp_apply, and one shared module with different parameters, on 1
to 5 virtual devices with executor="threads". A fault is an exception in one shard. Blocks of calls without a pause,
whose shards wait for cores, alternate with blocks of calls with pauses.

Targets: no wrong result; each fault arrives as it was raised, with a note that names its shard, and nothing else
fails; after the warm-up, which is a tenth of the calls, no thread more but those of fdp, at most one for each core and
for each slot of each caller, no tensor more, and at most 8 MiB more resident memory. Ends with exit code 1 if one is
missed.

Then the main thread calls, and a signal interrupts it: see _soak_interrupts.py.
"""

import argparse
import collections
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import _soak_interrupts
import torch
from _measure import status
from _soak_calls import RAN, ROWS, VARIANTS, Fault, Kind, is_close, kinds

import fdp
from fdp._execution.side_by_side import cores

MEMORY_BOUND = 8 * 2**20  # bytes: over 9000 calls, what 0.9 kB a call would leave
BLOCK, THINKING = 250, 0.06  # calls, and seconds that a caller rests before each in every other block
MOST_SLOTS = 5  # of a call
SAMPLES = 0.05  # seconds between looks at threads and memory


class Outcome(NamedTuple):
    """What became of a call: `"right"`, `"reported"`, or what is wrong with it."""

    kind: str
    injected: bool
    verdict: str


# Counted, not listed: a list of what happened would grow as the memory that is watched.
Outcomes = collections.Counter[Outcome]


class Numbers:
    """The numbers of calls, which several threads draw from."""

    def __init__(self, numbers: range) -> None:
        self._rest = iter(numbers)
        self.lock = threading.Lock()

    def draw(self) -> int | None:
        with self.lock:
            return next(self._rest, None)


class State(NamedTuple):
    """What the process holds while no call runs."""

    others: int
    workers: int
    memory: int
    tensors: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000, help=f"0, or at least {2 * BLOCK}")
    parser.add_argument("--threads", type=int, default=8, help="threads that call")
    parser.add_argument("--faults", type=float, default=0.01, help="share of the calls in which a shard fails")
    parser.add_argument("--interrupts", type=int, default=2_000, help="of calls of the main thread")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a hang is shown and ended")
    options = parser.parse_args()
    missed = concurrent(options) if options.calls else 0
    if options.interrupts:
        missed |= _soak_interrupts.verdict(_soak_interrupts.soak(options.interrupts, limit=60))
    sys.exit(missed)


def concurrent(options: argparse.Namespace) -> int:
    """Calls from many threads; 1 if a target is missed."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    start, all_kinds = time.perf_counter(), kinds()
    warm = max(2 * BLOCK, options.calls // 10)
    outcomes: Outcomes = collections.Counter()
    with ThreadPoolExecutor(options.threads) as pool:

        def run(numbers: range) -> int:
            shared = Numbers(numbers)
            return watched([pool.submit(caller, shared, all_kinds, options.faults) for _ in range(options.threads)])

        def caller(shared: Numbers, all_kinds: Sequence[Kind], faults: float) -> None:
            while (number := shared.draw()) is not None:
                outcome = call(all_kinds, number, faults)
                with shared.lock:
                    outcomes[outcome] += 1

        run(range(warm))
        before = state()
        most_others = run(range(warm, options.calls))
        after = state()
    faulthandler.cancel_dump_traceback_later()
    print(f"{outcomes.total()} calls from {options.threads} threads in {time.perf_counter() - start:.0f} s", end=", ")
    print(f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")
    return verdict(outcomes, before, after, most_others, options.threads)


def call(all_kinds: Sequence[Kind], number: int, faults: float) -> Outcome:
    """One call, drawn from its number, compared with its oracle."""
    draw = random.Random(number)
    kind, variant = draw.choice(all_kinds), draw.randrange(VARIANTS)
    devices = fdp.virtual_devices(draw.randint(1, 5))
    marks, row = torch.zeros(ROWS, dtype=torch.bool), None
    if draw.random() < faults:
        row = draw.randrange(ROWS)
        marks[row] = True
    if number // BLOCK % 2:
        time.sleep(draw.expovariate(1 / THINKING))
    try:
        found = kind.run(variant, devices, marks)
    except Fault as error:
        ok = row is not None and note_names(error, row, len(devices))
        return Outcome(kind.name, row is not None, "reported" if ok else f"a fault without its shard: {notes(error)}")
    except Exception as error:
        return Outcome(kind.name, row is not None, f"{type(error).__name__}: {error} {notes(error)}")
    if row is not None:
        return Outcome(kind.name, True, "a fault that was not reported")
    return Outcome(kind.name, False, "right" if is_close(found, kind.right[variant]) else "a wrong result")


def note_names(error: Exception, row: int, slots: int) -> bool:
    """Whether a note says which shard failed: the one that has the row."""
    parts = torch.arange(ROWS).tensor_split(slots)
    shard = next(i for i, part in enumerate(parts) if row in part)
    return any(note.startswith(f"in shard {shard} of {slots}") for note in notes(error))


def notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def watched(callers: Sequence[Future[None]]) -> int:
    """Wait for threads that call; return the most threads besides fdp's that the process had meanwhile."""
    most = others()
    while not all(future.done() for future in callers):
        time.sleep(SAMPLES)
        most = max(most, others())
    for future in callers:
        future.result()
    return most


def workers() -> int:
    """How many threads fdp has."""
    return sum(thread.name == "fdp-slot" for thread in threading.enumerate())


def others() -> int:
    """How many threads the process has besides. The least of some looks: one of fdp's may begin or end meanwhile."""
    looks = list[int]()
    for _ in range(5):
        looks.append(status("Threads") - workers())
        time.sleep(1e-3)
    return min(looks)


def state() -> State:
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return State(others(), workers(), status("VmRSS") * 1024, tensors)


def verdict(outcomes: Outcomes, before: State, after: State, most_others: int, callers: int) -> int:
    """Print what was found; 1 if a target is missed."""
    counts, problems = collections.Counter[str](), collections.Counter[str]()
    for outcome, count in outcomes.items():
        counts[outcome.kind] += count
        if outcome.verdict not in ("right", "reported"):
            problems[f"{outcome.kind}: {outcome.verdict}"] += count
    print("calls: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print("shards run: " + ", ".join(f"{count} {name}" for name, count in RAN.items()))
    injected = sum(count for outcome, count in outcomes.items() if outcome.injected)
    reported = sum(count for outcome, count in outcomes.items() if outcome.verdict == "reported")
    wrong = sum(count for outcome, count in outcomes.items() if outcome.verdict == "a wrong result")
    grown, bound = after.memory - before.memory, callers * MOST_SLOTS + cores()
    own = workers()
    checks = {
        f"wrong results: {wrong}": wrong == 0,
        f"faults: {injected} injected, {reported} reported": injected == reported,
        f"other failures: {problems.total() - wrong}": problems.total() == wrong,
        f"other threads: {before.others} after warm-up, at most {most_others} since": most_others <= before.others,
        f"threads of fdp: {before.workers} after warm-up, {own} at the end; bound {bound}": own <= bound,
        f"tensors: {before.tensors} after warm-up, {after.tensors} at the end": after.tensors <= before.tensors,
        f"memory: {before.memory / 2**20:.1f} MiB after warm-up, {after.memory / 2**20:.1f} MiB at the end, "
        f"{grown / 2**20:+.1f} MiB; bound {MEMORY_BOUND // 2**20} MiB": grown <= MEMORY_BOUND,
    }
    for text, passed in checks.items():
        print(f"{'ok    ' if passed else 'MISSED'}  {text}")
    for problem, count in problems.most_common(10):
        print(f"  {count} x {problem}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    main()
