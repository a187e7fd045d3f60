"""How the rows of a batch are shared among four slots, in each of the ways that there are.

`python docs/figures/splits.py` draws `splits.svg`.
"""

import torch

import fdp

ROWS = 37


def splits(rows: int = ROWS) -> dict[str, list[int]]:
    """The sizes of the shards, as they come out."""
    batch, devices = torch.arange(rows), fdp.virtual_devices(4)
    return {
        "balanced (default)": [len(shard) for shard in fdp.scatter(batch, devices).shards],
        "weights=[2, 1, 1, 1]": [len(shard) for shard in fdp.scatter(batch, devices, weights=[2, 1, 1, 1]).shards],
        "fdp.nn.scatter, as torch.chunk": [len(shard) for shard in fdp.nn.scatter(batch, devices)],
    }


def draw() -> None:
    """A line for each way, a cell for each row, a colour for each slot."""
    from _style import INK, MUTED, SLOTS, figure, plain

    found = splits()
    with figure("splits", 3.1) as (_, axis):
        for line, (name, sizes) in enumerate(found.items()):
            axis.text(0, line - 0.27, name, va="bottom", color=INK)
            start = 0
            for slot, (size, colour) in enumerate(zip(sizes, SLOTS, strict=True)):
                cells = [(row + 0.06, 0.88) for row in range(start, start + size)]
                axis.broken_barh(cells, (line - 0.19, 0.38), color=colour)
                middle = start + size / 2
                axis.text(middle, line + 0.23, f"slot {slot}: {size}", ha="center", va="top", color=MUTED, fontsize=9)
                start += size
        axis.set_yticks([])
        axis.set_xticks([0, 10, 20, 30, ROWS])
        axis.set_xlim(-0.3, ROWS + 0.3)
        axis.set_ylim(len(found) - 0.5, -0.6)
        axis.set_xlabel(f"row of the batch ({ROWS} rows, 4 slots)", color=INK)
        plain(axis)


if __name__ == "__main__":
    draw()
