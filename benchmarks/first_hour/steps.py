"""The six steps of the first hour. Each runs in a process of its own and prints rows of JSON."""

import faulthandler
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fdp
from benchmarks.first_hour.laws import LAWS, law, loops, seeds
from benchmarks.first_hour.models import Task, tasks

Row = dict[str, Any]
TINY, OUT = os.environ.get("FIRST_HOUR_TINY") == "1", Path(os.environ.get("FIRST_HOUR_OUT", "."))
VIRTUAL = int(os.environ.get("FIRST_HOUR_VIRTUAL", "0"))
"""How many virtual devices to rehearse on; 0 for those that are there."""


def devices_here() -> tuple[torch.device, ...]:
    if VIRTUAL:
        return fdp.testing.install_virtual_accelerator(VIRTUAL)
    return fdp.available_devices()


def lists(devices: tuple[torch.device, ...]) -> dict[str, tuple[torch.device, ...]]:
    """One device as two slots, then all."""
    found = {"one device, two slots": devices[:1] * 2}
    return found if len(devices) == 1 else found | {f"{len(devices)} devices": devices}


def tried(call: Callable[[], Any]) -> str:
    """What a call returns, or how it fails in one line."""
    try:
        return str(call())
    except Exception as error:
        text = str(error).splitlines()[0]
        return (
            "refused, as documented"
            if text.startswith("executor='threads'")
            else f"{type(error).__name__}: {text[:160]}"
        )


# ---- the steps


def machine() -> Iterator[Row]:
    """What is here."""
    yield {"what": "torch", "result": torch.__version__}
    yield {"what": "devices", "result": ", ".join(map(str, devices_here()))}
    if torch.cuda.is_available():
        yield {"what": "names", "result": ", ".join(torch.cuda.get_device_name(d) for d in devices_here())}
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
        yield {"what": "topology", "result": topology.stdout}
    doctor = subprocess.run([sys.executable, "-m", "fdp", "doctor"], capture_output=True, text=True, check=False)
    yield {"what": "fdp doctor", "result": doctor.stdout}


def laws() -> Iterator[Row]:
    """The numbers are those of one device."""
    for where, devices in lists(devices_here()).items():
        for how in ("sequential", "threads"):
            for name in LAWS:
                yield {"what": name, "where": where, "how": how, "result": tried(lambda: law(name, devices, how))}  # noqa: B023
            yield {"what": "seeds", "where": where, "how": how, "result": tried(lambda: seeds(devices, how))}  # noqa: B023


def hangs() -> Iterator[Row]:
    """Nothing waits for ever."""
    for where, devices in lists(devices_here()).items():
        for how in ("sequential", "threads"):
            for name, step in loops(devices, how):

                def rounds(step: Callable[[], Any] = step) -> str:
                    for _ in range(2 if TINY else 50):
                        step()
                    return "goes on"

                yield {"what": f"checkpoint around {name}", "where": where, "how": how, "result": tried(rounds)}


def processes() -> Iterator[Row]:
    """Two processes: their backend, ranks at different places, and one that fails."""
    for backend in ["default", *(["nccl"] if torch.cuda.is_available() else [])]:
        for case in ("steps", "different", "fails"):
            begin = time.perf_counter()
            text = torchrun(2, backend, case)
            said = [line.removeprefix("SAYS ") for line in text.splitlines() if line.startswith("SAYS ")]
            seconds = round(time.perf_counter() - begin, 1)
            yield {"what": f"{backend}: {case}", "seconds": seconds, "result": "; ".join(said) or "nothing was said"}


def torchrun(count: int, *arguments: str, limit: float = 60) -> str:
    """What so many processes write."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with subprocess.Popen(
        [*command, "-m", "benchmarks.first_hour.process", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as run:
        try:
            text = run.communicate(timeout=limit)[0]
            return text if run.returncode == 0 else f"{text}\nSAYS torchrun ended with code {run.returncode}"
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its processes
            return f"{run.communicate()[0]}\nSAYS nothing within {limit} s"


def speed() -> Iterator[Row]:
    """Milliseconds, waits, copies and memory of a step, beside torch's own ways."""
    devices = devices_here()
    yield from measured_here(devices)
    rows = torchrun(max(2, len(devices)), "default", "speed", limit=180).splitlines()
    yield from [json.loads(row.removeprefix("ROW ")) for row in rows if row.startswith("ROW ")]


