"""A stretch of calls in which nothing goes wrong: the connections between processes, waits, and how it ends.

Who fails, is interrupted or leaves writes that into the store, closes its connections, and sends nothing more. Who
waits for it reads that there, and fails too. The next call begins the next epoch, which knows nothing of this one.
"""

import atexit
import contextlib
import ctypes
import datetime
import functools
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from fdp._trees.listing import differing
from fdp._trees.tracebacks import text_of
from fdp.distributed._notices import NOTICES, Notices

T = TypeVar("T")
_FIRST, _LONGEST = 0.05, 0.5  # seconds between two looks at the others; Python looks at signals as often
_PATIENCE = 2.0  # seconds for the store to answer, and for others to say what is wrong
_SLACK = 5.0  # seconds that torch waits longer than we do
_MOST = 32  # connections for sums of different sizes
_ASKING = "fdp-store"  # the thread that asks the store
_LEFT: list[Any] = []
"""What waits for ever, with its connections: torch cannot cancel it, and who destroys it waits too."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_LEFT))  # also when Python ends


END = "the end of "


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


@final
class Epoch:
    """All processes of a mesh. `calls` is how many they have begun in it, and `known` what they have agreed on.

    They have two connections to the store: one to make others with, and one to ask what has become of the others.
    """

    number: int
    rank: int
    size: int
    limit: datetime.timedelta
    has_sent_elsewhere: bool
    notices: Notices

    def __init__(
        self,
        stores: Sequence[Any],
        number: int,
        rank: int,
        size: int,
        limit: datetime.timedelta,
        notices: Notices = NOTICES,
    ) -> None:
        self._store, self._line = (PrefixStore(f"{number}", store) for store in stores)
        self.number, self.rank, self.size, self.limit = number, rank, size, limit
        self.calls = 0
        self.known: dict[Any, Any] = {}
        self.ended: str | None = None  # why it is over
        self.has_sent_elsewhere = False  # by connections that are not ours to close
        self.notices, self._count = notices, 0
        self._groups: dict[Any, Any] = {}
        self._pending: list[Any] = []

    # ---- connections

    def group(self, tag: Tag, key: Any = "all") -> Any:
        """Connections between CPUs, in which all that is sent at once has one size; all processes make them together.

        Gloo ends a process where sizes differ.
        """
        if key not in self._groups:
            if len(self._groups) > _MOST:
                self._groups.pop(next(other for other in self._groups if other != "all"))
            self._groups[key] = self._in_thread(functools.partial(self._connected, key), tag)
        return self._groups[key]

    def _connected(self, key: Any) -> Any:
        name, limit = f"group/{key}", self.limit + datetime.timedelta(seconds=_SLACK)
        store, end = self._store, time.monotonic() + self.limit.total_seconds() + _SLACK
        store.set(f"{name}/{self.rank}", "")
        while not store.check([f"{name}/{rank}" for rank in range(self.size)]):
            if self.ended is not None or time.monotonic() > end:
                raise RuntimeError("not all have come")
            time.sleep(0.002)
        return ProcessGroupGloo(PrefixStore(name, store), self.rank, self.size, limit)

    def send(
        self, tag: Tag, tensor: Tensor, start: Callable[[Any], Any], key: Any = "all", *, is_more: bool = False
    ) -> Callable[[], None]:
        """Begin an operation of all processes; what is returned waits for it. The device of the tensor says by what.

        It may be one `more` of those that are begun together.
        """
        self.check(tag)
        if tensor.device.type != "cpu":
            self.has_sent_elsewhere = True
            work = self._or_lost(tag, lambda: start(dist.group.WORLD))
            return lambda: self._or_lost(tag, work.wait)  # it waits in the stream of the device, and not here
        self._count += not is_more
        group = self.group(tag, key)
        work = self._or_lost(tag, lambda: start(group))
        self._pending.append(work)
        return functools.partial(self._finish, work, tag)

    def _finish(self, work: Any, tag: Tag) -> None:
        def wait(seconds: float) -> bool:
            try:
                work.wait(datetime.timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()
            return True

        self._until(wait, tag)
        self._pending.remove(work)

    # ---- waits

    def _in_thread(self, work: Callable[[], T], tag: Tag) -> T:
        """What the work returns, in which torch would not hear Ctrl-C."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append((work(), None))
            except Exception as error:
                found.append((None, error))

        thread = threading.Thread(target=run, name="fdp-wait", daemon=True)

        def wait(seconds: float) -> bool:
            thread.join(seconds)
            if not thread.is_alive() and found[0][1] is not None:
                raise found[0][1]
            return not thread.is_alive()

        thread.start()
        try:
            self._until(wait, tag)
        finally:
            if thread.is_alive():  # one that comes back from C++ while Python ends would abort the process
                atexit.register(thread.join, _SLACK)
        return found[0][0]

    def _until(self, wait: Callable[[float], bool], tag: Tag) -> None:
        """Wait, as long as nobody says that he does not come."""
        try:
            if wait(_FIRST):
                return
            began, slice, say = time.monotonic() - _FIRST, _FIRST, self.notices.begin()
            while not wait(slice):
                slice = min(2 * slice, _LONGEST, self.limit.total_seconds() / 4)
                self._look(tag, time.monotonic() - began, say)
        except Elsewhere:
            raise
        except (RuntimeError, ValueError) as error:
            self._lost(tag, error)
        except BaseException as error:  # Ctrl-C
            self.fail(error)
            raise

    def _look(self, tag: Tag, waited: float, say: Any) -> None:
        notes, places = self._asked(functools.partial(self._heard, self._place(tag))) or ({}, {})
        self._compare(tag, notes, places)
        who, limit = self._who(places), self.limit.total_seconds()
        start = f"fdp: {tag.name}: process {self.rank} has waited"
        say(lambda seconds: f"{start} {seconds:.0f} s of at most {limit:g} s for {who}")
        if waited > limit:
            self._lost(tag, None, places)

    def _place(self, tag: Tag) -> Waiting:
        return Waiting(self._count, tag.name, tag.same, tag.say())

    def _heard(self, own: Waiting | None, store: Any) -> tuple[dict[int, Failure], dict[int, Waiting]]:
        """What the others have written; they are told where this one is."""
        if own is not None:
            store.set(f"at/{self.rank}", pickle.dumps(tuple(own)))
        others = [rank for rank in range(self.size) if rank != self.rank]

        def read(key: str, kind: Any) -> dict[int, Any]:
            there = [rank for rank in others if store.check([f"{key}/{rank}"])]
            return {rank: kind(*pickle.loads(store.get(f"{key}/{rank}"))) for rank in there}

        return read("failed", Failure) if store.check(["failed"]) else {}, read("at", Waiting)

    def _compare(self, tag: Tag, notes: Mapping[int, Failure], places: Mapping[int, Waiting]) -> None:
        """Raise if others are elsewhere, or have failed."""
        here = {rank: place for rank, place in places.items() if place.number == self._count}
        both = [tag, *here.values()]
        if len({place.name for place in both}) > 1 or len({place.same for place in both} - {0}) > 1:
            self._raise(_differing(here | {self.rank: self._place(tag)}))
        if any(note.is_first for note in notes.values()):
            self._raise(*self._failed(tag, notes))
        if notes:  # of processes that have missed others
            self._lost(tag, None, places)

    def _failed(self, tag: Tag, notes: Mapping[int, Failure]) -> tuple[str, list[str]]:
        first = {rank: note for rank, note in notes.items() if note.is_first}
        said = "; ".join(f"process {rank} {note.how}" for rank, note in first.items())
        traces = [f"In process {rank}:\n{note.trace.rstrip()}" for rank, note in first.items() if note.trace]
        late = [str(rank) for rank, note in first.items() if note.call < self.calls]
        if late:
            said += (
                f". That was in a call which this process has completed: its state may be a step ahead of that of "
                f"process {', '.join(late)}. Go back to the last checkpoint (Checkpoints.restore), or take the values "
                "of process 0 (fdp.replicate)"
            )
        return f"{tag.name} in process {self.rank} fails: {said}", traces

    def disagree(self, tag: Tag) -> NoReturn:
        """Say what is different in whom; all processes have found that something is."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            notes, places = self._asked(functools.partial(self._heard, self._place(tag))) or ({}, {})
            here = [place for place in places.values() if place.number >= self._count]
            if len(here) == self.size - 1 or notes:
                self._compare(tag, notes, places)
            time.sleep(0.01)
        self._raise(f"{tag.name}: the processes do not fit together")

    def _or_lost(self, tag: Tag, work: Callable[[], T]) -> T:
        try:
            return work()
        except RuntimeError as error:  # a connection is closed
            self._lost(tag, error)

    def _lost(self, tag: Tag, error: Exception | None, places: Mapping[int, Waiting] | None = None) -> NoReturn:
        """Raise for those that do not answer any more: they may have said why."""
        end = time.monotonic() + (0 if error is None else min(_PATIENCE, self.limit.total_seconds()))
        while time.monotonic() < end:
            found = self._asked(functools.partial(self._heard, self._place(tag)))
            if found is None:
                break
            self._compare(tag, *found)
            time.sleep(0.1)
        came, late = self._came(places or {})
        which = f": process {_listed(late)} had not come, process {_listed(came)} had" if came and late else ""
        said = "" if error is None else f". torch.distributed says: {first_sentence(error)}"
        limit, others = self.limit.total_seconds(), _listed([r for r in range(self.size) if r != self.rank])
        self._raise(
            f"{tag.name}: process {self.rank} could not reach all of the others ({others}){which}. One has ended, or "
            f"did not come within the {limit:g} seconds of fdp.distributed.init(timeout=...){said}"
        )

    def _came(self, places: Mapping[int, Waiting]) -> tuple[list[int], list[int]]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        came = [rank for rank in others if rank in places and places[rank].number >= self._count]
        return came, [rank for rank in others if rank not in came]

    def _who(self, places: Mapping[int, Waiting]) -> str:
        came, late = self._came(places)
        return f"process {_listed(late or came)}" + (f". Process {_listed(came)} has come" if came and late else "")

    # ---- ends

    def check(self, tag: Tag) -> None:
        """It has not ended."""
        if self.ended is not None:
            raise Elsewhere(f"{tag.name}: {self.ended}")

    def _raise(self, text: str, notes: list[str] | None = None) -> NoReturn:
        error = Elsewhere(text)
        for note in notes or ():
            error.add_note(note)
        self.fail(error)
        raise error

    def fail(self, error: BaseException) -> None:
        """Tell the others, and end it."""
        if self.ended is not None:
            return
        is_own = not isinstance(error, Elsewhere)
        self.ended = text_of(error) if not is_own else f"this process has raised {type(error).__name__} before"
        trace = "".join(traceback.format_exception(error)) if is_own else ""
        note = pickle.dumps((self.calls, f"has raised {type(error).__name__}: {text_of(error)}", trace, is_own))

        def say(store: Any) -> None:
            store.set(f"failed/{self.rank}", note)
            store.set("failed", "")

        self._asked(say)
        self.close()

    def close(self) -> None:
        """Close the connections, which the others notice if they wait."""
        self.ended = self.ended or "it has been left"
        _LEFT[:] = [each for each in _LEFT if not all(work.is_completed() for work in each[0])]
        if not all(work.is_completed() for work in self._pending):
            _LEFT.append((self._pending, self._groups))
        self._pending, self._groups = [], {}
        self.known.clear()

    def _asked(self, ask: Callable[[Any], T]) -> T | None:
        """What the store says, None if it does not answer.

        In a thread, over a line of its own: a store whose process has stopped never answers.
        """
        if any(thread.name == _ASKING for thread in threading.enumerate()):
            return None
        found: list[T] = []

        def look() -> None:
            with contextlib.suppress(RuntimeError):  # the store may have gone, with the process that has it
                found.append(ask(self._line))

        thread = threading.Thread(target=look, name=_ASKING, daemon=True)
        thread.start()
        thread.join(min(_PATIENCE, self.limit.total_seconds()))
        return found[0] if found else None


def _differing(places: Mapping[int, Waiting]) -> str:
    ranks = sorted(places)
    names = [places[rank].name for rank in ranks]
    if len({name.removeprefix(END) for name in names}) > 1:
        each = ", ".join(f"{name} in process {rank}" for rank, name in zip(ranks, names, strict=True))
        hint = ". A process without rows cannot follow collectives: give every process rows (drop_last=True, padding)"
        more = hint if any("no rows here" in place.text for place in places.values()) else ""
        return f"the processes are at different places: {each}. All must do the same in the same order{more}"
    each = differing([places[rank].text for rank in ranks], [f"process {rank}" for rank in ranks])
    return f"{names[0].removeprefix(END)}: the processes do not fit together: {each}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def first_sentence(error: BaseException) -> str:
    """What torch says, without its advice."""
    return (str(error).splitlines() or [""])[0].split(". This is")[0]
