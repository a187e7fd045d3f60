"""Whether processes of this machine can meet: two of them add numbers by torch.distributed, over gloo on loopback."""

import sys
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from fdp._command._results import Result

SECONDS = 60.0
RANKS = 2
ADVICE = (
    "fdp.distributed will not work: look whether a firewall or a sandbox closes sockets on 127.0.0.1, and whether "
    "GLOO_SOCKET_IFNAME names an interface that exists"
)


def sum_of_ranks() -> int:
    """What a process finds."""
    dist.init_process_group("gloo")
    found = torch.tensor(dist.get_rank())
    dist.all_reduce(found)
    dist.destroy_process_group()  # or torch now and then aborts as the process ends
    return int(found)


def check_distributed(
    program: Callable[[], int] = sum_of_ranks,
    seconds: float = SECONDS,
    start_method: Literal["fork", "spawn"] = "spawn",
) -> Result:
    """Which back ends torch.distributed has, and whether two processes that run a program meet over gloo."""
    if not dist.is_available():
        advice = "this torch has no distributed package: one process with many slots works, fdp.distributed does not"
        return Result("distributed", "warning", "torch.distributed is not available", advice, details={"backends": []})
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    details = {"backends": backends, "loopback": None}
    having = f"torch.distributed with {', '.join(backends) or 'no backend'}"
    if "gloo" not in backends or sys.platform == "win32":
        advice = "two processes were not tried: that needs gloo, and another system than Windows"
        return Result("distributed", "warning", having, advice, details=details)
    problem = _problem(program, seconds, start_method)
    details["loopback"] = problem or "ok"
    if problem is None:
        return Result("distributed", "ok", f"{having}; {RANKS} processes meet over gloo", details=details)
    summary = f"{RANKS} processes do not meet over gloo: {problem}"
    return Result("distributed", "failed", summary, ADVICE, details=details)


def _problem(program: Callable[[], int], seconds: float, start_method: Literal["fork", "spawn"]) -> str | None:
    from fdp.distributed._launch import launch  # it needs what may not be available

    try:
        found = launch(program, RANKS, timeout=seconds, start_method=start_method)
    except RuntimeError as error:
        return str(error).splitlines()[0].removeprefix("launch: ")
    expected = [sum(range(RANKS))] * RANKS
    return None if found == expected else f"the sums of ranks are {found}, not {expected}"
