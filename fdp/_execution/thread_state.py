"""What torch keeps for each thread: taken from the caller, and put in place in the threads that run its shards."""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fdp._trees import torch_private

_SMALLEST = sys.float_info.min
_FLAGS: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    (torch.is_grad_enabled, torch_private.set_grad_enabled),
    (torch_private.is_multithreading_enabled, torch_private.set_multithreading_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: _SMALLEST * 0.5 == 0, torch.set_flush_denormal),  # Python's floats are subject to it too
)
_GETTERS = [get for get, _ in _FLAGS]


def current_stream(device: torch.device) -> torch.Stream | None:
    """That of this thread; None on the CPU, and under modes such as FakeTensorMode, where devices need not exist."""
    if device.type in ("cpu", "meta") or torch_private.len_torch_dispatch_stack():
        return None
    return torch.accelerator.current_stream(device)


class Carried(TorchFunctionMode):
    """A mode of fdp's own, which several threads may have at once."""


def why_not_beside() -> str | None:
    """Why shards beside each other could not see what the caller has set; None if they can.

    Modes and hooks of the user's may not expect calls from several threads at once. Forward mode and functionalization
    keep state outside of the stack of transforms. A profiler would see one thread.
    """
    modes = torch_private.get_current_function_mode_stack()
    if any(not (isinstance(mode, Carried) or type(mode).__module__.startswith("torch.")) for mode in modes):
        return "other threads would not see a mode that is active here"
    if torch_private.len_torch_dispatch_stack() or torch_private.saved_tensors_hooks(True) is not None:
        return "other threads would not see a mode or hook that is active here"
    if torch_private.profiler_enabled() or torch_private.is_tracing():
        return "other threads would not see what records here"
    if torch_private.is_forward_mode() or not {"Vmap", "Grad"}.issuperset(torch_private.kinds_here()):
        return "other threads would not see a transform that is active here"
    return None


def why_not_together() -> str | None:
    """What of the caller's settings no other thread can see, also where slots take turns; None if there is nothing."""
    if torch_private.is_tracing():
        return "that torch.jit traces here"
    return "functionalization" if "Functionalize" in torch_private.kinds_here() else None


class ThreadState(NamedTuple):
    """The state of a thread, as far as what it calls can see it."""

    threads: int  # inside operations
    inference: bool
    flags: list[Any]
    autocasts: list[tuple[str, bool, torch.dtype]]  # of each type of device
    modes: list[Any]
    dispatch_modes: list[Any]
    hooks: Any
    hooks_refused: str | None
    streams: list[torch.Stream]
    device: int | None  # the index of the current one
    transforms: list[Any]

    @classmethod
    def of_caller(cls, devices: Iterable[torch.device]) -> "ThreadState":
        """The state here and now; `devices` are those on which a current stream matters."""
        accelerators = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
        autocasts = [("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))]
        for kind in dict.fromkeys([device.type for device in accelerators]) if accelerators else ():
            autocasts.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        dispatch_modes = torch_private.len_torch_dispatch_stack() and torch_private.get_current_dispatch_mode_stack()
        return cls(
            torch.get_num_threads(),
            torch.is_inference_mode_enabled(),
            list(map(operator.call, _GETTERS)),
            autocasts,
            torch_private.get_current_function_mode_stack(),
            dispatch_modes or [],
            torch_private.saved_tensors_hooks(True),
            torch_private.saved_tensors_hooks_get_disabled_error_message(),
            # Under FakeTensorMode there may be devices that do not exist.
            [torch.accelerator.current_stream(d) for d in accelerators] if accelerators and not dispatch_modes else [],
            torch.accelerator.current_device_index() if accelerators and not dispatch_modes else None,
            torch_private.transforms_here() if torch_private.is_transformed() else [],
        )

    def with_threads(self, count: int) -> "ThreadState":
        """With so many threads inside operations, at least one and no more than the caller has."""
        return self._replace(threads=max(1, min(self.threads, count)))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put it in place in this thread, in which nothing else may count on its own state."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for (_, put), value in zip(_FLAGS, self.flags, strict=True):
                put(value)
            for kind, enabled, dtype in self.autocasts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            if any(enabled for _, enabled, _ in self.autocasts):
                # The cache of casts is one for all threads: an inner autocast must not empty it when it ends.
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            if self.hooks_refused is not None:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(self.hooks_refused))
            for stream in self.streams:
                torch.accelerator.set_stream(stream)
            self.restore_device()
            for mode in self.modes:  # its own `__enter__` would write to what all threads share
                torch_private.push_on_torch_function_stack(mode)
                stack.callback(torch_private.pop_torch_function_stack)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            for mode in self.dispatch_modes:
                torch_private.push_on_torch_dispatch_stack(mode)
                stack.callback(torch_private.pop_torch_dispatch_stack, getattr(mode, "_mode_key", None))
            for transform in reversed(self.transforms):
                torch_private.push_layer(transform)
                stack.callback(torch_private.pop_layer)
            yield

    def restore_device(self) -> None:
        """Make the device of the caller the current one: who sets a stream makes its device the current one."""
        if self.device is not None:
            torch.accelerator.set_device_index(self.device)