def measured_here(devices: tuple[torch.device, ...]) -> Iterator[Row]:
    """In this process."""
    for name, task in tasks(TINY).items():
        x, y = (t.to(devices[0]) for t in task.batch(task.rows))
        for way, make in ways(task, devices).items():
            try:
                yield {"model": name, "way": way, **measured(make(), x, y, devices)}
            except Exception as error:
                yield {"model": name, "way": way, "result": f"{type(error).__name__}: {str(error)[:120]}"}


def ways(task: Task, devices: tuple[torch.device, ...]) -> dict[str, Callable[[], Callable[[Any, Any], Any]]]:
    """Steps to compare: each makes gradients of the batch."""

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return task.model().to(devices[0])

    def alone() -> Callable[[Any, Any], Any]:
        module = model()
        return lambda x, y: task.loss(module, x, y).backward()

    def by_fdp(how: Any) -> Callable[[], Callable[[Any, Any], Any]]:
        return lambda: fdp.backward(model(), task.loss, devices=devices, executor=how)

    def by_torch(kind: Any) -> Callable[[], Callable[[Any, Any], Any]]:
        def make() -> Callable[[Any, Any], Any]:
            module = kind(model(), device_ids=list(devices))
            return lambda x, y: task.loss(module, x, y).backward()

        return make

    n = len(devices)
    return {
        "one device, plain": alone,
        f"fdp.backward on {n}, sequential": by_fdp("sequential"),
        f"fdp.backward on {n}, threads": by_fdp("threads"),
        f"fdp.DataParallel on {n}": by_torch(fdp.DataParallel),
        f"nn.DataParallel on {n}": by_torch(torch.nn.DataParallel),
    }


def measured(step: Callable[[Any, Any], Any], x: Any, y: Any, devices: tuple[torch.device, ...]) -> Row:
    """The median of some steps, and what one of them does."""
    rounds, times = (1, 2) if TINY else (5, 20), []
    for _ in range(rounds[0]):
        step(x, y)
    on_cuda = devices[0].type == "cuda"
    for device in devices if on_cuda else ():
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(rounds[1]):
        synchronize(devices)
        begin = time.perf_counter()
        step(x, y)
        synchronize(devices)
        times.append(time.perf_counter() - begin)
    with fdp.transfers() as log:
        step(x, y)
    row: Row = {"ms": round(sorted(times)[len(times) // 2] * 1e3, 2), "leaves that fdp copies": len(log)}
    if on_cuda:
        row["host waits"] = host_waits(lambda: step(x, y))
        row["peak MB"] = [torch.cuda.max_memory_allocated(device) // 2**20 for device in devices]
    return row


def synchronize(devices: tuple[torch.device, ...]) -> None:
    """Wait for all that is under way."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def host_waits(step: Callable[[], Any]) -> int:
    """How often a step makes the host wait, as torch itself warns of it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in said)


def traces() -> Iterator[Row]:
    """Where the time goes: a profile of each model, and prefetch beside scatter."""
    devices = devices_here()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for name, task in tasks(TINY).items():
        step = ways(task, devices)[f"fdp.backward on {len(devices)}, sequential"]()
        x, y = (t.to(devices[0]) for t in task.batch(task.rows))
        step(x, y)
        with torch.profiler.profile(activities=kinds) as profile:
            step(x, y)
            synchronize(devices)
        path = OUT / f"trace-{name}.json"
        profile.export_chrome_trace(str(path))
        copies = sum(event.count for event in profile.key_averages() if "memcpy" in event.key.lower())
        yield {"what": f"trace of {name}", "result": f"{path.name}, {copies} memory copies"}
        batches = [task.batch(task.rows) for _ in range(4 if TINY else 16)]
        apply = {
            "scatter": lambda batches=batches: [fdp.scatter(b, devices) for b in batches],
            "prefetch": lambda batches=batches: list(fdp.prefetch(batches, devices)),
        }
        for way, load in apply.items():
            begin = time.perf_counter()
            for batch in load():
                step(*batch.unzip())
            synchronize(devices)
            yield {"what": f"{name}, {len(batches)} batches by {way}", "seconds": round(time.perf_counter() - begin, 3)}


STEPS: dict[str, Callable[[], Iterator[Row]]] = {
    step.__name__: step for step in (machine, laws, hangs, processes, speed, traces)
}


def main() -> None:
    name, limit = sys.argv[1], float(sys.argv[2])
    faulthandler.dump_traceback_later(limit, exit=True)
    for row in STEPS[name]():
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
