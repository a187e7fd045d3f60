"""What torch keeps for each thread: taken from the caller, and put in place in the threads that run its shards."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _autograd as autograd
from torch._C._autograd import _profiler_enabled
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack, temporarily_restore_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_SMALLEST = sys.float_info.min
_C: Any = torch._C  # a part of it has no types
_FLAGS: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    (_C._get_torch_function_state, _C._set_torch_function_state),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: _SMALLEST * 0.5 == 0, torch.set_flush_denormal),  # Python's floats are subject to it too
)
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_CARRIED = (functorch.TransformType.Vmap, functorch.TransformType.Grad)


class Carried(TorchFunctionMode):
    """A mode of fdp's own, which several threads may have at once."""


def is_carried() -> bool:
    """Whether all that the caller has set can be put in place in another thread.

    Modes and hooks of the user's own may not expect calls from several threads at once. Forward mode and
    functionalization keep state outside of the stack of transforms. A profiler would see one thread.
    """
    return (
        all(isinstance(mode, DeviceContext | Carried) for mode in _function_modes())
        and torch._C._len_torch_dispatch_stack() == 0
        and autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._get_tracing_state() is None
        and not _profiler_enabled()
        and all(layer.key() in _CARRIED for layer in functorch.get_interpreter_stack() or ())
    )


def why_not_together() -> str | None:
    """What of the caller's settings the slots that run together could not see; None if they see everything.

    They take turns where that matters, so that forward mode and profilers are no obstacle.
    """
    if any(not isinstance(mode, DeviceContext | Carried) for mode in _function_modes()):
        return "a mode for torch functions that is active here"
    if torch._C._len_torch_dispatch_stack() > (_fake_mode() is not None):
        return "a dispatch mode that is active here"
    if autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors that are active here, such as those of activation checkpointing around the call"
    if torch._C._get_tracing_state() is not None:
        return "that torch.jit traces here"
    if any(layer.key() is functorch.TransformType.Functionalize for layer in functorch.get_interpreter_stack() or ()):
        return "functionalization"
    return None


class Autocast(NamedTuple):
    """The settings of one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class ThreadState(NamedTuple):
    """The state of a thread, as far as what it calls can see it."""

    inference: bool
    flags: list[Any]
    autocasts: list[Autocast]
    modes: list[Any]
    fake: Any
    hooks_refused: str | None
    streams: list[torch.Stream]
    transforms: list[Any]

    @classmethod
    def of_caller(cls, devices: Sequence[torch.device]) -> "ThreadState":
        """The state here and now; `devices` are those on which a current stream matters."""
        transforms: list[Any] = []
        if torch._C._are_functorch_transforms_active():
            with temporarily_clear_interpreter_stack() as transforms:
                pass
        accelerators = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
        types = dict.fromkeys(["cpu", *(device.type for device in accelerators)])
        fake = _fake_mode()
        return cls(
            torch.is_inference_mode_enabled(),
            [get() for get, _ in _FLAGS],
            [Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types],
            _function_modes(),
            fake,
            autograd._saved_tensors_hooks_get_disabled_error_message(),
            [] if fake is not None else [torch.accelerator.current_stream(device) for device in accelerators],
            transforms,
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put it in place in this thread, in which nothing else may count on its own state."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for (_, put), value in zip(_FLAGS, self.flags, strict=True):
                put(value)
            for kind, enabled, dtype in self.autocasts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            if any(autocast.enabled for autocast in self.autocasts):
                # The cache of casts is one for all threads: an inner autocast must not empty it when it ends.
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            if self.hooks_refused is None:
                autograd._saved_tensors_hooks_enable()
            else:
                autograd._saved_tensors_hooks_disable(self.hooks_refused)
            for stream in self.streams:
                torch.accelerator.set_stream(stream)
            for mode in self.modes:  # its own `__enter__` would write to what all threads share
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            if self.fake is not None:
                torch._C._push_on_torch_dispatch_stack(self.fake)
                stack.callback(torch._C._pop_torch_dispatch_stack, _FAKE)
            if self.transforms:
                stack.enter_context(temporarily_restore_interpreter_stack(self.transforms))
            yield


def _fake_mode() -> Any:
    """The FakeTensorMode that is active: it computes shapes, and several threads may do so in turns."""
    return torch._C._get_dispatch_mode(_FAKE)


def _function_modes() -> list[Any]:
    return _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
