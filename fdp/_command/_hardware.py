"""Which devices there are, whether each of them computes, and how many threads torch uses on how many cores."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import torch

from fdp._command._results import Result
from fdp._command._versions import is_older
from fdp._execution.side_by_side import cores


def check_devices(devices: Sequence[torch.device]) -> Result:
    """Name, memory and cores of each device, and whether a product on it is right."""
    different = list(dict.fromkeys(devices))
    known = {str(device): properties(device) for device in different}
    wrong = {str(device): text for device in different if (text := _wrong(device)) is not None}
    lines = [f"{name}: {described(each)}" for name, each in known.items()]
    named = ", ".join(map(str, different)) if len(different) <= 4 else f"{len(different)} devices"
    summary = f"{len(devices)} slot{'s' * (len(devices) > 1)} on {named}"
    details = {"slots": [str(device) for device in devices], "devices": known}
    if not wrong:
        return Result("devices", "ok", summary, lines=lines, details=details)
    lines += [f"{name}: {text}" for name, text in wrong.items()]
    advice = f"do not use {', '.join(wrong)}; a torch built for another architecture is the usual cause"
    return Result("devices", "failed", summary, advice, lines, details | {"wrong": wrong})


def properties(device: torch.device) -> dict[str, Any]:
    """What torch knows of a device: under `name`, `memory` in bytes, `cores`, and for CUDA `capability`."""
    if device.type == "cpu":
        name = torch.backends.cpu.get_cpu_capability() + " CPU"
        return {"name": name, "memory": _memory(), "cores": cores()}
    # Other backends have some of what CUDA has, under names of their own.
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    found = None if ask is None else ask(device)
    count = getattr(found, "multi_processor_count", getattr(found, "max_compute_units", None))
    name, memory = getattr(found, "name", device.type), getattr(found, "total_memory", None)
    known = {"name": name, "memory": memory, "cores": count}
    return known | ({"capability": f"{found.major}.{found.minor}"} if device.type == "cuda" and found else {})


def described(known: dict[str, Any]) -> str:
    """The properties of a device in words."""
    parts = [known["name"]]
    if known["memory"]:
        parts.append(f"{known['memory'] / 2**30:.1f} GiB")
    if known["cores"]:
        parts.append(f"{known['cores']} {'multiprocessors' if 'capability' in known else 'cores'}")
    if "capability" in known:
        parts.append(f"compute capability {known['capability']}")
    return ", ".join(parts)


def check_threads() -> Result:
    """How many threads torch uses inside operations, on how many cores, and whether there is a GIL."""
    intra, own, every = torch.get_num_threads(), cores(), os.cpu_count()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # since Python 3.13
    status, advice = "ok", None
    if not gil and is_older(str(torch.__version__), _WITHOUT_GIL):
        advice = "without the GIL fdp needs torch 2.13 or newer: upgrade it, or switch the GIL on by PYTHON_GIL=1"
        status = "failed"
    elif gil and sysconfig.get_config_var("Py_GIL_DISABLED"):
        status, advice = "warning", "this Python runs without the GIL if no module that is imported switches it on"
        advice += ": PYTHON_GIL=0 keeps it off"
    elif intra > own:
        status, advice = "warning", f"more threads than cores slow torch down: set OMP_NUM_THREADS={own}"
    may_use = f"{own} cores" if own == every else f"the {own} of {every} cores that this process may use"
    summary = f"torch uses {intra} threads on {may_use}; Python runs {'with' if gil else 'without'} the GIL"
    details = {"torch_threads": intra, "cores": own, "cores_of_machine": every, "gil": gil}
    return Result("threads", status, summary, advice, details=details)


_WITHOUT_GIL = (2, 13)  # before, torch.compile's versions of dicts were not made for several threads at once


def _wrong(device: torch.device) -> str | None:
    """What is wrong with a product of small whole numbers, which every device computes exactly."""
    factor = torch.arange(64 * 64).reshape(64, 64) % 5
    try:
        found = (factor.to(device, torch.float32) @ factor.to(device, torch.float32)).cpu()
    except RuntimeError as error:
        return f"cannot compute: {str(error).splitlines()[0]}"
    return None if torch.equal(found, (factor @ factor).float()) else "a product of matrices is wrong"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
