"""Lines and tables on the standard output: with colours in a terminal, plain everywhere else."""

import sys
from collections.abc import Sequence
from typing import TextIO

Row = Sequence[str]
Span = tuple[str, str]
"""A piece of a line, and its rich style."""


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody is looking; a stream that is closed or missing is none."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def line(*spans: Span | str) -> None:
    """Print one line, which is never cut or folded: a terminal folds it, a pipe gets it whole."""
    pieces = [(span, "") if isinstance(span, str) else span for span in spans]
    if not is_terminal(sys.stdout):
        print("".join(text for text, _ in pieces).rstrip(), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text.assemble(*pieces))


def table(title: str, head: Row, sections: Sequence[Sequence[Row]], left: int = 2) -> None:
    """Print rows under a title; the first `left` columns hold words, the others numbers."""
    if is_terminal(sys.stdout):
        _drawn(title, head, sections, left)
    else:
        print(plain_table(title, head, sections, left), flush=True)


def plain_table(title: str, head: Row, sections: Sequence[Sequence[Row]], left: int = 2) -> str:
    """The table in columns as wide as what stands in them, without lines.

    >>> print(plain_table("Speeds", ["device", "GB/s"], [[["cuda:0", "12.5"], ["cuda:1", "9"]]], left=1))
    Speeds
    device  GB/s
    cuda:0  12.5
    cuda:1     9
    """
    rows = [head, *(row for rows in sections for row in rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [title]
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(cells)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _drawn(title: str, head: Row, sections: Sequence[Sequence[Row]], left: int) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(head):
        drawn.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for rows in sections:
        for i, row in enumerate(rows):
            drawn.add_row("" if i and row[0] == rows[i - 1][0] else row[0], *row[1:])
        drawn.add_section()
    Console().print(drawn)
