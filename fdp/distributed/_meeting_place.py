"""The store in which processes find each other, anew at each start."""

import atexit
import datetime
import threading
import time
import uuid
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_LAST = 5.0  # seconds that the end of the program waits for torch, which may try once more after its limit


def meeting_place(limit: datetime.timedelta) -> tuple[Any, int, int]:
    """The store that the environment names, this process's rank, and how many there are.

    Raises:
        RuntimeError: The processes do not come within the limit.
    """
    end = time.monotonic() + limit.total_seconds()
    store, rank, size = _within(limit)
    return PrefixStore(_name_of_start(store, rank, size, end), store), rank, size


def _within(limit: datetime.timedelta) -> tuple[Any, int, int]:
    """The rendezvous of torch, which would wait for ever where something listens on the port and says nothing."""
    found: list[Any] = []

    def meet() -> None:
        try:
            found.append(next(iter(rendezvous("env://", timeout=limit))))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=meet, name="fdp-rendezvous", daemon=True)
    thread.start()
    try:
        thread.join(limit.total_seconds() + 1)
    finally:
        if thread.is_alive():  # one that comes back from C++ while Python ends would abort the process
            atexit.register(thread.join, _LAST)
    if not found:
        raise RuntimeError("nobody answers")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _name_of_start(store: Any, rank: int, size: int, end: float) -> str:
    """A name that the processes of this start agree on, and those of no start before.

    torchrun keeps its store through restarts, with the addresses of processes that are no more:
    `_bootstrap_store_info` in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py is made once.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"fdp/here/{rank}", own)
        name = store.get(f"fdp/name/{own}").decode()  # waits; the key is that of this process
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
        if late and time.monotonic() > end:
            raise RuntimeError(f"process {', '.join(map(str, sorted(late)))} did not come")
        time.sleep(0.005 if late else 0)
    return own
