"""Which devices there are, whether each of them computes, and how many threads torch uses on how many cores."""

import sys
import sysconfig
import warnings
from collections.abc import Sequence

import torch

from fdp._command._result import Result
from fdp._command._versions import numbers
from fdp._execution.side_by_side import cores
from fdp.nn._device_ids import warn_of_imbalance

_WITHOUT_GIL = (2, 13)  # before, torch.compile's versions of dicts were not made for several threads at once


def check_devices(devices: Sequence[torch.device]) -> Result:
    """What each device is, whether a product on it is right, and whether others would wait for it."""
    summary = ", ".join(map(str, devices))
    lines = [f"{device}: {described(device)}" for device in devices]
    wrong = {str(device): text for device in devices if (text := _wrong(device)) is not None}
    if wrong:
        lines += [f"{name}: {text}" for name, text in wrong.items()]
        advice = f"do not use {', '.join(wrong)}; a torch built for another architecture is the usual cause"
        return Result("devices", "failed", summary, advice, lines)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_imbalance(devices)
    if caught:
        return Result("devices", "warning", summary, str(caught[0].message), lines)
    return Result("devices", "ok", summary, lines=lines)


def described(device: torch.device) -> str:
    """The name of a device, and its memory or cores."""
    if device.type == "cpu":
        return f"{torch.backends.cpu.get_cpu_capability()} CPU, {cores()} cores"
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)  # not every backend has it
    if ask is None:
        return device.type
    found = ask(device)
    return f"{found.name}, {found.total_memory / 2**30:.1f} GiB"


def _wrong(device: torch.device) -> str | None:
    """What is wrong with a product of small whole numbers, which every device computes exactly."""
    factor = torch.arange(64 * 64).reshape(64, 64) % 5
    try:
        found = (factor.to(device, torch.float32) @ factor.to(device, torch.float32)).cpu()
    except RuntimeError as error:
        return f"cannot compute: {str(error).splitlines()[0]}"
    return None if torch.equal(found, (factor @ factor).float()) else "a product of matrices is wrong"


def check_threads() -> Result:
    """How many threads torch uses inside operations, on how many cores, and whether there is a GIL."""
    threads, own = torch.get_num_threads(), cores()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # since Python 3.13
    summary = f"torch uses {threads} threads on {own} cores; Python runs {'with' if gil else 'without'} the GIL"
    if not gil and numbers(torch.__version__) < _WITHOUT_GIL:
        advice = "without the GIL fdp needs torch 2.13 or newer: upgrade it, or switch the GIL on by PYTHON_GIL=1"
        return Result("threads", "failed", summary, advice)
    if gil and sysconfig.get_config_var("Py_GIL_DISABLED"):
        advice = "this Python runs without the GIL if no module that is imported switches it on: PYTHON_GIL=0"
        return Result("threads", "warning", summary, f"{advice} keeps it off")
    if threads > own:
        advice = f"more threads than cores slow torch down: set OMP_NUM_THREADS={own}"
        return Result("threads", "warning", summary, advice)
    return Result("threads", "ok", summary)
