"""What all processes know of a call on a mesh: which have shards, how the call begins in all, and how it ends."""

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from fdp._execution.restart import Again
from fdp._placement.slot import AXES
from fdp.distributed._communicator import Session, Tag
from fdp.distributed._entry import BEGINNING
from fdp.distributed._processes import Processes


class Agreement:
    """A call on a mesh: which processes have shards, and what comes before those of this one.

    That is known when the others have begun the call too, and waited for when it is first needed. As a context: around
    what a process does by itself. If that fails, the others are told, and fail too.
    """

    def __init__(
        self,
        processes: Processes,
        where: str,
        same: Any,
        rows: Sequence[int],
        *,
        apart: bool = False,
        say: Callable[[], str] = str,
    ) -> None:
        beginning = BEGINNING.get()
        if beginning is not None:
            beginning.is_over = True
        self.number = 0 if AXES.get() else processes.calls  # calls inside others have no order
        same = self.number, same
        self.where = where
        self.processes, self._tag = processes, Tag(f"the end of {where}")
        self.everybody = Session(processes.comm)
        self._has_rows = len(rows) > 0
        numbers = [apart, len(rows), *rows] + [0] * (max(processes.slots) - len(rows))

        def said() -> str:
            return f"call {self.number}\n{say() or same[1]}"

        self._begun: Callable[[], list[list[int]]] | None = self.everybody.begin(Tag(where, repr(same), said), numbers)
        self._answer: _All | BaseException | None = None
        self._asking = threading.Lock()
        self._zeros: Callable[[], list[Tensor]] | None = None
        self._added: tuple[Sequence[Tensor], Sequence[bool]] | None = None
        self.has_met = False  # before the end
        self.sums: list[Tensor] | None = None
        """Those of what was `added`."""

    @property
    def _all(self) -> "_All":
        if self._answer is None:
            with self._asking:  # shards that run side by side may all come here
                if self._answer is None:
                    try:
                        self._answer = self._begin()
                    except BaseException as error:  # the others are asked once; Ctrl-C ends the question
                        self._answer = error
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def _begin(self) -> "_All":
        assert self._begun is not None
        begun, self._begun = self._begun, None  # it refers to this object, and to the connections
        table = begun()
        counts = [row[1] for row in table]
        if not any(counts):  # no rows at all are one empty shard
            counts[0] = 1
        found = _All(
            counts, [row[2 : 2 + n] for row, n in zip(table, counts, strict=True)], all(row[0] for row in table)
        )
        # Before anything else is said, since all processes make the group together.
        comm = self.processes.among(found.ranks) if 1 < len(found.ranks) < len(counts) else None
        self._session = self.everybody if found.is_whole else None if comm is None else Session(comm)
        return found

    @property
    def counts(self) -> list[int]:
        """The shards of each process."""
        return self._all.counts

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that have shards."""
        return self._all.ranks

    @property
    def count(self) -> int:
        """All shards."""
        return sum(self.counts)

    @property
    def offset(self) -> int:
        """The shards of the processes before."""
        return sum(self.counts[: self.processes.comm.rank])

    @property
    def all_rows(self) -> int:
        """All rows."""
        return sum(map(sum, self._all.rows))

    @property
    def all_sizes(self) -> list[int]:
        """The rows of every shard."""
        return [rows for each in self._all.rows for rows in each]

    @property
    def rows_before(self) -> int:
        """The rows of the processes before."""
        return sum(map(sum, self._all.rows[: self.processes.comm.rank]))

    @property
    def is_whole(self) -> bool:
        """Whether all processes have shards."""
        return self._all.is_whole

    @property
    def is_active(self) -> bool:
        """Whether this one has."""
        return self._has_rows or self.counts[self.processes.comm.rank] > 0

    @property
    def is_apart(self) -> bool:
        """Whether nobody meets the others before the end, as far as all processes know."""
        return self._all.is_apart

    @property
    def session(self) -> Session | None:
        """With those that have shards, None if there are no others."""
        return self._session if self._all else None

    def total(self, number: float, name: str) -> float:
        """The sum of a number of every process."""
        assert self._all
        self.everybody.agree(Tag(name))
        return self.everybody.comm.sums([torch.tensor(number, dtype=torch.float64)], name)[0].item()

    def ends_with(self, tag: Tag) -> None:
        """What has to be the same in all processes at the end."""
        self._tag = tag

    def adds_at_end(self) -> bool:
        """Whether all processes add up at the end what they know to be the same in all, without asking."""
        return self._zeros is not None and self.is_apart and self.is_whole

    def may_add(self, zeros: Callable[[], list[Tensor]]) -> None:
        """At the end a number and tensors like these will be added up, if nobody meets the others before."""
        self._zeros = lambda: [torch.zeros((), dtype=torch.float64), *zeros()]

    def add(self, tensors: Sequence[Tensor], ours: Sequence[bool]) -> None:
        """Add these up at the end; those that are `ours` may be overwritten."""
        self._added = tensors, ours

    def again(self, where: str) -> "contextlib.AbstractContextManager[object]":
        """As a context: another run of those that have met, such as their backward."""
        return (
            _Again(self.session, Tag(where)) if self.has_met and self.session is not None else contextlib.nullcontext()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Meet at the end: first those that have shards, then all."""
        try:
            whole = self.is_whole
        except BaseException:
            if error is None:
                raise
            return  # nobody waits for this one
        elsewhere: BaseException | None = None
        if not whole and self.session is not None:
            elsewhere = _told(self.session, self._tag, error)
        first = elsewhere
        elsewhere = self._end(error or first) or first
        if elsewhere is not None and (error is None or isinstance(error, Again)):
            raise elsewhere

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Meet all, and add up at the same time what is known to be the same in all."""
        if self._zeros is None or not self.adds_at_end():
            return _told(self.everybody, self._tag, error)
        if self.everybody.is_over:
            return None
        (first, *rest), ours = self._added if self._added is not None and error is None else (self._zeros(), ())
        finish = self.everybody.begin(self._tag, [_bits(first.item())], error)  # a message less than a sum of its own
        sums = self.everybody.comm.begin_sums(rest, self._tag.name, ours[1:])
        numbers: list[list[int]] = []
        try:
            numbers = finish()
        except (Exception, Again) as elsewhere:
            return elsewhere
        finally:
            self.sums = [first.new_tensor(sum(_number(row[0]) for row in numbers)), *sums()]
        return None


def _bits(number: float) -> int:
    """A float as an int, to be sent among ints."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


class _All(NamedTuple):
    counts: list[int]
    rows: list[list[int]]
    is_apart: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(i for i, count in enumerate(self.counts) if count)

    @property
    def is_whole(self) -> bool:
        return all(self.counts)


@final
class _Again:
    def __init__(self, session: Session, tag: Tag) -> None:
        session.is_over = False
        self._session, self._tag = session, tag

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        elsewhere = _told(self._session, self._tag, error)
        if error is None and elsewhere is not None:
            raise elsewhere


def _told(session: Session, tag: Tag, error: BaseException | None) -> BaseException | None:
    """Tell the others how it went; why this process has to fail if it has not."""
    if session.is_over and error is not None:
        return None
    try:
        session.agree(tag, failure=error)
    except (Exception, Again) as elsewhere:
        return elsewhere
    return None
