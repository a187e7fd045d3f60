"""Whether processes of this machine can meet: two of them add numbers over gloo.

They are children of a child, which leads a session of its own: whatever hangs there is ended after a time limit, with
all that it has started.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fdp._command._results import Result

SECONDS = 60.0
RANKS = 2
_ANSWER = "sums: "
ADVICE = (
    "fdp.distributed will not work: look whether a firewall or a sandbox closes sockets on 127.0.0.1, and whether "
    "GLOO_SOCKET_IFNAME names an interface that exists"
)


def check_distributed(command: Sequence[str] | None = None, seconds: float = SECONDS) -> Result:
    """What torch.distributed has, and whether two processes meet over gloo. `command` stands for the child's own."""
    if not dist.is_available():
        advice = "this torch has no distributed package: one process with many slots works, fdp.distributed does not"
        return Result("distributed", "warning", "torch.distributed is not available", advice, details={"backends": []})
    backends = _backends()
    details = {"backends": backends, "loopback": None}
    having = f"torch.distributed with {', '.join(backends) or 'no backend'}"
    if "gloo" not in backends or sys.platform == "win32":
        why = "this torch has no gloo" if "gloo" not in backends else "fdp.distributed.launch is not for Windows"
        return Result("distributed", "warning", having, f"{why}: two processes were not tried", details=details)
    problem = _problem(_child() if command is None else command, seconds)
    details["loopback"] = problem or "ok"
    if problem is not None:
        return Result(
            "distributed", "failed", f"{RANKS} processes do not meet over gloo: {problem}", ADVICE, (), details
        )
    return Result("distributed", "ok", f"{having}; {RANKS} processes meet over gloo", details=details)


def _backends() -> list[str]:
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    asked = {name: getattr(dist, f"is_{name}_available", None) for name in names}
    return [name for name, ask in asked.items() if ask is not None and ask()]


def _child() -> list[str]:
    """A Python that finds the modules that this one finds, in the same places."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from fdp._command import _loopback; _loopback.meet()"
    return [sys.executable, "-c", code]


def _problem(command: Sequence[str], seconds: float) -> str | None:
    """Run the child, and end everything that it has left, whatever happens; say what went wrong."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no answer in {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
    answers = [text.removeprefix(_ANSWER) for text in out.splitlines() if text.startswith(_ANSWER)]
    if answers == [json.dumps([float(sum(range(RANKS)))] * RANKS)]:
        return None
    last = [text for text in err.splitlines() if text.strip()] or [f"exit code {child.returncode}"]
    return f"sums are {answers[0]}" if answers else last[-1].strip()


def meet() -> None:
    """What runs in the child: a mesh of two processes, and the sum of their ranks over it."""
    from fdp.distributed._launch import launch

    print(_ANSWER + json.dumps(launch(_sum_of_ranks, RANKS, timeout=SECONDS / 2)), flush=True)


def _sum_of_ranks() -> float:
    from fdp._apply import dp_apply
    from fdp._collectives import psum
    from fdp.distributed._init import init

    with init(devices="cpu") as mesh:
        rank = torch.tensor([float(os.environ["RANK"])])
        return float(dp_apply(lambda _, x: psum(x), None, rank, mesh, out_dims=None))
