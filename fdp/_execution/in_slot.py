"""What a shard sees of its surroundings while it runs, and the state that it must not leak to the others."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from fdp._placement.slot import AXES, Axis, Slot
from fdp._placement.transfer_log import WATCHES
from fdp._trees import torch_private
from fdp._trees.profiling import NOTHING, stage
from fdp._trees.uninterrupted import at_once


def enter(slot: Slot, call: Callable[[], Any], run: Any) -> Any:
    """Run a shard, with its slot's device as the current one of its type; its slots meet in a `run`.

    To be called in a copy of the caller's context.
    """
    AXES.set((*AXES.get(), Axis(slot, run, threading.get_ident())))
    watches = WATCHES.get()
    # What a function leaves of grad mode ends with its shard: the next one sees what the caller set.
    restore = at_once(
        partial(torch_private.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch_private.set_multithreading_enabled, torch_private.is_multithreading_enabled()),
    )
    try:
        # Backwards inside stay in this thread: those of autograd's own know no slots.
        torch_private.set_multithreading_enabled(False)
        if slot.device.type == "cpu" and not watches and not profiler._is_profiler_enabled:
            return call()
        with _current_device(slot.device), stage("shard", slot.here):
            for watch in watches:
                watch.on_shard(slot, "before")
            result = call()
            for watch in watches:
                watch.on_shard(slot, "after")
            return result
    finally:
        restore()


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type in ("cpu", "meta"):
        return NOTHING
    if not 0 <= (device.index or 0) < torch.accelerator.device_count():
        return NOTHING  # under FakeTensorMode there may be devices that do not exist
    return torch.accelerator.device_index(device.index)
