"""What the comparison with peers says: ratios, the targets, tables, the file of raw figures."""

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAIN, LIMIT = "torch, all cores", "one shard alone (limit)"
SEQUENTIAL, THREADS, COMPILED = "fdp sequential", "fdp threads", "fdp threads, compiled"
STEP = "fdp, all in one graph"
MESH, DDP, JAX = "fdp over gloo", "DDP over gloo", "JAX shard_map"
PEERS = (PLAIN, DDP, JAX)
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    (THREADS, PLAIN): {"small MLP": 1.4, "wide MLP": 1.2, "CNN": 0.75, "transformer": 0.98, "LSTM": 0.95},
    (THREADS, DDP): {"small MLP": 0.8, "wide MLP": 0.65, "CNN": 0.95, "transformer": 0.9, "LSTM": 0.95},
    (MESH, DDP): dict.fromkeys(("small MLP", "wide MLP", "CNN", "transformer", "LSTM"), 1.0),
    (COMPILED, JAX): dict.fromkeys(("small MLP", "wide MLP", "CNN", "transformer", "LSTM"), 1.0),
}
Row = Sequence[str]
Times = dict[str, list[float]]  # seconds a call of each contender, round by round


def ratio(times: Times, one: str, other: str) -> float | None:
    """The median over rounds of the ratio within a round: what slows a whole round cancels."""
    if one not in times or other not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def best_peer(times: Times) -> str:
    return min((peer for peer in PEERS if peer in times), key=lambda peer: statistics.median(times[peer]))


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def rows_of(model: str, times: Times) -> list[Row]:
    best, rows = best_peer(times), []
    for name, samples in times.items():
        low, middle, high = (1e3 * value for value in quartiles(samples))
        ratios = [_number(ratio(times, name, other)) for other in (PLAIN, best, LIMIT)]
        mark = " *" if name == best else ""
        rows.append([model, name + mark, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", *ratios])
    return rows


def targets_of(model: str, times: Times) -> list[Row]:
    rows = []
    for (one, other), limits in TARGETS.items():
        found, limit = ratio(times, one, other), limits[model]
        verdict = (
            "not measured" if found is None else f"{'met' if found <= limit else 'MISSED'} by {abs(found - limit):.2f}"
        )
        rows.append([model, f"{one} / {other}", f"<= {limit:.2f}", _number(found), verdict])
    return rows


def show(report: dict[str, Any]) -> None:
    """Print the table, the targets, and who did not take part."""
    models = report["models"]
    head = ["model", "contender", "median ms", "quartiles ms", "/ torch", "/ best peer", "/ limit"]
    print_table("Forward and backward", head, [row for item in models.items() for row in rows_of(*item)])
    print("* the best peer of the model. Ratios are medians of the ratios within a round; smaller is faster.\n")
    head = ["model", "ratio", "target", "measured", ""]
    rows = [row for item in models.items() for row in targets_of(*item)]
    print_table("Targets, set on a machine with two cores", head, rows)
    load, count = report["machine"]["load before"], report["machine"]["cores"]
    if load is not None and load > 0.3 * count:
        print(f"The load was {load:.1f} on {count} cores before the run: others worked too, and these figures are bad.")
    for name, reason in report["skipped"].items():
        print(f"skipped {name}: {reason}")


def print_table(title: str, head: Row, rows: Sequence[Row], left: int = 2) -> None:
    """Print rows in columns as wide as what stands in them; the first `left` hold words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    print(title)
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def surroundings(command: str) -> dict[str, Any]:
    """Where and when figures were taken."""
    packages = ("torch", "optree", "numpy", "jax", "jaxlib")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {
            "processor": _processor(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.machine()}",
            "load before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    known = Path("/proc/cpuinfo")  # Linux only
    for text in known.read_text().splitlines() if known.exists() else ():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.processor()
