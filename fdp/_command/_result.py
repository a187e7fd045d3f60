"""What one check of a machine has found."""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Result(NamedTuple):
    """What one check has found.

    Attributes:
        name: The check.
        status: Whether something is wrong.
        summary: What there is, in a line.
        advice: What to do, in a line.
        lines: More of what there is.
    """

    name: str
    status: Literal["ok", "warning", "failed"]
    summary: str
    advice: str = ""
    lines: Sequence[str] = ()

    def __str__(self) -> str:
        below = [*self.lines, *([f"-> {self.advice}"] if self.advice else [])]
        return "\n".join([f"{self.status:9}{self.name:10}{self.summary}", *(" " * 19 + line for line in below)])
