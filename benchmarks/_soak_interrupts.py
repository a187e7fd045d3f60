"""Interrupts in the soak test: calls of the main thread, each with a signal at a random moment of it.

The signal raises KeyboardInterrupt, as Ctrl-C does. It has to arrive as it is. As soon as the caller has it, there is
no thread that still works for it, and no lock, number of threads inside operations, mode or state of a generator that a
call has left. Calls that end before their signal comes have to give the numbers of one device.
"""

import collections
import faulthandler
import gc
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _soak_calls import is_close
from torch import nn

import fdp
from fdp._execution import thread_pool
from fdp._execution.process_lock import is_held_here

functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
SLOTS, ROWS = 3, 7
SHORTEST, LONGEST = 0.01e-3, 4e-3  # seconds until the signal
MOMENT = 1.0  # seconds until a thread that has passed the baton on is idle
Call = Callable[[], Any]


class Way(NamedTuple):
    """A way through the API, and what it gives on one device."""

    name: str
    call: Call
    right: Any


class Tally:
    """What has happened so far; `swallowed` are interrupts that came in a `__del__`, where Python ignores them."""

    def __init__(self) -> None:
        self.calls = self.interrupts = self.right = self.swallowed = self.tensors = 0
        self.seconds = 0.0
        self.problems: collections.Counter[str] = collections.Counter()


def soak(interrupts: int, limit: float, seed: int = 0) -> Tally:
    """Interrupt calls so often. A call that takes longer than the limit shows all threads and ends the process."""
    draw, tally, start = random.Random(seed), Tally(), time.perf_counter()
    is_armed = False

    def interrupt(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def note(way: Way, *problems: str) -> None:
        tally.problems.update(f"{way.name}: {problem}" for problem in problems)

    before = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    sys.unraisablehook = lambda _: setattr(tally, "swallowed", tally.swallowed + 1)
    timed = [(way, duration(way.call)) for way in ways()]
    tensors, expected = tensors_alive(), state()  # threads are there by now
    try:
        while tally.interrupts < interrupts:
            faulthandler.dump_traceback_later(limit, exit=True)
            way, usual = draw.choice(timed)
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(SHORTEST, min(LONGEST, 2 * usual)))
                found = way.call()
                is_armed = False
                tally.right += 1
                note(way, *["wrong numbers"] * (not is_close(found, way.right)))
                del found
            except KeyboardInterrupt as caught:  # it holds all that it came through
                tally.interrupts += 1
                note(way, *(f"left while it is handled: {what}" for what in differences(expected, state())))
                note(way, *["not as it was raised"] * (caught.__context__ is not None))
            except Exception as error:
                note(way, f"{type(error).__name__}: {error}")
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            tally.calls += 1
            note(way, *(f"left: {what}" for what in differences(expected, state())), *["left: threads"] * bool(lost()))
        for way, _ in timed:
            note(way, *["wrong numbers at the end"] * (not is_close(way.call(), way.right)))
    finally:
        sys.unraisablehook = before[1]
        signal.signal(signal.SIGALRM, before[0])
        faulthandler.cancel_dump_traceback_later()
    tally.tensors, tally.seconds = tensors_alive() - tensors, time.perf_counter() - start
    return tally


def verdict(tally: Tally) -> int:
    """Print what was found; 1 if something is wrong."""
    print(
        f"{tally.interrupts} interrupts in {tally.calls} calls of the main thread in {tally.seconds:.0f} s: "
        f"{tally.right} calls ended before, {tally.swallowed} interrupts came where Python ignores them"
    )
    checks = {
        "hangs: 0": True,  # else the process has ended
        f"threads or states left, wrong numbers, other errors: {tally.problems.total()}": not tally.problems,
        f"tensors left: {tally.tensors}": tally.tensors <= 0,
    }
    for text, passed in checks.items():
        print(f"{'ok    ' if passed else 'MISSED'}  {text}")
    for problem, count in tally.problems.most_common(10):
        print(f"  {count} x {problem}")
    return 0 if all(checks.values()) else 1


