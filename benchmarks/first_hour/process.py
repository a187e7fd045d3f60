"""One of the processes of the first hour, started by torchrun: `SAYS` and `ROW` begin what is reported."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fdp
from benchmarks.first_hour.models import tasks
from benchmarks.first_hour.steps import TINY, VIRTUAL, measured


def main() -> None:
    backend, case = sys.argv[1:]
    # The virtual accelerator has no backend for processes: a rehearsal has slots of the CPU.
    devices = fdp.virtual_devices(1) if VIRTUAL else None
    mesh = fdp.distributed.init(
        None if backend == "default" else backend, devices, timeout=20 if case != "speed" else 120
    )
    if case == "speed":
        speed(mesh)
    else:
        steps(mesh, case)


def steps(mesh: fdp.distributed.Mesh, case: str) -> None:
    """Steps that all know, then one in which rank 1 goes elsewhere, or ends."""
    device = mesh.devices[0]
    w, x = torch.ones(4, device=device), torch.ones(4, 4, device=device)
    step = fdp.value_and_grad(lambda w, x: (x @ w).square().mean(), devices=mesh)
    value, grad = [step(w, x) for _ in range(4)][-1]
    if case == "steps":
        right = torch.allclose(grad.cpu(), torch.full((4,), 8.0)) and float(value) == 16
        say(mesh, f"{dist.get_backend_config()}, {'right' if right else 'WRONG'} on {device}")
        return
    begin = time.perf_counter()
    try:
        if mesh.rank == 1 and case == "fails":
            os._exit(1)
        if mesh.rank == 1:
            fdp.grad(lambda w, x: (x @ w).mean(), devices=mesh)(w, x)
        else:
            step(w, x)
        say(mesh, "no error")
    except RuntimeError as error:
        say(mesh, f"after {time.perf_counter() - begin:.1f} s: {str(error).splitlines()[0][:200]}")


def speed(mesh: fdp.distributed.Mesh) -> None:
    """Each process with its share of the batch: fdp on the mesh beside DDP."""
    device = mesh.devices[0]
    for name, task in tasks(TINY).items():
        x, y = (t.to(device) for t in task.batch(max(1, task.rows // len(mesh.slots))))
        torch.manual_seed(0)
        module = task.model().to(device)
        by_torch = DistributedDataParallel(task.model().to(device), [device.index] if device.type == "cuda" else None)

        def by_ddp(x: Any, y: Any, module: Any = by_torch, task: Any = task) -> None:
            task.loss(module, x, y).backward()

        ways: dict[str, Callable[[Any, Any], Any]] = {
            f"fdp.backward, {len(mesh.slots)} processes": fdp.backward(module, task.loss, devices=mesh),
            f"DDP, {len(mesh.slots)} processes": by_ddp,
        }
        for way, step in ways.items():
            row = {"model": name, "way": way, **measured(step, x, y, (device,))}
            if mesh.rank == 0:
                print("ROW " + json.dumps(row), flush=True)


def say(mesh: fdp.distributed.Mesh, text: str) -> None:
    if mesh.rank == 0:
        print(f"SAYS {text}", flush=True)


if __name__ == "__main__":
    main()
