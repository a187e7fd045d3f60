"""What prints itself: as plain text, in a notebook as HTML."""

import abc
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

_STYLE = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"


class Drawn(abc.ABC):
    """Something that is looked at."""

    @abc.abstractmethod
    def __str__(self) -> str: ...

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        import html  # as only notebooks need

        return f'<pre style="{_STYLE}">{html.escape(str(self))}</pre>'


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table, without the columns in which nothing stands; those called `numbers` are aligned on the right."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    alignments = [str.rjust if column[0] in numbers else str.ljust for column in columns]
    lines = [
        "   ".join([align(text, width) for align, text, width in zip(alignments, line, widths, strict=True)]).rstrip()
        for line in zip(*columns, strict=True)
    ]
    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    return "\n".join([title, *lines[:1], *[rule] * bool(lines), *lines[1:]])


def count_text(count: int, one: str, many: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count} {one if count == 1 else many}"


def size_text(nbytes: float) -> str:
    """Bytes as people read them, in powers of 1000."""
    power = min(4, int(math.log(nbytes, 1000) + 1e-9)) if nbytes >= 1000 else 0
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes / 1000**power:.3g} {unit}"


def runs_text(values: Iterable[Any]) -> str:
    """Values in order, equal neighbours as one: `10 + 3 x 9`."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " + ".join(f"{value}" if n == 1 else f"{n} x {value}" for value, n in runs)


def dtype_text(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
