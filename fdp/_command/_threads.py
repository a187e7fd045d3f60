"""Whether shards that run side by side compute what they compute one after the other."""

import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import nn

from fdp._apply import dp_apply
from fdp._command._results import Result
from fdp._executors import thread_safe
from fdp._functional import functional
from fdp._tree import flatten
from fdp._workers import cores

THREADS, CALLS = 4, 25
BROKEN = "do not use executor='threads' here, and please report it with the output of --json"


def check_threads(devices: Sequence[torch.device]) -> Result:
    """Call a module's function from several threads, and fdp's executors; look at the GIL and at torch's threads."""
    problems = [*_concurrent_calls(), *_executors(devices)]
    gil, built_without = _has_gil(), bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    intra, count = torch.get_num_threads(), cores()
    details = {"gil": gil, "free_threaded_build": built_without, "torch_threads": intra, "cores": count}
    details |= {"problems": problems}
    with_gil = f"{'with' if gil else 'without'} the GIL"
    if problems:
        return Result("threads", "failed", problems[0], BROKEN, problems[1:], details)
    summary = f"{THREADS} threads compute as one does; {with_gil}, torch uses {intra} threads on {count} cores"
    status, advice = "ok", None
    if not gil:
        status, advice = "warning", "fdp was not tested without the GIL: PYTHON_GIL=1 switches it on"
    elif intra > count:
        status, advice = "warning", f"more threads than cores slow torch down: set OMP_NUM_THREADS={count}"
    return Result("threads", status, summary, advice, details=details)


def _concurrent_calls() -> list[str]:
    """What goes wrong if threads call one function of a module, each with parameters of its own."""
    apply, states, x = _function()
    wanted = [apply(state, x) for state in states]
    start = Barrier(THREADS)

    def repeat(i: int) -> int:
        start.wait()
        return sum(not _close(apply(states[i], x), wanted[i]) for _ in range(CALLS))

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = sum(pool.map(repeat, range(THREADS)))
    return [f"{wrong} of {THREADS * CALLS} calls of functional(module) from threads were wrong"] if wrong else []


def _executors(devices: Sequence[torch.device]) -> list[str]:
    """What goes wrong if shards run in threads."""
    apply, states, x = _function(torch.float32)  # not every accelerator has float64
    fn = thread_safe(lambda state, x: apply(state, x)[0])
    slots = tuple(devices) if len(devices) > 1 else tuple(devices) * 2
    rows = torch.cat([x] * len(slots))
    one, *others = (
        dp_apply(fn, states[0], rows, slots, executor=executor, output_device="cpu")
        for executor in ("sequential", "threads", "threads", "threads")
    )
    wrong = sum(not torch.allclose(one, other, rtol=1e-3, atol=1e-4) for other in others)
    return [f"dp_apply with executor='threads' was wrong in {wrong} of {len(others)} calls"] if wrong else []


def _function(dtype: torch.dtype = torch.float64) -> tuple[Any, list[Any], torch.Tensor]:
    """A function of a module with buffers, a state for each thread that is unlike the others, and a batch."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    apply, (params, buffers) = functional(module)
    random = [
        {name: torch.randn(p.shape, generator=generator, dtype=dtype) for name, p in params.items()}
        for _ in range(THREADS)
    ]
    return apply, [(each, buffers) for each in random], torch.randn(32, 8, generator=generator, dtype=dtype)


def _close(one: Any, other: Any) -> bool:
    pairs = zip(flatten(one, "one").leaves, flatten(other, "other").leaves, strict=True)
    return all(torch.allclose(a, b) for a, b in pairs)


def _has_gil() -> bool:
    ask = getattr(sys, "_is_gil_enabled", None)  # since Python 3.13
    return True if ask is None else ask()
