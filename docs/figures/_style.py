"""What the figures share: colours, text, and a file that is the same in every run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's colours: told apart also by people who are colour-blind.
BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
SLOTS = (BLUE, ORANGE, GREEN, PINK)
INK, MUTED, LINE = "#222222", "#5f5f5f", "#cccccc"
WIDTH = 6  # inches: text of 9 points and more can be read where a page is 420 pixels wide


@contextmanager
def figure(name: str, height: float, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, written to `name`.svg beside this file at the end, on white: so dark pages show it too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    options = {"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    # The first is what lays the text out; a browser takes the first that it has.
    options["font.sans-serif"] = ["DejaVu Sans", "Verdana", "Arial"]
    with pyplot.rc_context(options):
        whole, axes = pyplot.subplots(1, columns, figsize=(WIDTH, height), layout="constrained")
        yield whole, axes
        whole.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})
        pyplot.close(whole)


def plain(axis: Any, *, grid: str | None = None) -> None:
    """Without a frame; with lines to read values by along one axis of the plot."""
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, colors=INK)
    if grid is not None:
        axis.grid(axis=grid, color=LINE, linewidth=0.7)
        axis.set_axisbelow(True)


def light(colour: str) -> tuple[float, ...]:
    """A colour, mixed with white."""
    return tuple(1 - 0.4 * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
