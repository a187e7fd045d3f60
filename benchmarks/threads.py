"""Threads of fdp beside two threads of the user's on the same halves, and beside shards in order.

A step is the value and gradient of a model in its parameters, on two slots of the CPU. Targets: threads at most 1.1 of
bare threads on the four larger models and 1.3 on the small one.

`--python` names other interpreters, such as one without the GIL. Each has a process, and they take turns.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from peers.models import SPECS, build
from torch.nn import functional as F

import fdp

SLOTS = fdp.virtual_devices(2)
THREADS = torch.get_num_threads()
warnings.simplefilter("ignore", fdp.nn.BatchNormWarning)  # bare threads take the statistics of each half too
warnings.filterwarnings("ignore", "value_and_grad: the loss does not return the new buffers")


def steps(name: str, pool: ThreadPoolExecutor) -> dict[str, Callable[[], Any]]:
    model, x, y = build(name)
    apply, (params, buffers) = fdp.functional(model)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply((params, buffers), x)[0], y)

    def half(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)
        own = {name: value.detach().requires_grad_() for name, value in params.items()}
        return torch.autograd.grad(loss(own, *part), list(own.values()))

    def bare() -> list[torch.Tensor]:
        first, second = pool.map(half, halves)
        return [a + b for a, b in zip(first, second, strict=True)]

    def on_slots(executor: Any) -> Callable[[], Any]:
        step = fdp.value_and_grad(loss, devices=SLOTS, executor=executor)

        def run() -> Any:
            torch.set_num_threads(THREADS)
            return step(params, x, y)

        return run

    return {"bare": bare, **{executor: on_slots(executor) for executor in ("threads", "sequential")}}


def serve() -> None:
    """What a process for an interpreter does: one round of the steps of each model that it is asked for."""
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps(f"{platform.python_version()}{'' if gil else ' without the GIL'}"), flush=True)
    with ThreadPoolExecutor(2) as pool:
        known, contenders = "", {}
        for line in sys.stdin:
            if line.strip() != known:
                known, contenders = line.strip(), steps(line.strip(), pool)
                for run in [run for run in contenders.values() for _ in range(8)]:
                    run()
            times = {}
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                times[name] = time.perf_counter() - start
            print(json.dumps(times), flush=True)


def ask(process: subprocess.Popen[str], model: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    if model:
        process.stdin.write(model + "\n")
        process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="another interpreter, with torch and optree")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    env["OMP_WAIT_POLICY"] = "passive"  # else torch's pool of what ran before takes a core of what is timed
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    commands = [[python, __file__, "--serve"] for python in (sys.executable, *options.python)]
    processes = {ask(process, ""): process for process in [subprocess.Popen(each, **pipes) for each in commands]}
    columns = "".join(f"{name:>10}" for name in ("bare", "threads", "in order"))
    print(f"{'milliseconds a step':20}{'Python':25}{columns}   threads/bare  threads/order  threads/first")
    for model in SPECS:
        ask_all = [{name: ask(each, model) for name, each in processes.items()} for _ in range(rounds_of(model))]
        first = None
        for name in processes:
            times = {key: statistics.median(found[name][key] for found in ask_all) for key in ask_all[0][name]}
            first = times["threads"] if first is None else first
            each = "".join(f"{1000 * seconds:10.2f}" for seconds in times.values())
            ratios = times["threads"] / times["bare"], times["threads"] / times["sequential"]
            print(f"{model:20}{name:25}{each}{ratios[0]:15.2f}{ratios[1]:15.2f}{times['threads'] / first:15.2f}")
    for process in processes.values():
        process.communicate()


def rounds_of(model: str) -> int:
    return 100 if model == "small MLP" else 15


if __name__ == "__main__":
    main()
