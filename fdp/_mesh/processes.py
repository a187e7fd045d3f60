"""The processes of a mesh, and how many slots each has."""

import abc
from collections.abc import Sequence
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from fdp._mesh.communicator import Wire
from fdp._mesh.underway import leave


@final
class Processes:
    """All processes of a mesh: how many slots each has, and how they talk."""

    def __init__(self, wire: Wire, slots: Sequence[int]) -> None:
        self.wire: Wire = wire
        self.slots: tuple[int, ...] = tuple(slots)
        self._wires: dict[tuple[int, ...], Wire | None] = {wire.ranks: wire}
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
        for wire in self._wires.values():
            if wire is not None and wire is not self.wire and dist.is_initialized():
                leave(wire.group)

    def among(self, ranks: tuple[int, ...]) -> Wire | None:
        """A wire between some of the processes, made by all of them together; None if this one is not among them."""
        if ranks not in self._wires:
            self._wires[ranks] = self.wire.narrowed(ranks)
        return self._wires[ranks]

    def __reduce__(self) -> NoReturn:
        raise TypeError("what is on a mesh of several processes cannot be pickled; pickle its .shards")


class Located:
    """What slots hold, with the processes that these slots are part of; None if this one is alone."""

    processes: Processes | None


class Spread(Sequence[torch.device]):
    """Devices of this process, one a slot, beside those of other processes. None: there are no others."""

    @property
    @abc.abstractmethod
    def processes(self) -> Processes | None: ...


def processes_of(devices: Any, where: str) -> Processes | None:
    """Those that a user's devices are spread over, None if this process is alone."""
    processes = devices.processes if isinstance(devices, Spread) else None
    if processes is not None:
        processes.check(where)
    return processes
