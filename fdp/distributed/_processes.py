"""The processes of a mesh: how many slots each has, and how a call begins in all of them, or fails in all."""

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch.distributed as dist

from fdp._execution.forks import is_forked
from fdp._placement.slot import AXES
from fdp.distributed._communicator import Communicator
from fdp.distributed._session import Tag, meet
from fdp.distributed._underway import leave


class Beginning:
    """Whether a call has begun in all processes."""

    is_over = False


_BEGINNING: contextvars.ContextVar[Beginning | None] = contextvars.ContextVar("fdp_beginning", default=None)


class Processes:
    """All processes of a mesh. `calls` is how many this one has begun: the others have begun as many."""

    def __init__(self, comm: Communicator, slots: Sequence[int]) -> None:
        self.comm: Communicator = comm
        self.slots: tuple[int, ...] = tuple(slots)
        self.calls: int = 0
        self._process = os.getpid()
        self._caller: int | None = None  # the thread that is in a call
        self._communicators: dict[tuple[int, ...], Communicator | None] = {comm.ranks: comm}
        self._is_closed = False

    def check(self, where: str) -> None:
        """The mesh is still there, and it is that of this process."""
        if is_forked(self._process):
            raise RuntimeError(f"{where}: this process was forked, and the mesh is its parent's: only that can use it")
        if self._is_closed or not dist.is_initialized():
            raise RuntimeError(f"{where}: the mesh is closed; fdp.distributed.init makes another")

    def close(self) -> None:
        """Nobody talks any more."""
        self._is_closed = True
        for comm in self._communicators.values():
            if comm is not None and comm is not self.comm and dist.is_initialized():
                leave(comm.group)

    def among(self, ranks: tuple[int, ...]) -> Communicator | None:
        """One between some of the processes, made by all of them together; None if this one is not among them."""
        if ranks not in self._communicators:
            self._communicators[ranks] = self.comm.narrowed(ranks)
        return self._communicators[ranks]

    @contextlib.contextmanager
    def begins(self, where: str) -> Iterator[None]:
        """Around the beginning of a call: what fails before it has begun in all processes fails in all."""
        self.check(where)
        around = _BEGINNING.get()
        if around is not None and not around.is_over:  # the same call
            yield
            return
        own, owns = Beginning(), False
        if not AXES.get():  # calls inside others have no number
            owns = self._caller is None
            if not owns and self._caller != threading.get_ident():
                raise RuntimeError(f"{where}: another thread is in a call on this mesh. One call at a time: use a lock")
            self.calls += 1
        token = _BEGINNING.set(own)
        try:
            if owns:
                self._caller = threading.get_ident()
            yield
        except BaseException as error:
            if not own.is_over:
                meet(self.comm, Tag(where), failure=error)()
            raise
        finally:
            _BEGINNING.reset(token)
            if owns:
                self._caller = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("what is on a mesh of several processes cannot be pickled; pickle its .shards")


def has_begun() -> None:
    """From here on the others are told of failures in another way."""
    beginning = _BEGINNING.get()
    if beginning is not None:
        beginning.is_over = True
