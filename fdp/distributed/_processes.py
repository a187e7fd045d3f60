"""The processes of a mesh, and how many slots each has."""

from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from fdp.distributed._communicator import Communicator
from fdp.distributed._underway import leave


class Processes:
    """All processes of a mesh: how many slots each has, and how they talk."""

    def __init__(self, comm: Communicator, slots: Sequence[int]) -> None:
        self.comm: Communicator = comm
        self.slots: tuple[int, ...] = tuple(slots)
        self._communicators: dict[tuple[int, ...], Communicator | None] = {comm.ranks: comm}
        self._is_closed = False
        self.calls = 0
        """How many calls this process has begun: the others have begun as many."""
        self.caller: int | None = None
        """The thread that is in a call."""

    def check(self, where: str) -> None:
        """The mesh is still there."""
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

    def __reduce__(self) -> NoReturn:
        raise TypeError("what is on a mesh of several processes cannot be pickled; pickle its .shards")
