"""What a call of `dp_apply` does with parameters, rows and outputs, and what its gradient does.

`python docs/figures/call.py` draws `call.svg`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fdp

ROWS, WIDTH, CLASSES, SLOTS = 37, 64, 10, 4


class Shard(NamedTuple):
    """What a slot saw: its rows of the batch, and the shapes of what came in and went out."""

    start: int
    stop: int
    params: list[int]
    x: list[int]
    out: list[int]


def call() -> tuple[list[Shard], list[int]]:
    """What each slot saw, and the shape of the joined output."""
    found: dict[int, Shard] = {}

    def fn(w: Tensor, x: Tensor, number: Tensor) -> Tensor:
        out = x @ w
        start, stop = int(number[0]), int(number[-1]) + 1
        found[fdp.axis_index()] = Shard(start, stop, list(w.shape), list(x.shape), list(out.shape))
        return out

    w, x = torch.zeros(WIDTH, CLASSES), torch.zeros(ROWS, WIDTH)
    devices = fdp.virtual_devices(SLOTS)
    out = fdp.dp_apply(fn, w, (x, torch.arange(ROWS)), devices, executor="sequential")
    return [found[i] for i in range(SLOTS)], list(out.shape)


def draw() -> None:
    """From left to right: arguments, slots, the output."""
    from _style import INK, LINE, MUTED, figure
    from _style import SLOTS as COLOURS
    from matplotlib.patches import Rectangle

    shards, joined = call()
    with figure("call", 4.2) as (_, axis):
        axis.set_axis_off()
        axis.set_xlim(-0.4, 100)
        axis.set_ylim(0, 50)

        def text(x: float, y: float, said: str, **options: Any) -> None:
            axis.text(x, y, said, **({"ha": "center", "va": "center", "color": INK, "fontsize": 10} | options))

        def arrow(start: tuple[float, float], end: tuple[float, float], colour: str, style: str = "-") -> None:
            look = {
                "arrowstyle": "-|>",
                "color": colour,
                "linestyle": style,
                "linewidth": 1.2,
                "shrinkA": 0,
                "shrinkB": 2,
            }
            axis.annotate("", end, start, arrowprops=look)

        def box(x: float, y: float, width: float, height: float, edge: str) -> None:
            axis.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor=edge, linewidth=1.4))

        low, high = 5, 31  # the batch, from its last row to its first
        height = (high - low) / ROWS
        for x in (8.5, 86.5):
            for shard, colour in zip(shards, COLOURS, strict=True):
                for row in range(shard.start, shard.stop):
                    y = high - (row + 1) * height
                    axis.add_patch(Rectangle((x, y), 5, height * 0.82, color=colour, linewidth=0))
        text(11, 1.5, f"inputs {_shape([ROWS, WIDTH])}")
        text(89, 1.5, f"output {_shape(joined)}")
        box(0, 36.5, 22, 6, INK)
        text(11, 39.5, f"params {_shape(shards[0].params)}")

        tops = [40, 29.5, 19, 8.5]
        for slot, (shard, colour, y) in enumerate(zip(shards, COLOURS, tops, strict=True)):
            box(36, y - 4, 36, 8, colour)
            text(37.5, y + 1.8, f"slot {slot}, rows {shard.start}:{shard.stop}", ha="left", fontweight="bold")
            text(37.5, y - 1.8, f"fn: {_shape(shard.x)} → {_shape(shard.out)}", ha="left")
            middle = high - (shard.start + shard.stop) / 2 * height
            arrow((22.2, 39.5), (36, y + 2), MUTED, ":")
            arrow((13.8, middle), (36, y - 1.8), colour)
            arrow((72, y), (86.5, middle), colour)
        for x, name in ((26, "place"), (54, "run"), (80, "join")):
            text(x, 48, name, color=MUTED, style="italic")
        axis.plot([0, 100], [46.2, 46.2], color=LINE, linewidth=0.8)
        text(0, 44.4, "whole, to every slot", ha="left", fontsize=9, color=MUTED)


def _shape(sizes: list[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


if __name__ == "__main__":
    draw()
