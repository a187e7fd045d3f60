"""A training step on three slots as torch.profiler sees it: the ranges of fdp, and the operations of torch below.

`python docs/figures/trace.py` draws `trace.svg`. It holds measured times: each run draws another figure.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fdp

ROWS, WIDTH, CLASSES, SLOTS, RUNS = 300, 512, 10, 3, 150
_C: Any = torch._C  # a part of it has no types
ALL_THREADS = _C._profiler._ExperimentalConfig(profile_all_threads=True)


class Span(NamedTuple):
    """A range of fdp, or an operation of torch that is in no other: milliseconds from the first on."""

    name: str
    thread: int
    start: float
    end: float


def step(executor: Any) -> Callable[[], object]:
    """Value and gradients of a small model, on slots that are all the CPU."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    apply, (params, _) = fdp.functional(nn.Sequential(*layers))

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply((params, {}), x)[0], y)

    mapped = fdp.value_and_grad(loss, devices=fdp.virtual_devices(SLOTS), executor=executor)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    return lambda: mapped(params, x, y)


def trace(executor: Any) -> list[Span]:
    """The spans of the fastest run."""
    run = step(executor)
    for _ in range(5):
        run()
    return min((_spans(run) for _ in range(RUNS)), key=lambda spans: max(span.end for span in spans))


def _spans(run: Callable[[], object]) -> list[Span]:
    with torch.profiler.profile(experimental_config=ALL_THREADS) as profile:
        run()  # the first in a trace is slow
        with torch.profiler.record_function("begin"):
            pass
        run()
    events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    begin = next(event.time_range.end for event in events if event.name == "begin")
    shown = [event for event in events if event.time_range.start >= begin and _is_shown(event)]
    first = shown[0].time_range.start
    return [
        Span(e.name, e.thread, (e.time_range.start - first) / 1000, (e.time_range.end - first) / 1000) for e in shown
    ]


def _is_shown(event: Any) -> bool:
    return event.name.startswith("fdp.") or (event.cpu_parent is None or event.cpu_parent.name.startswith("fdp."))


def draw() -> None:
    """A panel for each executor, in it two rows a thread."""
    from _style import BLUE, GREEN, INK, ORANGE, PINK, SKY, figure, plain

    colours = BLUE, GREEN, PINK
    kinds = {"forward": SKY, "backward": ORANGE}
    torch.set_num_threads(1)
    traces = {executor: trace(executor) for executor in ("sequential", "threads")}
    last = max(span.end for spans in traces.values() for span in spans)
    with figure("trace", 4.6) as (whole, axis):
        y, ticks = 0.0, []
        for executor, spans in traces.items():
            axis.text(0, y + 0.72, f'executor="{executor}"', color=INK, fontsize=10.5, fontweight="bold")
            threads = list(dict.fromkeys(span.thread for span in spans))
            for number, thread in enumerate(threads):
                for span in spans:
                    if span.thread != thread:
                        continue
                    is_range, length = span.name.startswith("fdp."), span.end - span.start
                    slot = span.name.removeprefix("fdp.shard ")
                    kind = "backward" if "Backward" in span.name or "autograd" in span.name else "forward"
                    colour = colours[int(slot)] if slot.isdigit() else INK if is_range else kinds[kind]
                    axis.barh(y if is_range else y - 0.55, length, 0.45, left=span.start, color=colour, linewidth=0)
                    if slot.isdigit():
                        axis.text(span.start + length / 2, y, f"shard {slot}", ha="center", va="center", color="white")
                ticks.append((y - 0.28, "caller" if number == 0 else f"thread {number}"))
                y -= 1.5
            y -= 0.9
        axis.set_yticks([at for at, _ in ticks], [said for _, said in ticks])
        axis.set_xlim(0, last * 1.01)
        axis.set_xlabel("milliseconds", color=INK)
        plain(axis, grid="x")
        for name, colour in {
            "fdp.replicate, .scatter, .reduce": INK,
            "operations of torch": SKY,
            "those of the backward": ORANGE,
        }.items():
            axis.barh(0, 0, color=colour, label=name)
        whole.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK)


if __name__ == "__main__":
    draw()