def duration(call: Call) -> float:
    """Seconds that a call usually takes."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def state() -> dict[str, Any]:
    """What a call has to leave as it is."""
    return {
        "threads inside operations": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "threads of autograd": torch._C._is_multithreading_enabled(),
        "state of the generator": hash(bytes(torch.default_generator.get_state().tolist())),
        "layers of torch.func": len(functorch.get_interpreter_stack() or ()),
        "the lock": is_held_here(),
        "threads at work": at_work(),
    }


def at_work() -> int:
    """How many threads of fdp do something, also after a moment."""
    return _after_a_moment(lambda: sum(frame.f_code is not _IDLE for frame in _frames()))


def lost() -> int:
    """How many wait for work that no call could find, also after a moment."""
    return _after_a_moment(lambda: len(_frames()) - sum(map(len, thread_pool.IDLE.values())))


_IDLE = thread_pool._serve.__code__


def _frames() -> list[Any]:
    """Where each thread of fdp is."""
    frames = sys._current_frames()
    mine = [thread.ident for thread in threading.enumerate() if thread.name == "fdp-slot"]
    return [frames[ident] for ident in mine if ident in frames]


def _after_a_moment(count: Callable[[], int]) -> int:
    end = time.perf_counter() + MOMENT
    while (found := count()) and time.perf_counter() < end:
        time.sleep(1e-4)
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [f"{name} {found[name]}, was {value}" for name, value in expected.items() if found[name] != value]


def ways() -> list[Way]:
    """All ways: with collectives and without, under both executors; gradients; slot 0 in the main thread; nested."""
    torch.manual_seed(0)
    w, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    devices = fdp.virtual_devices(SLOTS)

    def alone(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sin()

    def meeting(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w)
        return y * fdp.psum(y.sum()) + fdp.psum(len(x))

    def met(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w)
        return y * y.sum() + len(x)

    def nested(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inner = fdp.dp_apply(meeting, w, fdp.all_gather(x), devices[:2])
        return inner[: len(x)] * 0 + fdp.psum(inner.sum()) / SLOTS

    def noise(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), 2, dtype=torch.float64)

    def noise_that_meets(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return noise(w, x) * fdp.psum(1)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return alone(w, x).square().mean()

    def centered(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y - fdp.pmean(y.mean(), weight="rows")).square().mean()

    def center(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w - (x @ w).mean()).square().mean()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.add_(fdp.psum(x.sum(0))[:, None])
        return fdp.psum(w) / fdp.axis_size()

    def on_slots(fn: Callable[..., Any], executor: Any = "auto") -> Any:
        shards: Any = fdp.parallel_apply(fn, fdp.replicate(w, devices), fdp.scatter(x, devices), executor=executor)
        return fdp.gather(shards, 0)

    def backward(executor: Any) -> Any:
        leaf.grad = None
        fdp.dp_apply(meeting, leaf, x, devices, executor=executor).sum().backward()
        return leaf.grad

    def shim() -> Any:
        module.zero_grad()
        fdp.DataParallel(module, devices)(x).sum().backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    module(x).sum().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    whole, total = met(w, x), met(w, x).sum().expand(ROWS, 3)
    back = torch.autograd.grad(met(leaf, x).sum(), leaf)[0]
    values = [torch.func.grad_and_value(fn)(w, x)[::-1] for fn in (loss, center)]
    moved = (w + x.sum(0)[:, None]).repeat(SLOTS, 1)
    found = [
        Way("DataParallel", shim, gradients),
        Way("parallel_apply", lambda: on_slots(alone), alone(w, x)),
        Way("parallel_apply, nested", lambda: on_slots(nested), total),
    ]
    for how in ("sequential", "threads"):
        both: dict[str, Any] = {"devices": devices, "executor": how}
        drawn = [fdp.dp_apply(fn, w, x, seed=1, **both) for fn in (noise, noise_that_meets)]
        found += [
            Way(f"dp_apply, {how}", lambda both=both: fdp.dp_apply(alone, w, x, **both), alone(w, x)),
            Way(f"psum, {how}", lambda both=both: fdp.dp_apply(meeting, w, x, **both), whole),
            Way(f"nested psum, {how}", lambda both=both: fdp.dp_apply(nested, w, x, **both), total),
            Way(f"seed, {how}", lambda both=both: fdp.dp_apply(noise, w, x, seed=1, **both), drawn[0]),
            Way(f"seed, psum, {how}", lambda both=both: fdp.dp_apply(noise_that_meets, w, x, seed=1, **both), drawn[1]),
            Way(f"backward, psum, {how}", lambda how=how: backward(how), back),
            Way(f"value_and_grad, {how}", lambda both=both: fdp.value_and_grad(loss, **both)(w, x), values[0]),
            Way(
                f"value_and_grad, pmean, {how}", lambda both=both: fdp.value_and_grad(centered, **both)(w, x), values[1]
            ),
            Way(f"parallel_apply, psum, {how}", lambda how=how: on_slots(step, how), moved),
        ]
    return found
