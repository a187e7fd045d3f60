"""Lists in messages, which stay readable where thousands of leaves have the same problem."""

from collections.abc import Callable, Sequence
from typing import Any

MOST = 10


def listed(things: Sequence[Any], say: Callable[[Any], str] = str, separator: str = ", ") -> str:
    """What `say` says of the first ten, and how many more there are. Of the others it is not asked."""
    more = len(things) - MOST
    shown = [say(thing) for thing in things[:MOST]]
    return separator.join([*shown, f"{more:,} more"] if more > 0 else shown)
