"""Lists in messages, which stay readable where thousands of leaves have the same problem."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

MOST = 10
_ROOM = 800  # characters, for what several have that differ


def listed(things: Sequence[Any], say: Callable[[Any], str] = str, separator: str = ", ", most: int = MOST) -> str:
    """What `say` says of the first ones, and how many more there are. Of the others it is not asked."""
    more = len(things) - most
    shown = [say(thing) for thing in things[:most]]
    return separator.join([*shown, f"{more:,} more"] if more > 0 else shown)


def quoted(thing: object, most: int = 60) -> str:
    """A key or a value as one would write it, cut where it is long."""
    text = repr(thing)
    return text if len(text) <= most else f"{text[:most]}..."


def names(things: Sequence[Any]) -> str:
    """The first ten as a list is written."""
    return f"[{listed(things, quoted)}]"


def odd_first(things: Sequence[Any], key: Callable[[Any], Any], most: int = MOST) -> Sequence[Any]:
    """Where there are many, one of each kind first, then the second ones: a list that is cut has all kinds."""
    seen: Counter[Any] = Counter()
    turns: list[int] = []
    for thing in things:
        seen[key(thing)] += 1
        turns.append(seen[key(thing)])
    return things if len(things) <= most else [things[i] for i in sorted(range(len(things)), key=turns.__getitem__)]


def differing(texts: Sequence[str], owners: Sequence[str]) -> str:
    """The first line in which texts differ, of each with its owner; of long lines the part around the difference."""
    lines = zip_longest(*(text.split("\n") for text in texts), fillvalue="nothing")
    line = next((line for line in lines if len(set(line)) > 1), texts)
    line = around_difference(line, _ROOM // min(len(line), MOST))
    pairs = odd_first(list(zip(line, owners, strict=True)), lambda pair: pair[0])
    return listed(pairs, lambda pair: f"{pair[0]} in {pair[1]}")


def note_lists(error: Exception, args: Sequence[Any], first: int, function: str, write: str) -> None:
    """Say of an error that may come of it that an argument is a list, such as a batch that a loader has made."""
    kinds = (list, tuple) if "missing" in str(error) else (list,)
    several = [i for i, arg in enumerate(args) if type(arg) in kinds]
    known = any(_AS_PASSED in note for note in getattr(error, "__notes__", ()))
    if several and not known and ("argument" in str(error) or "list" in str(error)):
        which = f"argument {first + several[0]} of {function} is a {type(args[several[0]]).__name__}{_AS_PASSED}"
        note = f"{which}. For its elements as arguments of their own {write}"
        with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
            error.add_note(note)


_AS_PASSED = ", as it was passed"


def around_difference(texts: Sequence[str], room: int) -> list[str]:
    """So many characters of each text, from shortly before the first in which they differ."""
    columns = enumerate(zip(*texts, strict=False))
    common = next(
        (i for i, column in columns if len(set(column)) > 1), 0 if len(set(texts)) == 1 else min(map(len, texts))
    )
    start = max(0, common - room // 2) if max(map(len, texts)) > room else 0
    return ["..." * (start > 0) + text[start : start + room] + "..." * (len(text) > start + room) for text in texts]
