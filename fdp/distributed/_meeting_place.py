"""The store in which processes find each other, anew at each start."""

import atexit
import datetime
import os
import threading
import time
import uuid
from typing import Any, final

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fdp.distributed._notices import NOTICES, Notices

_SLICE = 0.5  # seconds between looks at the limit
_PAUSE = 0.005  # between looks into the store
_LAST = 5.0  # seconds that the end of the program waits for torch, which may try once more after its limit


def meeting_place(limit: datetime.timedelta, notices: Notices = NOTICES) -> tuple[Any, int, int]:
    """The store that the environment names, this process's rank, and how many there are. Ctrl-C is heard meanwhile.

    Raises:
        RuntimeError: The processes do not come within the limit.
    """
    wait = _Wait(limit, notices)
    store, rank, size = _reached(wait, limit)
    return PrefixStore(_name_of_start(store, rank, size, wait), store), rank, size


@final
class _Wait:
    """For other processes, up to a limit."""

    def __init__(self, limit: datetime.timedelta, notices: Notices) -> None:
        self._limit, self._say = limit.total_seconds(), notices.begin()
        self._end = time.monotonic() + self._limit + 1  # what torch says of the same limit comes first

    def goes_on(self, who: str) -> None:
        """Raises where it is over, and says after a while who is waited for."""
        if time.monotonic() > self._end:
            raise RuntimeError(f"no sign of {who}")
        own = os.environ["RANK"]
        self._say(lambda s: f"fdp: init: process {own} has waited {s:.0f} s of at most {self._limit:g} s for {who}")


def _reached(wait: _Wait, limit: datetime.timedelta) -> tuple[Any, int, int]:
    """The rendezvous of torch, which would wait for ever where something listens on the port and says nothing."""
    found: list[Any] = []

    def meet() -> None:
        try:
            found.append(next(iter(rendezvous("env://", timeout=limit))))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=meet, name="fdp-rendezvous", daemon=True)
    thread.start()
    others = "process 0" if int(os.environ["RANK"]) else f"all {os.environ['WORLD_SIZE']} processes"
    who = f"{others} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        while thread.is_alive():
            thread.join(_SLICE)
            if thread.is_alive():
                wait.goes_on(who)
    finally:
        if thread.is_alive():  # one that comes back from C++ while Python ends would abort the process
            atexit.register(thread.join, _LAST)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _name_of_start(store: Any, rank: int, size: int, wait: _Wait) -> str:
    """A name that the processes of this start agree on, and those of no start before.

    torchrun keeps its store through restarts, with the addresses of processes that are no more:
    `_bootstrap_store_info` in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py is made once.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"fdp/here/{rank}", own)
        while not store.check([f"fdp/name/{own}"]):  # `get` would wait, and not hear Ctrl-C
            wait.goes_on("process 0")
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
            wait.goes_on(f"process {', '.join(map(str, sorted(late)))}")
            time.sleep(_PAUSE)
    return own
