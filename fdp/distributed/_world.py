"""The processes of a group, their calls on meshes, and the epoch that they are in."""

import contextlib
import datetime
import os
import threading
import weakref
from typing import Any, Self, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fdp._execution.forks import is_forked
from fdp._placement.slot import AXES
from fdp._trees import torch_private
from fdp._trees.profiling import NOTHING
from fdp.distributed._waits_and_failures import Epoch

_WORLDS: "weakref.WeakKeyDictionary[Any, World]" = weakref.WeakKeyDictionary()


@final
class World:
    """As a context: around a call. What fails in it fails in all processes, and ends the epoch."""

    rank: int
    size: int
    process: int
    epoch: Epoch

    def __init__(self, group: Any, limit: datetime.timedelta) -> None:
        self.rank, self.size, self.process = dist.get_rank(), dist.get_world_size(), os.getpid()
        store = group.get_group_store()
        self._stores = [PrefixStore("fdp", each) for each in (store, store.clone())]  # once: it may take seconds
        self._caller: int | None = None  # the thread that is in a call
        self.epoch = Epoch(self._stores, 0, self.rank, self.size, limit)

    @classmethod
    def here(cls, limit: datetime.timedelta) -> "World":
        """That of the group of all processes."""
        group: Any = dist.group.WORLD
        if group not in _WORLDS:
            _WORLDS[group] = cls(group, limit)
        found = _WORLDS[group]
        found.epoch.limit = limit
        return found

    def begins(self, where: str) -> contextlib.AbstractContextManager[object]:
        """Around a call, which has a number; those inside of others have none."""
        own = threading.get_ident()
        if torch_private.is_transformed() or torch_private.is_forward_mode():
            raise RuntimeError(f"{where}: {_TRANSFORMED}")
        if AXES.get():
            raise RuntimeError(f"{where}: {_INSIDE}")
        # Ctrl-C may have come before a call was left: that is over once the epoch is.
        if self._caller == own and self.epoch.ended is None:
            return NOTHING
        if self._caller not in (None, own):
            raise RuntimeError(f"{where}: another thread is in a call on this mesh. One call at a time: use a lock")
        self._go_on(where)
        return self

    def _go_on(self, where: str) -> None:
        old = self.epoch
        if old.ended is None:
            return
        if old.has_sent_elsewhere:
            raise RuntimeError(
                f"{where}: {old.ended}. The connections between accelerators cannot be made anew: end the program, and "
                "let torchrun start it again (--max-restarts)"
            )
        self.epoch = Epoch(self._stores, old.number + 1, self.rank, self.size, old.limit)

    def __enter__(self) -> Self:
        self._caller = threading.get_ident()
        self.epoch.calls += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._caller = None
        if error is not None:
            self.epoch.fail(error)


_INSIDE = (
    "a call over several processes cannot be made inside of a mapped function, which runs once for each slot. There "
    "use collectives, or a call on the slot's own device"
)
_TRANSFORMED = (
    "a call over several processes cannot be transformed by torch.func from outside, since what is transformed stays "
    "in its process. Transform inside of the mapped function, or take gradients by fdp.value_and_grad on the mesh"
)


def leave() -> None:
    """Close all connections, and destroy the group of all processes."""
    world = _WORLDS.get(dist.group.WORLD)
    if world is not None and not is_forked(world.process) and world.epoch.ended is None:
        world.epoch.close()
    dist.destroy_process_group()


def leave_at_exit(group: "weakref.ref[Any]", process: int) -> None:
    """Leave the group that `init` made, if nobody has.

    A thread of gloo may let go of an operation while Python ends, which aborts the process.
    """
    if group() is not None and group() is dist.group.WORLD and not is_forked(process):
        leave()
