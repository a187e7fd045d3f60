"""A stretch of calls in which nothing goes wrong: the connections between processes, waits, and how it ends.

Who fails, is interrupted or leaves writes that into the store, closes its connections, and sends nothing more. Who
waits for it reads that there, and fails too. The next call begins the next epoch, which knows nothing of this one.
"""

import contextlib
import ctypes
import datetime
import functools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from fdp._trees.tracebacks import text_of
from fdp.distributed._reports import Elsewhere, Failure, Tag, Waiting, failed, first_sentence, fit, unlike
from fdp.distributed._work_in_thread import in_thread, tell

T = TypeVar("T")
_FIRST, _LONGEST = 0.05, 0.5  # seconds between two looks at the others; Python looks at signals as often
_PATIENCE = 2.0  # seconds for the store to answer, and for others to say what is wrong
_SLACK = 5.0  # seconds that torch waits longer than we do
_MOST = 32  # connections for sums of different sizes
_LEFT: list[Any] = []
"""What waits for ever, with its connections: torch cannot cancel it, and who destroys it waits too."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_LEFT))  # also when Python ends


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

    def __init__(self, stores: Sequence[Any], number: int, rank: int, size: int, limit: datetime.timedelta) -> None:
        self._store, self._line = (PrefixStore(f"{number}", store) for store in stores)
        self.number, self.rank, self.size, self.limit = number, rank, size, limit
        self.calls = 0
        self.known: dict[Any, Any] = {}
        self.ended: str | None = None  # why it is over
        self.has_sent_elsewhere = False  # by connections that are not ours to close
        self._count = 0
        self._groups: dict[Any, Any] = {}
        self._pending: list[Any] = []
        self._asking: Future[Any] | None = None
        self._here: Waiting | None = None

    # ---- connections

    def group(self, tag: Tag, key: Any = "all") -> Any:
        """Connections between CPUs, in which all that is sent at once has one size; all processes make them together.

        Gloo ends a process where sizes differ.
        """
        if key not in self._groups:
            if len(self._groups) > _MOST:
                self._groups.pop(next(other for other in self._groups if other != "all"))
            made = in_thread(functools.partial(self._connected, key))
            self._until(lambda seconds: _is_over(made, seconds), tag)
            self._groups[key] = made.result()
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
        if self.ended is not None:
            raise Elsewhere(f"{tag.name}: {self.ended}")
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
            with contextlib.suppress(RuntimeError):  # what comes next is not shown as a consequence of it
                work.wait(datetime.timedelta(seconds=seconds))
                return True
            if not work.is_completed():
                return False
            work.wait()
            return True

        self._until(wait, tag)
        self._pending.remove(work)

    # ---- waits

    def _until(self, wait: Callable[[float], bool], tag: Tag) -> None:
        """Wait, as long as nobody says that he does not come."""
        began, seconds = time.monotonic(), _FIRST
        try:
            while not self._or_lost(tag, functools.partial(wait, seconds)):
                self._look(tag, began)
                seconds = min(2 * seconds, _LONGEST, self.limit.total_seconds() / 4)
        except BaseException as error:  # Ctrl-C
            self.fail(error)
            raise

    def _or_lost(self, tag: Tag, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RuntimeError, ValueError) as error:  # a connection is closed
            self._lost(tag, error)

    def _look(self, tag: Tag, began: float) -> None:
        notes, places = self._heard(tag)
        limit = self.limit.total_seconds()
        start, (came, late) = f"fdp: {tag.name}: process {self.rank} has waited", self._came(places)
        who = _listed(late or came) + (f". Process {_listed(came)} has come" if came and late else "")
        tell(began, lambda seconds: f"{start} {seconds:.0f} s of at most {limit:g} s for process {who}")
        if notes or time.monotonic() > began + limit:
            self._lost(tag)

    def _heard(self, tag: Tag) -> tuple[Mapping[int, Failure], Mapping[int, Waiting]]:
        """What the others have written, who are told where this one is. Raises if they are elsewhere, or have failed.

        The notes that are returned are of those that have missed others.
        """
        if self._here is None or self._here[:3] != (self._count, tag.name, tag.same):
            self._here = Waiting(self._count, tag.name, tag.same, tag.say())  # once a wait: it may be long
        own = self._here
        others = [rank for rank in range(self.size) if rank != self.rank]

        def ask(store: Any) -> tuple[dict[int, Failure], dict[int, Waiting]]:
            store.set(f"at/{self.rank}", pickle.dumps(tuple(own)))

            def read(key: str, kind: Any) -> dict[int, Any]:
                there = [rank for rank in others if store.check([f"{key}/{rank}"])]
                return {rank: kind(*pickle.loads(store.get(f"{key}/{rank}"))) for rank in there}

            return read("failed", Failure) if store.check(["failed"]) else {}, read("at", Waiting)

        notes, places = self._asked(ask) or ({}, {})
        here = {rank: place for rank, place in places.items() if place.number == self._count} | {self.rank: own}
        if not fit(list(here.values())):
            self._raise(unlike(here))
        if any(note.is_first for note in notes.values()):
            said, traces = failed(notes, self.calls)
            self._raise(f"{tag.name} in process {self.rank} fails: {said}", traces)
        return notes, places

    def _listen(self, tag: Tag, seconds: float) -> Mapping[int, Waiting]:
        """Where the others are, who have so long to say what is wrong."""
        end = time.monotonic() + min(seconds, self.limit.total_seconds())
        while True:
            notes, places = self._heard(tag)
            if notes or time.monotonic() > end:
                return places
            time.sleep(0.05)

    def disagree(self, tag: Tag) -> NoReturn:
        """Say what is different in whom; all processes have found that something is."""
        self._listen(tag, _PATIENCE)
        self._raise(f"{tag.name}: the processes do not fit together")

    def _lost(self, tag: Tag, error: Exception | None = None) -> NoReturn:
        """Raise for those that do not answer any more."""
        came, late = self._came(self._listen(tag, 0 if error is None else _PATIENCE))
        which = f": process {_listed(late)} had not come, process {_listed(came)} had" if came and late else ""
        said = "" if error is None else f". torch.distributed says: {first_sentence(error)}"
        self._raise(
            f"{tag.name}: process {self.rank} could not reach all of the others ({_listed(sorted(came + late))}){which}"
            f". One has ended, or did not come within the {self.limit.total_seconds():g} seconds of "
            f"fdp.distributed.init(timeout=...){said}"
        )

    def _came(self, places: Mapping[int, Waiting]) -> tuple[list[int], list[int]]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        came = [rank for rank in others if rank in places and places[rank].number >= self._count]
        return came, [rank for rank in others if rank not in came]

    # ---- ends

    def _raise(self, text: str, notes: Sequence[str] = ()) -> NoReturn:
        error = Elsewhere(text)
        for note in notes:
            error.add_note(note)
        self.fail(error)
        raise error

    def fail(self, error: BaseException) -> None:
        """Tell the others, and end it."""
        if self.ended is not None:
            return
        note = Failure.of(error, self.calls)
        self.ended = f"this process has raised {type(error).__name__} before" if note.is_first else text_of(error)

        def say(store: Any) -> None:
            store.set(f"failed/{self.rank}", pickle.dumps(tuple(note)))
            store.set("failed", "")

        try:
            self._asked(say)
        finally:
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
        """What the store says. None if it does not answer, as when the process that has it was stopped or has ended.

        Over a line of its own.
        """
        if self._asking is not None and not self._asking.done():
            return None
        self._asking = in_thread(functools.partial(ask, self._line))
        try:
            return self._asking.result(min(_PATIENCE, self.limit.total_seconds()))
        except (TimeoutError, RuntimeError):
            return None


def _is_over(future: "Future[Any]", seconds: float) -> bool:
    try:
        future.result(seconds)
    except TimeoutError:
        return False
    return True


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
