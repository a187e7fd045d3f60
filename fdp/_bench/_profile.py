"""Where the time of one call of fdp on threads goes: when each stage starts, on which thread, and how long it takes.

Reads fdp's private names, since its stages have no others. One that is gone is left out, with a word.
"""

import functools
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fdp import _call, _differentiate, _executors
from fdp._accumulate import Gradients
from fdp._bench._models import build, loss_and_gradients
from fdp._bench._torch import fdp_step
from fdp._devices import virtual_devices
from fdp._terminal import line, table

CALLS = 200
SECONDS = 6.0
STAGES: list[tuple[Any, str, str]] = [
    (_differentiate, "prepare", "plan, split and place"),
    (_executors, "run_side_by_side", "all shards, from first to last"),
    (_differentiate, "forward", "forward of a shard"),
    (_differentiate, "joint", "backward of a shard"),
    (Gradients, "add", "add its gradients"),
    (_call.Watch, "check", "look for writes"),
    (_differentiate, "join", "join the losses"),
    (Gradients, "finish", "finish the gradients"),
]


class Stamp(NamedTuple):
    stage: str
    thread: str
    start: float
    end: float


def profile(name: str, slots: int) -> None:
    """Print the stages of a call, and beside its total that of one shard alone and of the whole batch in torch."""
    model, x, y = build(name)
    step, state = fdp_step(model, virtual_devices(slots), "threads")
    cores = torch.get_num_threads()
    whole = _median(lambda: loss_and_gradients(model, x, y))
    torch.set_num_threads(max(1, cores // slots))
    shard = _median(lambda: loss_and_gradients(model, x.tensor_split(slots)[0], y.tensor_split(slots)[0]))
    torch.set_num_threads(cores)
    total = _median(lambda: step(*state, x, y))
    rows = _timeline(lambda: step(*state, x, y))
    table(f"{name}: a call of fdp on threads", ["thread", "stage", "starts at ms", "takes ms", "of calls"], [rows])
    line(
        f"whole call {total * 1e3:.3f} ms (without the stamps), one shard alone {shard * 1e3:.3f} ms, "
        f"torch with all cores {whole * 1e3:.3f} ms"
    )


def _timeline(call: Callable[[], Any]) -> list[list[str]]:
    stamps: list[Stamp] = []
    undo = [_stamped(owner, attribute, stage, stamps) for owner, attribute, stage in STAGES]
    spans: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    calls, until = 0, time.perf_counter() + SECONDS
    try:
        for _ in range(3):
            call()
        while calls < CALLS and time.perf_counter() < until:
            stamps.clear()
            start = time.perf_counter()
            call()
            stamps.append(Stamp("the call", "caller", start, time.perf_counter()))
            for key, stamp in _numbered(stamps):
                spans[key].append((stamp.start - start, stamp.end - stamp.start))
            calls += 1
    finally:
        for restore in undo:
            restore()
    rows = []
    for (thread, stage), each in spans.items():
        begins, lasts = (1e3 * statistics.median(column) for column in zip(*each, strict=True))
        rows.append((begins, -lasts, [thread, stage, f"{begins:.3f}", f"{lasts:.3f}", f"{len(each) / calls:.0%}"]))
    return [row for *_, row in sorted(rows)]


def _numbered(stamps: list[Stamp]) -> list[tuple[tuple[str, str], Stamp]]:
    """The stamps of a call by thread and stage; the second time of a stage on a thread has a number."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for stamp in sorted(stamps, key=lambda stamp: stamp.start):
        seen[stamp.thread, stamp.stage] += 1
        times = seen[stamp.thread, stamp.stage]
        found.append(((stamp.thread, stamp.stage if times == 1 else f"{stamp.stage} ({times})"), stamp))
    return found


def _stamped(owner: Any, attribute: str, stage: str, stamps: list[Stamp]) -> Callable[[], None]:
    """Have a function leave a stamp each time it has run; return what undoes that."""
    original = vars(owner).get(attribute)
    if original is None:
        print(f"no stage {stage!r}: there is no {attribute} in {owner.__name__}", file=sys.stderr)
        return lambda: None

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            who = "caller" if threading.current_thread() is threading.main_thread() else "worker"
            stamps.append(Stamp(stage, who, start, time.perf_counter()))

    setattr(owner, attribute, run)
    return lambda: setattr(owner, attribute, original)


def _median(call: Callable[[], Any]) -> float:
    times, until = [], time.perf_counter() + SECONDS
    for _ in range(5):
        call()
    while len(times) < CALLS and (time.perf_counter() < until or len(times) < 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
