"""From the environment of a launcher to a mesh."""

import atexit
import datetime
import os
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from fdp._execution.forks import is_forked
from fdp._placement.devices import as_devices, available_devices
from fdp._placement.partition import balanced
from fdp._trees.types import Devices
from fdp.distributed._exchange import objects
from fdp.distributed._meeting_place import meeting_place
from fdp.distributed._mesh import Mesh
from fdp.distributed._peers import MeshPeers
from fdp.distributed._reports import Tag, first_sentence
from fdp.distributed._world import World, leave_at_exit

_BELONGS: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Groups, and which process has joined each."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(backend: str | None = None, devices: Devices = None, timeout: float | datetime.timedelta = 600.0) -> Mesh:
    """Join the processes that torchrun started, as a mesh of all their slots; alone, a mesh of one process.

    >>> import fdp, torch
    >>> with fdp.distributed.init(devices=fdp.virtual_devices(2)) as mesh:
    ...     fdp.dp_apply(lambda w, x: w * x, torch.tensor(2.0), mesh.local(torch.arange(3.0)), mesh)
    tensor([0., 2., 4.])

    Args:
        backend: Of torch.distributed: by default `"gloo"` for the CPU, NCCL for GPUs. Ignored where the program has
            called `torch.distributed.init_process_group` before: then its group is used.
        devices: One device per slot of this process. By default its share of the accelerators of the machine, divided
            by torchrun's `LOCAL_WORLD_SIZE`, else one slot on the CPU.
        timeout: Seconds that a process waits for the others before it raises an error.

    Returns:
        The mesh. `with init() as mesh:` closes it at the end of the block, the end of the program at the latest.

    Raises:
        ValueError: An incomplete environment, fewer accelerators than processes, an unknown backend.
        TypeError: A backend that is no name.
        RuntimeError: The processes do not find each other in time, or the port is in use.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"init: backend must be a name such as 'gloo', got {backend!r}. Devices are init(devices=...)")
    limit = _limit(timeout)
    alone = "RANK" not in os.environ and not dist.is_initialized()
    slots = as_devices(_own_share() if devices is None else devices, "init")
    if alone:
        return Mesh(slots, None, owns_group=False)
    owns_group = not dist.is_initialized()
    if owns_group:
        _join(backend, slots[0], limit)
    elif is_forked(_BELONGS.get(dist.group.WORLD, os.getpid())):
        raise RuntimeError("init: this process was forked, and is none of those of its parent's group. Start it anew")
    _BELONGS.setdefault(dist.group.WORLD, os.getpid())
    if dist.get_world_size() == 1:
        return Mesh(slots, None, owns_group=owns_group)
    world = World.here(limit)
    with world.begins("init"):
        counts: list[int] = objects(world.epoch, len(slots), Tag("init"))
    return Mesh(slots, MeshPeers(world, counts), owns_group=owns_group)


def _limit(timeout: float | datetime.timedelta) -> datetime.timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"init: timeout must be a positive number of seconds or a timedelta, got {timeout!r}")
    return datetime.timedelta(seconds=seconds)


def _own_share() -> tuple[torch.device, ...]:
    """The accelerators of this process: an even share of those of the machine."""
    existing = available_devices()
    if existing[0].type == "cpu" or "RANK" not in os.environ:
        return existing
    if len(existing) == 1:
        return existing  # a launcher may show each process one of its own
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"init: RANK is set, but not LOCAL_RANK, so it is not known which of the {len(existing)} accelerators are "
            "for this process: start it by torchrun, set LOCAL_RANK, or give devices="
        )
    index = int(os.environ["LOCAL_RANK"])
    if "LOCAL_WORLD_SIZE" not in os.environ:
        if index >= len(existing):
            raise ValueError(f"init: LOCAL_RANK is {index}, but there are {len(existing)} accelerators; give devices=")
        return existing[index : index + 1]
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    shares = balanced(len(existing), count)
    if shares[index] == 0:
        raise ValueError(
            f"init: {count} processes share the {len(existing)} accelerators of this machine; start at most one for "
            "each (torchrun --nproc-per-node), or give devices= to each"
        )
    return existing[sum(shares[:index]) :][: shares[index]]


def _join(backend: str | None, device: torch.device, limit: datetime.timedelta) -> None:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ValueError(
            f"init: RANK is set, but not {', '.join(missing)}. Start the program by torchrun, or set all of "
            f"{', '.join(_NEEDED)}"
        )
    if backend is None:
        backend = "gloo" if device.type in ("cpu", "meta") else f"cpu:gloo,{device.type}:{_native(device)}"
    known = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
    asked = [part.split(":")[-1] for part in backend.split(",")]
    if unknown := [name for name in asked if name.lower() not in known]:
        raise ValueError(f"init: there is no backend {', '.join(map(repr, unknown))} here; there is {', '.join(known)}")
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device.index)
    start = time.monotonic()
    try:
        store, number, count = meeting_place(limit)
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=limit)
        atexit.register(leave_at_exit, weakref.ref(dist.group.WORLD), os.getpid())
    except (RuntimeError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise RuntimeError(
            f"init: process {rank} of {size} did not meet the others at {where} in {time.monotonic() - start:.1f} s "
            f"(the limit is timeout={limit.total_seconds():g}). Is the port free, and are all processes running? "
            f"torch.distributed says: {first_sentence(error)}"
        ) from error


def _native(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device)
