"""Whether processes of this machine can meet: two of them add numbers by torch.distributed, over gloo on loopback."""

import os
import subprocess
import sys
import tempfile
import time

import torch.distributed as dist

from fdp._command._results import Result

SECONDS = 60.0
RANKS = 2
ADVICE = (
    "fdp.distributed will not work: look whether a firewall or a sandbox closes sockets on 127.0.0.1, and whether "
    "GLOO_SOCKET_IFNAME names an interface that exists"
)
# Its arguments: where modules are found, a file to find the other by, how many there are, and which one this is.
_PROGRAM = f"""
import datetime, sys
sys.path[:] = eval(sys.argv[1])
import torch, torch.distributed as dist
file, size, rank = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = datetime.timedelta(seconds={SECONDS / 2})
dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=limit)
found = torch.tensor(rank)
dist.all_reduce(found)
assert found == sum(range(size)), f"the sum of ranks is {{found}}, not {{sum(range(size))}}"
dist.destroy_process_group()  # or torch now and then aborts as the process ends
"""


def check_distributed(program: str = _PROGRAM, seconds: float = SECONDS) -> Result:
    """Which back ends torch.distributed has, and whether two processes that run a program meet over gloo."""
    if not dist.is_available():
        advice = "this torch has no distributed package: one process with many slots works, fdp.distributed does not"
        return Result("distributed", "warning", "torch.distributed is not available", advice, details={"backends": []})
    backends = _backends()
    details = {"backends": backends, "loopback": None}
    having = f"torch.distributed with {', '.join(backends) or 'no backend'}"
    if "gloo" not in backends:
        return Result("distributed", "warning", having, "no gloo: two processes were not tried", details=details)
    problem = _problem(program, seconds)
    details["loopback"] = problem or "ok"
    if problem is None:
        return Result("distributed", "ok", f"{having}; {RANKS} processes meet over gloo", details=details)
    summary = f"{RANKS} processes do not meet over gloo: {problem}"
    return Result("distributed", "failed", summary, ADVICE, details=details)


def _backends() -> list[str]:
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    asked = {name: getattr(dist, f"is_{name}_available", None) for name in names}
    return [name for name, ask in asked.items() if ask is not None and ask()]


def _problem(program: str, seconds: float) -> str | None:
    """Run the processes, and end those that are left, whatever happens; say what went wrong."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # as `launch` has it
    environment = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    environment |= os.environ | {"OMP_NUM_THREADS": "1"}
    until = time.monotonic() + seconds
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, repr(sys.path), os.path.join(folder, "store"), str(RANKS)]
        try:
            for rank in range(RANKS):
                said = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
                ranks.append(subprocess.Popen([*command, str(rank)], env=environment, **said))
            while None in (codes := [process.poll() for process in ranks]) and not any(codes):
                if time.monotonic() > until:
                    return f"no answer in {seconds:g} s"
                time.sleep(0.02)  # the other process would wait long for one that has failed
        finally:
            for process in ranks:
                process.kill()
            errors = [process.communicate()[1] for process in ranks]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return None
    lines = [line.strip() for line in errors[failed].splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {codes[failed]}"
