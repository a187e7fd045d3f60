"""What a checkpoint costs: seconds a GB that a loop is held up, until the file is whole, and peaks of memory.

1 GB in 100 tensors, one thread, files in the temporary folder. `disk` is writing as many bytes to one file, and fsync:
what no checkpoint can be faster than. Memory is what a call adds to the state that is there already, in a process of
its own.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import peak_bytes

import fdp

ROUNDS = 5
GB = 1e9


def calls_in(folder: Path) -> dict[str, Callable[[], object]]:
    torch.set_num_threads(1)
    state = {f"w{i}": torch.full((2_500_000,), float(i)) for i in range(100)}
    checkpoints = fdp.distributed.Checkpoints(folder / "checkpoints")

    def write() -> None:
        with (folder / "plain").open("wb") as file:
            for tensor in state.values():
                tensor.numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())

    return {
        "disk": write,
        "save": lambda: checkpoints.save(1, state),
        "save(wait=False)": lambda: checkpoints.save(1, state, wait=False),
        "wait() after it": checkpoints.wait,
        "restore()": checkpoints.restore,
        "restore(like=state)": lambda: checkpoints.restore(like=state),
    }


def seconds(folder: Path) -> dict[str, list[float]]:
    """Of each call, by round."""
    calls = calls_in(folder)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return found


def peak(folder: Path, name: str) -> int:
    return peak_bytes(calls_in(folder)[name])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (found,) = fdp.distributed.launch(seconds, 1, Path(folder), start_method="fork", timeout=600)
        print(f"{'a GB':<24}{'first, s':>9}{'later, s':>10}{'peak, GB':>10}")
        for name, (first, *later) in found.items():
            (most,) = fdp.distributed.launch(peak, 1, Path(folder), name, start_method="fork", timeout=600)
            print(f"{name:<24}{first:9.2f}{statistics.median(later):10.2f}{most / GB:10.2f}")


if __name__ == "__main__":
    main()
