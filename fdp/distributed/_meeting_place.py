"""The store in which processes find each other, anew at each start."""

import datetime
import os
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fdp.distributed._work_in_thread import in_thread, tell

_PAUSE = 0.005  # seconds between looks into the store
_SLICE = 0.5  # seconds between looks at the limit


def meeting_place(limit: datetime.timedelta) -> tuple[Any, int, int]:
    """The store that the environment names, this process's rank, and how many there are. Ctrl-C is heard meanwhile.

    Raises:
        RuntimeError: The processes do not come within the limit.
    """
    own, began = os.environ["RANK"], time.monotonic()
    others = "process 0" if int(own) else f"all {os.environ['WORLD_SIZE']} processes"

    def goes_on(who: str) -> None:
        most = limit.total_seconds()
        if time.monotonic() > began + most + 1:  # what torch says of the same limit comes first
            raise RuntimeError(f"no sign of {who}")
        start = f"fdp: init: process {own} has waited"
        tell(began, lambda seconds: f"{start} {seconds:.0f} s of at most {most:g} s for {who}")

    # By itself it would wait for ever where something listens on the port and says nothing.
    found = in_thread(lambda: next(iter(rendezvous("env://", timeout=limit))))
    while not futures.wait([found], _SLICE).done:
        goes_on(f"{others} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    store, rank, size = found.result()
    return PrefixStore(_name_of_start(store, rank, size, goes_on), store), rank, size


def _name_of_start(store: Any, rank: int, size: int, goes_on: Callable[[str], None]) -> str:
    """A name that the processes of this start agree on, and those of no start before.

    torchrun keeps its store through restarts, with the addresses of processes that are no more:
    `_bootstrap_store_info` in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py is made once.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"fdp/here/{rank}", own)
        while not store.check([f"fdp/name/{own}"]):  # `get` would wait, and not hear Ctrl-C
            goes_on("process 0")
            time.sleep(_PAUSE)
        name = store.get(f"fdp/name/{own}").decode()
        store.set(f"fdp/seen/{name}/{rank}", "")
        return name
    late, told = set(range(1, size)), set[str]()
    while late:
        for other in sorted(late):
            if store.check([f"fdp/here/{other}"]):
                asking = store.get(f"fdp/here/{other}").decode()  # of an earlier start, perhaps: then nobody reads it
                if asking not in told:
                    store.set(f"fdp/name/{asking}", own)
                    told.add(asking)
            if store.check([f"fdp/seen/{own}/{other}"]):
                late.discard(other)
        if late:
            goes_on(f"process {', '.join(map(str, sorted(late)))}")
            time.sleep(_PAUSE)
    return own
