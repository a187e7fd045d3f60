"""What prints itself: in a terminal with colours, in a notebook as HTML, everywhere else as plain text. By rich."""

import abc
import io
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

_WIDE = 1000  # columns for text that nobody sees in a terminal: lines are not folded there


class Drawn(abc.ABC):
    """Something that rich draws."""

    @abc.abstractmethod
    def drawing(self) -> Any:
        """What rich can draw."""

    def __rich__(self) -> Any:
        return self.drawing()

    def __str__(self) -> str:
        return as_text(self.drawing())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.drawing())


def as_text(drawn: Any) -> str:
    """Without colours and line ends by width."""
    file = io.StringIO()
    _console(file=file, width=_WIDE, color_system=None, force_terminal=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def as_html(drawn: Any) -> str:
    """As a notebook shows it."""
    # Measured first: rich would fill lines up to the width.
    width = max(map(len, as_text(drawn).splitlines()), default=1) + 2
    console = _console(file=io.StringIO(), width=width, record=True, color_system="truecolor", force_terminal=True)
    console.print(drawn)
    code = console.export_html(inline_styles=True, code_format="{code}")
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"
    return f'<pre style="{style}">{code}</pre>'


def _console(**options: Any) -> Any:
    """One that writes to its file: in a notebook rich would show what it prints at once, and leave the file empty."""
    from rich.console import Console

    return Console(**options, legacy_windows=False, force_jupyter=False)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> Any:
    """A table, without the columns in which nothing stands; those called `numbers` are aligned on the right."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    columns = [i for i in range(len(head)) if any(row[i] for row in rows)]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i in columns:  # what is folded is not cut
        drawn.add_column(head[i], justify="right" if head[i] in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[Text(row[i]) for i in columns])
    return Group(Text(title, style="bold"), drawn)  # a title of the table itself would be folded to its width


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
