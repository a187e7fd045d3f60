"""Where the time of one call of fdp on threads goes: when each range of its trace starts, on which thread, how long."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fdp
from benchmarks.peers.models import build, loss_and_gradients
from benchmarks.peers.report import print_table
from benchmarks.peers.with_torch import fdp_step

CALLS = 200
SECONDS = 6.0
TRACED = 50  # calls, at most
CALL = "whole call"


def print_stages(name: str, slots: int) -> None:
    """Print the ranges of a call, and beside its total that of one shard alone and of the whole batch in torch."""
    model, x, y = build(name)
    step, state = fdp_step(model, fdp.virtual_devices(slots), "threads")
    cores = torch.get_num_threads()
    whole = _median(lambda: loss_and_gradients(model, x, y))
    torch.set_num_threads(max(1, cores // slots))
    shard = _median(lambda: loss_and_gradients(model, x.tensor_split(slots)[0], y.tensor_split(slots)[0]))
    torch.set_num_threads(cores)
    total = _median(lambda: step(*state, x, y))
    rows = _ranges(lambda: step(*state, x, y))
    print_table(f"{name}: a call of fdp on threads", ["thread", "range", "starts at ms", "takes ms", "of calls"], rows)
    print(
        f"{CALL} {total * 1e3:.3f} ms (without the profiler), one shard alone {shard * 1e3:.3f} ms, "
        f"torch with all cores {whole * 1e3:.3f} ms"
    )


def _ranges(call: Callable[[], Any]) -> list[list[str]]:
    """The ranges in the order in which they start: medians over the calls."""
    private: Any = torch._C
    every_thread = private._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as trace:
        calls, until = 0, time.perf_counter() + SECONDS
        while calls < TRACED and (calls == 0 or time.perf_counter() < until):
            with record_function(CALL):
                call()
            calls += 1
    spans: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in _by_call(trace.events() or []):
        for key, start, length in _spans(each):
            spans[key].append((start, length))
    rows = []
    for (thread, name), each in spans.items():
        start, length = (statistics.median(column) / 1e3 for column in zip(*each, strict=True))
        rows.append((start, -length, [thread, name, f"{start:.3f}", f"{length:.3f}", f"{len(each) / calls:.0%}"]))
    return [row for *_, row in sorted(rows)]


def _by_call(events: Sequence[Any]) -> list[list[Any]]:
    """The ranges of each call, of which the whole is the first."""
    named = [event for event in events if event.name == CALL or event.name.startswith("fdp.")]
    calls: list[list[Any]] = []
    for event in sorted(named, key=lambda event: event.time_range.start):
        if event.name == CALL:
            calls.append([])
        calls[-1].append(event)
    return calls


def _spans(events: Sequence[Any]) -> list[tuple[tuple[str, str], float, float]]:
    """Thread and name, start after that of the call, length; the second time of a range on a thread has a number."""
    whole, seen, spans = events[0], Counter[tuple[str, str]](), []
    for event in events:
        thread = "caller" if event.thread == whole.thread else "worker"
        seen[thread, event.name] += 1
        times = seen[thread, event.name]
        name = event.name if times == 1 else f"{event.name} ({times})"
        spans.append(((thread, name), event.time_range.start - whole.time_range.start, event.time_range.elapsed_us()))
    return spans


def _median(call: Callable[[], Any]) -> float:
    times, until = [], time.perf_counter() + SECONDS
    for _ in range(5):
        call()
    while len(times) < CALLS and (time.perf_counter() < until or len(times) < 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
