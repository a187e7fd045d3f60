"""What all processes know of a call on a mesh: which have shards, how the call begins in all, and how it ends."""

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fdp._placement.slot import AXES
from fdp.distributed._processes import Processes, has_begun
from fdp.distributed._session import Added, Session, Tag


class Table(NamedTuple):
    """The rows of every shard of every process."""

    sizes: list[list[int]]
    rank: int

    @property
    def counts(self) -> list[int]:
        """The shards of each process."""
        return [len(each) for each in self.sizes]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that have shards."""
        return tuple(rank for rank, each in enumerate(self.sizes) if each)

    @property
    def is_whole(self) -> bool:
        """Whether all processes have shards."""
        return all(self.sizes)

    @property
    def before(self) -> tuple[int, int]:
        """The shards and the rows of the processes before this one."""
        return sum(self.counts[: self.rank]), sum(map(sum, self.sizes[: self.rank]))


class Agreement:
    """A call on a mesh. As a context: around what a process does by itself; if that fails, the others fail too.

    The table is known when the others have begun the call too, and waited for when it is first needed.
    """

    def __init__(
        self, processes: Processes, where: str, same: Any, rows: Sequence[int], say: Callable[[], str] = str
    ) -> None:
        has_begun()
        self._is_inside = bool(AXES.get())  # calls inside others have no order
        number = 0 if self._is_inside else processes.calls
        self.where, self.processes = where, processes
        self.everybody = Session(processes.comm)
        self._tag = Tag(f"the end of {where}")
        numbers = [len(rows), *rows]
        numbers += [0] * (1 + max(processes.slots) - len(numbers))
        tag = Tag(where, repr((number, same)), lambda: f"call {number}\n{say() or same}")
        self._has_rows = len(rows) > 0
        self._begun: Any = self.everybody.begin(tag, numbers)
        self._answer: Table | BaseException | None = None
        self._asking = threading.Lock()
        self._zeros: Callable[[], list[Tensor]] | None = None
        self._added: tuple[Tensor, Added] | None = None
        self.has_met = False  # before the end
        self.sums: list[Tensor] | None = None
        """Those of what was `added`."""

    @property
    def table(self) -> Table:
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

    def _begin(self) -> Table:
        begun, self._begun = self._begun, None  # it refers to this object, and to the connections
        sizes = [row[1 : 1 + row[0]] for row in begun().numbers]
        if not any(sizes):  # no rows at all are one empty shard
            sizes[0] = [0]
        table = Table(sizes, self.processes.comm.rank)
        # Before anything else is said, since all processes make the group together.
        comm = self.processes.among(table.ranks) if 1 < len(table.ranks) < len(sizes) else None
        self._session = self.everybody if table.is_whole else None if comm is None else Session(comm)
        return table

    @property
    def session(self) -> Session | None:
        """With those that have shards, None if there are no others."""
        return self._session if self.table else None

    @property
    def is_active(self) -> bool:
        """Whether this process has shards."""
        return self._has_rows or len(self.table.sizes[self.processes.comm.rank]) > 0

    def total(self, number: float, name: str) -> float:
        """The sum of a number of every process."""
        assert self.table
        self.everybody.agree(Tag(name))
        return self.everybody.comm.sums([torch.tensor(number, dtype=torch.float64)], name)[0].item()

    def part(self, zeros: Callable[[], list[Tensor]] | None = None) -> Self:
        """This, as a context; tensors like the `zeros` may be added up at its end."""
        self._zeros = None if self._is_inside else zeros
        return self

    def ends_with(self, tag: Tag) -> None:
        """What has to be the same in all processes at the end."""
        self._tag = tag

    def add(self, number: Tensor, tensors: Sequence[Tensor], ours: Sequence[bool]) -> None:
        """Add these up at the end, if nothing is in the way; then `sums` has what they come to."""
        if self._zeros is not None and self.table.is_whole:
            self._added = number, Added(tensors, ours)

    @contextlib.contextmanager
    def again(self, where: str) -> Iterator[None]:
        """Another run of those that have met, such as their backward."""
        session = self.session if self.has_met else None
        if session is None:
            yield
            return
        session.is_over = False
        error: BaseException | None = None
        try:
            yield
        except BaseException as own:
            error = own
            raise
        finally:
            elsewhere, _ = session.end(Tag(where), error)
            if elsewhere is not None and error is None:
                raise elsewhere

    def __enter__(self) -> Self:
        if self._zeros is not None:
            self.everybody.comm.owed = self._zeros
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Meet at the end: first those that have shards, then all."""
        try:
            elsewhere = self._end(error)
        finally:
            if self._zeros is not None:
                self.everybody.comm.owed = None
        if elsewhere is not None and error is None:
            raise elsewhere

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Why this process has to fail, if it has not."""
        try:
            whole = self.table.is_whole
        except BaseException:
            if error is None:
                raise
            return None  # nobody waits for this one
        elsewhere: BaseException | None = None
        if not whole and self.session is not None:
            elsewhere, _ = self.session.end(self._tag, error)
        error = error or elsewhere
        if error is not None or self._added is None:
            return self.everybody.end(self._tag, error)[0] or elsewhere
        number, added = self._added
        elsewhere, answer = self.everybody.end(self._tag, None, [_bits(number.item())], added)  # no sum of its own
        if elsewhere is None:
            self.sums = [number.new_tensor(sum(_number(row[0]) for row in answer.numbers)), *answer.sums]
        return elsewhere


def _bits(number: float) -> int:
    """A float as an int, to be sent among ints."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
