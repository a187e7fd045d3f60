"""What torch keeps for each thread is the caller's in every shard, or the shards stay in the caller's thread."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _autograd as autograd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fdp
from tests.common.settings import default_device
from tests.common.threads import many_cores

_C: Any = torch._C  # a part of it has no types
W = torch.tensor(2.0, dtype=torch.float64)


def flags() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


CARRIED: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode, not": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast, not": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "backwards in one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "hooks refused": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
}


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


STAYS: dict[str, Callable[[], Any]] = {
    "function mode": Counting,
    "dispatch mode": Dispatching,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "profiler": torch.profiler.profile,
}


def in_threads(surroundings: Callable[[], Any], look: Callable[[], Any], slots: int) -> tuple[Any, list[Any], int]:
    """What the caller sees, what the shards see, and in how many threads they ran."""
    seen, threads = [], set()

    def fn(w: torch.Tensor, x: torch.Tensor) -> None:
        seen.append(look())
        threads.add(threading.get_ident())
        time.sleep(0.01)

    with many_cores():
        x = torch.arange(4.0)
        with surroundings():
            want = look()
            fdp.dp_apply(fn, W, x, fdp.virtual_devices(slots), executor="threads")
            assert look() == want
    return want, seen, len(threads)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", CARRIED)
def test_flags_are_carried_into_threads(name: str, slots: int):
    before, _, _ = in_threads(contextlib.nullcontext, flags, slots)
    want, seen, threads = in_threads(CARRIED[name], flags, slots)
    assert seen == [want] * slots
    assert threads > 1 or slots == 1
    assert in_threads(contextlib.nullcontext, flags, slots)[:2] == (before, [before] * slots)  # nothing is left


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("around", [True, False])
def test_a_backward_in_a_slot_stays_in_its_thread(around: bool, executor: Any):
    """Those of autograd's own know no slots. Outside all is as before."""
    seen = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._is_multithreading_enabled())
        return w * fdp.psum(x)

    with torch.autograd.set_multithreading_enabled(around):
        fdp.dp_apply(fn, W, torch.arange(3.0), fdp.virtual_devices(3), executor=executor)
        assert torch._C._is_multithreading_enabled() == around
    assert seen == [False] * 3


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_be_carried_keeps_the_shards_in_the_callers_thread(name: str):
    want, seen, threads = in_threads(STAYS[name], flags, 4)
    assert seen == [want] * 4
    assert threads == 1


def test_what_a_shard_sets_ends_with_it():
    seen = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> None:
        seen.append(flags())
        torch.set_grad_enabled(False)
        if threading.current_thread() is not threading.main_thread():
            torch.set_autocast_enabled("cpu", True)  # in the caller's thread it would stay, as in any function

    want = flags()
    for _ in range(5):
        fdp.dp_apply(fn, W, torch.arange(8.0), fdp.virtual_devices(8), executor="threads")
    assert seen == [want] * 40


def test_a_shards_own_autocast_does_not_empty_the_callers_cache():
    linear = nn.Linear(3, 3)
    casts = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x)

    with torch.autocast("cpu", torch.bfloat16):
        first = linear(torch.ones(1, 3))
        fdp.dp_apply(fn, W, torch.ones(4, 3), fdp.virtual_devices(4), executor="threads")
        second = linear(torch.ones(1, 3))
        for out in (first, second):  # the node that casts the weight is the same one if the cast was kept
            casts.append({node for node, _ in out.grad_fn.next_functions if node is not None})
    assert casts[0] & casts[1]


def test_denormals_are_flushed_in_every_thread():
    smallest = torch.full((8,), 1e-310, dtype=torch.float64)

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x * 0.5

    try:
        for flush in (False, True, False):
            torch.set_flush_denormal(flush)
            out = fdp.dp_apply(fn, W, smallest, fdp.virtual_devices(4), executor="threads")
            assert bool((out == 0).all()) is flush
            assert bool((out != 0).all()) is not flush
    finally:
        torch.set_flush_denormal(False)
