"""The picture of the comparison with peers: a panel for each model, a bar for each contender."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.peers.report import COMPILED, DDP, JAX, LIMIT, MESH, PLAIN, SEQUENTIAL, STEP, THREADS, Times, quartiles

# Okabe and Ito's colours: told apart also by people who are colour-blind. fdp is blue, peers are not.
COLOURS = {
    PLAIN: "#7f7f7f",
    DDP: "#E69F00",
    JAX: "#CC79A7",
    SEQUENTIAL: "#9ecae1",
    THREADS: "#0072B2",
    COMPILED: "#004c78",
    STEP: "#00334f",
    MESH: "#56B4E9",
}
ACROSS = 2  # panels side by side, such that their text can be read on a page of 420 pixels
INK, MUTED = "#222222", "#5f5f5f"


def draw(found: dict[str, Any], out: Path) -> None:
    """Write `peers.svg` and `peers.png`; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "peers"}):
        models = found["models"]
        columns = min(len(models), ACROSS)
        rows = -(-len(models) // columns)
        size = 1.7 + 2.15 * columns, 0.8 + 2.5 * rows
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        names = [name for name in COLOURS if any(name in times for times in models.values())]
        for i, (axis, model) in enumerate(zip_longest(axes.flat, models)):
            if model is None:
                axis.set_axis_off()
                continue
            _panel(axis, models[model], names)
            axis.set_title(model, loc="left", color=INK, fontweight="bold", fontsize=11)
            if i % columns:
                axis.set_yticklabels([])
        figure.suptitle("Forward and backward, milliseconds: shorter is faster", x=0.01, ha="left", color=INK)
        figure.supxlabel(_caption(found), x=0.01, ha="left", fontsize=9, color=MUTED)
        figure.savefig(out / "peers.svg", metadata={"Date": None})
        figure.savefig(out / "peers.png", dpi=160)
        pyplot.close(figure)


def _panel(axis: Any, times: Times, names: list[str]) -> None:
    longest = 0.0
    for row, name in enumerate(names):
        if name not in times:
            axis.text(0, row, " not measured", va="center", color=MUTED, fontsize=9)
            continue
        low, middle, high = (1e3 * value for value in quartiles(times[name]))
        axis.barh(row, middle, height=0.66, color=COLOURS[name])
        axis.plot([low, high], [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
        on_white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        at, text = (max(middle, high), row), f"{middle:.3g}"
        axis.annotate(text, at, (4, 0), textcoords="offset points", va="center", color=INK, bbox=on_white, zorder=4)
        longest = max(longest, high)
    if LIMIT in times:
        limit = 1e3 * quartiles(times[LIMIT])[1]
        axis.axvline(limit, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=3)
        longest = max(longest, limit)
    axis.set_xlim(0, longest * 1.3)  # room for the numbers
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(left=False, colors=INK)
    axis.locator_params(axis="x", nbins=4)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _caption(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    with_jax = f", JAX {versions['jax']}" if versions["jax"] else ""
    return (
        f"Medians of {found['rounds']} interleaved rounds; thin lines: quartiles.\n"
        f"Dashed line: one shard alone, which {found['slots']} slots of uncompiled torch cannot beat.\n"
        f"{machine['cores']} cores of {machine['processor']}, torch {versions['torch']}{with_jax}, {found['date'][:10]}"
    )
