"""What the comparison with peers says: ratios, the targets, tables, the file of raw figures."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAIN, LIMIT = "torch, all cores", "one shard alone (limit)"
SEQUENTIAL, THREADS, COMPILED = "fdp sequential", "fdp threads", "fdp threads, compiled"
MESH, DDP, JAX = "fdp over gloo", "DDP over gloo", "JAX shard_map"
PEERS = (PLAIN, DDP, JAX)
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    (THREADS, PLAIN): {"small MLP": 1.4, "wide MLP": 1.2, "CNN": 0.75, "transformer": 0.98, "LSTM": 0.95},
    (THREADS, DDP): {"small MLP": 0.8, "wide MLP": 0.65, "CNN": 0.95, "transformer": 0.9, "LSTM": 0.95},
    (MESH, DDP): dict.fromkeys(("small MLP", "wide MLP", "CNN", "transformer", "LSTM"), 1.0),
    (COMPILED, JAX): dict.fromkeys(("small MLP", "wide MLP", "CNN", "transformer", "LSTM"), 1.0),
}
Times = dict[str, list[float]]  # seconds a call of each contender, round by round
Row = Sequence[str]


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
    table("Forward and backward", head, [rows_of(*item) for item in models.items()])
    print("* the best peer of the model. Ratios are medians of the ratios within a round; smaller is faster.\n")
    head = ["model", "ratio", "target", "measured", ""]
    table("Targets", head, [targets_of(*item) for item in models.items()])
    load, cores = report["machine"]["load before"], report["machine"]["cores"]
    if load > 0.3 * cores:
        print(f"The load was {load:.1f} on {cores} cores before the run: others worked too, and these figures are bad.")
    for name, reason in report["skipped"].items():
        print(f"skipped {name}: {reason}")


def table(title: str, head: Row, sections: Sequence[Sequence[Row]]) -> None:
    """Print with rich, or in plain columns where there is none."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain_table(title, head, sections)
        return
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(head):
        drawn.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for rows in sections:
        for i, row in enumerate(rows):
            drawn.add_row("" if i and row[0] == rows[i - 1][0] else row[0], *row[1:])
        drawn.add_section()
    # In a file or a pipe there is no width to fit in, and what is cut off is lost.
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)


def _plain_table(title: str, head: Row, sections: Sequence[Sequence[Row]]) -> None:
    lines = [head, *(row for rows in sections for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    print(title)
    for line in lines:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def surroundings(command: str) -> dict[str, Any]:
    """Where and when figures were taken."""
    packages = ("torch", "optree", "numpy", "jax", "jaxlib")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.machine()}",
            "load before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
