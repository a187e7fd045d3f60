"""What a shard sees of its surroundings while it runs, and the state that it must not leak to the others."""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fdp._placement.slot import AXES, Axis, Slot
from fdp._placement.transfers import WATCHES
from fdp._trees import torch_private
from fdp._trees.at_once import at_once
from fdp._trees.profiling import NOTHING, stage


def run_in_slot(
    slot: Slot, call: Callable[[], Any], run: Any = None, context: contextvars.Context | None = None
) -> Any:
    """Run a shard in a copy of the caller's context, with its slot's device as the current one of its type.

    Its slots meet in a `run`.
    """
    if torch.compiler.is_compiling():
        return call()
    return (context or contextvars.copy_context()).run(_enter, slot, call, run)


def _enter(slot: Slot, call: Callable[[], Any], run: Any) -> Any:
    AXES.set((*AXES.get(), Axis(slot, run, threading.get_ident())))
    has_grad, watches = torch.is_grad_enabled(), WATCHES.get()
    # What a function leaves of grad mode ends with its shard: the next one sees what the caller set.
    restore = at_once(
        partial(torch_private.set_grad_enabled, has_grad),
        partial(torch_private.set_multithreading_enabled, torch_private.is_multithreading_enabled()),
    )
    try:
        # Backwards inside stay in this thread: those of autograd's own know no slots.
        torch_private.set_multithreading_enabled(False)
        device, named = _current_device(slot.device), stage("shard", slot.index)
        if device is named is NOTHING and not watches:
            return call()
        with device, named:
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
