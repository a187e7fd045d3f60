"""Measuring on shared machines: interleaved runs, medians, and peaks of resident memory."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def medians(contenders: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 5) -> dict[str, float]:
    """Median seconds of each function, run in turns, so that a slow moment of the machine hits all of them."""
    for run in contenders.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(samples) for name, samples in times.items()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """Growth of resident memory at its highest while `run` runs and its result is alive. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    result = run()
    peak = status("VmHWM")
    del result
    return (peak - before) * 1024


def status(field: str) -> int:
    """A number of /proc/self/status in its own unit: kB for memory. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")
