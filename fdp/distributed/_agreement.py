"""What all processes know of a call on a mesh: which have shards, how the call begins in all, and how it ends."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from fdp._placement.slot import AXES
from fdp.distributed._processes import Processes, has_begun
from fdp.distributed._session import Session, Tag, meet
from fdp.distributed._table import Table


class Agreement:
    """A call on a mesh. As a context: around what a process does by itself; if that fails, the others fail too.

    The table is known when the others have begun the call too, and waited for when it is first needed.
    """

    def __init__(
        self, processes: Processes, where: str, same: Any, rows: Sequence[int], say: Callable[[], str] = str
    ) -> None:
        has_begun()
        self._is_inside = bool(AXES.get())  # calls inside others have no order
        self.number = 0 if self._is_inside else processes.calls
        self.where, self.processes = where, processes
        self.everybody = Session(processes.comm)
        self._tag = Tag(f"the end of {where}")
        numbers = [len(rows), *rows]
        numbers += [0] * (1 + max(processes.slots) - len(numbers))
        tag = self.numbered(where, (processes.slots, same), lambda: f"slots {processes.slots}\n{say() or same}")
        self._has_rows = len(rows) > 0
        self._begun: Any = self.everybody.begin(tag, numbers)
        self._answer: Table | BaseException | None = None
        self._asking = threading.Lock()
        self._is_over = False  # what comes then are backwards of the caller's

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
        sizes = [row[1 : 1 + row[0]] for row in begun()]
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

    def part(self) -> Self:
        return self

    def numbered(self, name: str, same: object, say: Callable[[], str]) -> Tag:
        """A tag of this call, and of no other: a backward comes back to it, and may come to several in any order."""
        return Tag(name, repr((self.number, same)), lambda: f"call {self.number}\n{say()}")

    def meets(self, tag: Tag, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every process that has shards, in the call or in a backward that comes after it."""
        assert self.session is not None
        return meet(self.session.comm, tag, numbers)() if self._is_over else self.session.agree(tag, numbers)

    def ends_with(self, tag: Tag) -> None:
        """What has to be the same in all processes at the end."""
        self._tag = tag

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Meet at the end: first those that have shards, then all."""
        elsewhere = self._end(error)
        self._is_over = True
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
            elsewhere = self.session.end(self._tag, error)
        return self.everybody.end(self._tag, error or elsewhere) or elsewhere
