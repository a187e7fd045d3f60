"""A process group over gloo with the manners of NCCL, for tensors of the virtual accelerator.

- It refuses tensors of the host, unless it is told to take them, as a group of "cpu:gloo,cuda:nccl" does.
- It makes a communicator for each device when that is first used, with all processes, and no two on one device.
- What it was given to write to has its values when the work was waited for, and not before.
- Who waits for longer than the limit aborts the group: nothing goes over it any more.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fdp.testing._virtual_tensor import VirtualTensor
from tests.accelerator.double import streams

core: Any = dist
_Work: Any = core.distributed_c10d.Work
LIMIT = datetime.timedelta(seconds=30)


class LateWork(_Work):
    """Something under way; `finish` copies what has come to where it was wanted."""

    def __init__(self, group: "LateGroup", work: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._group, self._work, self._finish = group, work, finish
        self._is_over = False

    def is_completed(self) -> bool:
        return self._is_over

    def is_success(self) -> bool:
        return self._is_over

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._is_over:
            return True
        self._group.check()
        try:
            self._work.wait(self._group.limit if timeout is None or not timeout else timeout)
        except RuntimeError as error:
            self._group.aborted = f"a wait of it has failed: {str(error).splitlines()[0]}"
            raise
        self._finish()
        self._is_over = True
        return True


class LateGroup(dist.ProcessGroup):
    """See above. `takes_host`: tensors of the host go over gloo, at once."""

    def __init__(
        self, store: Any, rank: int, size: int, limit: datetime.timedelta = LIMIT, *, takes_host: bool = False
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._store, self.limit, self._takes_host = store, limit, takes_host
        self._gloo: Any = core.ProcessGroupGloo(core.PrefixStore("gloo", store), rank, size, limit)
        self._communicators: list[torch.device] = []
        self.aborted: str | None = None

    def getBackendName(self) -> str:
        return "late"

    def get_group_store(self) -> Any:
        return self._store

    def check(self) -> None:
        """Raise if it was aborted."""
        if self.aborted is not None:
            raise RuntimeError(f"the communicator was aborted: {self.aborted}")

    def abort(self) -> None:
        self.aborted = "somebody called abort"

    # ---- what processes do together

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._begin(tensors, tensors, lambda xs, _: self._gloo.allreduce(xs, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._begin(tensors, tensors, lambda xs, _: self._gloo.broadcast(xs, opts or dist.BroadcastOptions()))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def start(own: Sequence[Tensor], found: Sequence[Tensor]) -> Any:
            return self._gloo.allgather([list(found)], own, *([opts] if opts else []))

        return self._begin(inputs, outputs[0], start)

    def _begin(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], start: Callable[..., Any]) -> Any:
        self.check()
        devices = {x.device for x in (*inputs, *outputs)}
        if len(devices) > 1:
            raise RuntimeError(f"tensors of one device are expected, got {sorted(map(str, devices))}")
        (device,) = devices
        if device.type == "cpu":
            if not self._takes_host:
                raise RuntimeError("No backend type associated with device type cpu")
            return start(list(inputs), list(outputs))
        self._meet_on(device)
        streams.reads("a collective", _virtual(inputs))
        is_same = [id(x) for x in inputs] == [id(x) for x in outputs]
        own = [x.host.clone() for x in _virtual(inputs)]
        found = own if is_same else [x.host.clone() for x in _virtual(outputs)]

        def finish() -> None:
            streams.writes("a collective", _virtual(outputs))
            with torch.no_grad():
                for out, new in zip(_virtual(outputs), found, strict=True):
                    out.host.copy_(new)

        return LateWork(self, start(own, found), finish)

    def _meet_on(self, device: torch.device) -> None:
        """A communicator of all processes, each with its own device."""
        if device in self._communicators:
            return
        number = len(self._communicators)
        self._store.set(f"device {number} of {self.rank()}", str(device))
        names = [f"device {number} of {rank}" for rank in range(self.size())]
        self._store.wait(names, self.limit)
        places = [self._store.get(name).decode() for name in names]
        for rank, place in enumerate(places):
            if place in places[:rank]:
                raise RuntimeError(
                    f"Duplicate GPU detected : rank {rank} and rank {places.index(place)} both on {place}"
                )
        self._communicators.append(device)


def _virtual(tensors: Sequence[Tensor]) -> list[VirtualTensor]:
    return [x for x in tensors if isinstance(x, VirtualTensor)]


@contextlib.contextmanager
def process_group(*, takes_host: bool, rank: int = 0, size: int = 1, store: Any = None) -> Iterator[Any]:
    """The default group of torch.distributed meanwhile."""
    if "late" not in dist.Backend.backend_list:
        dist.Backend.register_backend("late", lambda *a: LateGroup(*a), devices=["virtual"])
        dist.Backend.register_backend("late_and_host", lambda *a: LateGroup(*a, takes_host=True), devices=["virtual"])
    name = "late_and_host" if takes_host else "late"
    dist.init_process_group(name, store=store or core.HashStore(), rank=rank, world_size=size, timeout=LIMIT)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
