"""What each slot gets for a gradient if it differentiates its own loss, and if it differentiates the sum of all.

`python docs/figures/trap.py` draws `trap.svg`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fdp

MOST = 8
Part = Callable[..., Tensor]


def total(w: Tensor, x: Tensor) -> Tensor:
    """The loss of a slot's rows."""
    return (w * x).sum()


def own_then_psum(w: Tensor, x: Tensor) -> Tensor:
    """Right: differentiate the slot's own loss, then sum."""
    return fdp.psum(torch.func.grad(total)(w, x))


def psum_then_psum(w: Tensor, x: Tensor) -> Tensor:
    """The trap: every slot differentiates the sum of all losses."""
    return fdp.psum(torch.func.grad(lambda w: fdp.psum(total(w, x)))(w))


def pmean_then_psum(w: Tensor, x: Tensor) -> Tensor:
    """A mean over slots has the shares in it: their sum is one."""
    return fdp.psum(torch.func.grad(lambda w: fdp.pmean(total(w, x)))(w))


def factors() -> dict[str, list[float]]:
    """How many times the gradient of the whole each of them is, on 1 to 8 slots."""
    w, x = torch.tensor(1.0, dtype=torch.float64), torch.arange(1.0, 25.0, dtype=torch.float64)
    ways: dict[str, Any] = {"own": own_then_psum, "psum": psum_then_psum, "pmean": pmean_then_psum}
    exact = x.sum()  # d total / d w
    return {
        name: [(fdp.dp_apply(way, w, x, fdp.virtual_devices(n), out_dims=None) / exact).item() for n in _slots()]
        for name, way in ways.items()
    }


def _slots() -> range:
    return range(1, MOST + 1)


def draw() -> None:
    """A line for each way."""
    from _style import BLUE, INK, ORANGE, RED, figure, plain

    found = factors()
    styles = {
        "psum": (RED, "s", "psum the loss, differentiate, psum"),
        "pmean": (ORANGE, "^", "pmean the loss, differentiate, psum"),
        "own": (BLUE, "o", "differentiate the slot's loss, psum"),
    }
    with figure("trap", 3.4) as (_, axis):
        offsets = {"psum": (-10, 6, "right"), "pmean": (0, 8, "right"), "own": (0, -15, "right")}
        for name, (colour, mark, label) in styles.items():
            size, hollow = (9, "none") if name == "pmean" else (6, colour)
            axis.plot(_slots(), found[name], color=colour, marker=mark, markersize=size, markerfacecolor=hollow)
            dx, dy, side = offsets[name]
            axis.annotate(
                label, (MOST, found[name][-1]), (dx, dy), textcoords="offset points", ha=side, color=INK, fontsize=9.5
            )
        axis.set_xticks(list(_slots()))
        axis.set_yticks(list(_slots()))
        axis.set_ylim(0, MOST + 0.7)
        axis.set_xlabel("slots", color=INK)
        axis.set_ylabel("times the gradient of the whole", color=INK)
        plain(axis, grid="y")


if __name__ == "__main__":
    draw()
