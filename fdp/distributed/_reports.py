"""What processes say of themselves: where they are, and how they have failed."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fdp._trees.message_lists import differing
from fdp._trees.tracebacks import text_of

END = "the end of "
NO_ROWS_HERE = "no rows here"
_FOLLOW = ". A process without rows cannot follow collectives: give every process rows (drop_last=True, padding)"


class Elsewhere(RuntimeError):
    """Raised where another process has failed, or has gone elsewhere."""

    def __reduce__(self) -> Any:
        return RuntimeError, self.args  # for those who load it, too


Elsewhere.__name__ = Elsewhere.__qualname__ = "RuntimeError"  # for users it is one
Elsewhere.__module__ = "builtins"


class Tag(NamedTuple):
    """Where a process is: the name of what it does, what of it is the same everywhere, and that as text."""

    name: str
    same: int = 0
    say: Callable[[], str] = str


class Waiting(NamedTuple):
    """Where a process waits: at which operation of the epoch, and what it is."""

    number: int
    name: str
    same: int
    text: str


class Failure(NamedTuple):
    """What a process has failed by: in which call, how, where in its code, and whether another has failed before."""

    call: int
    how: str
    trace: str
    is_first: bool

    @classmethod
    def of(cls, error: BaseException, call: int) -> "Failure":
        is_first = not isinstance(error, Elsewhere)
        trace = "".join(traceback.format_exception(error)) if is_first else ""
        return cls(call, f"has raised {type(error).__name__}: {text_of(error)}", trace, is_first)


def fit(places: Sequence[Waiting]) -> bool:
    """Whether all are at one place."""
    return len({place.name for place in places}) == 1 and len({place.same for place in places} - {0}) <= 1


def unlike(places: Mapping[int, Waiting]) -> str:
    """In what they differ."""
    ranks = sorted(places)
    names, texts = [places[rank].name for rank in ranks], [places[rank].text for rank in ranks]
    if len({name.removeprefix(END) for name in names}) > 1:
        each = ", ".join(f"{name} in process {rank}" for rank, name in zip(ranks, names, strict=True))
        return f"the processes are at different places: {each}. All must do the same in the same order{_more(texts)}"
    who_know = [rank for rank in ranks if places[rank].same]
    ranks = who_know if len(who_know) > 1 else ranks
    each = differing([places[rank].text for rank in ranks], [f"process {rank}" for rank in ranks])
    return f"{names[0].removeprefix(END)}: the processes do not fit together: {each}{_more([each])}"


def _more(texts: Sequence[str]) -> str:
    return _FOLLOW if any(NO_ROWS_HERE in text for text in texts) else ""


def failed(notes: Mapping[int, Failure], call: int) -> tuple[str, list[str]]:
    """How those did that were the first, and their tracebacks, for a process that is in such a call."""
    first = {rank: note for rank, note in notes.items() if note.is_first}
    said = "; ".join(f"process {rank} {note.how}" for rank, note in first.items())
    late = [str(rank) for rank, note in first.items() if note.call < call]
    if late:
        said += (
            ". That was in a call which this process has completed: its state may be a step ahead of that of process "
            f"{', '.join(late)}. Go back to the last checkpoint (Checkpoints.restore), or take the values of process 0 "
            "(fdp.replicate)"
        )
    return said, [f"In process {rank}:\n{note.trace.rstrip()}" for rank, note in first.items() if note.trace]


def first_sentence(error: BaseException) -> str:
    """What torch says, without its advice."""
    return (str(error).splitlines() or [""])[0].split(". This is")[0]
