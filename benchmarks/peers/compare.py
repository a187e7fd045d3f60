"""fdp beside its peers: value and gradients of five models, float32, on two slots of one CPU.

Contenders: plain torch with all cores; one shard alone, which two slots cannot beat; fdp sequential, on threads, on
threads with a compiled loss, and compiled in one graph; fdp and DistributedDataParallel with two processes; JAX's
shard_map under jit with two virtual devices.
Each is checked against an oracle, then all run in turns, in another order each round, each in processes of its own.
A measurement is a call that is not timed and then some that are, without a pause: what a training loop pays.

Targets, as ratios. fdp threads to plain torch: small MLP 1.4, wide MLP 1.2, CNN 0.75, transformer 0.98, LSTM 0.95; to
DDP: 0.8, 0.65, 0.95, 0.9, 0.95. With two processes fdp is no slower than DDP; fdp compiled is ahead of JAX.
"""

import io
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.peers import report
from benchmarks.peers.models import SPECS, Figures, first_part, oracle
from benchmarks.peers.process import Contender, Job, Unavailable, opened
from benchmarks.peers.report import cores

SLOTS = 2
BURST = 0.02  # seconds that a measurement should last


def jobs(rendezvous: str) -> dict[str, list[Job]]:
    """The processes of each contender. A slot has its share of the cores, in every contender that has slots."""
    every = cores()
    share = max(1, every // SLOTS)

    def job(function: str, threads: int = every, rank: int = 0, module: str = "with_torch") -> Job:
        return Job(f"{__package__}.{module}", function, rank, SLOTS, threads, rendezvous)

    return {
        report.PLAIN: [job("plain")],
        report.LIMIT: [job("one_shard", share)],
        report.SEQUENTIAL: [job("fdp_sequential")],
        report.THREADS: [job("fdp_threads")],
        report.COMPILED: [job("fdp_compiled")],
        report.STEP: [job("fdp_compiled_step")],
        report.MESH: [job("fdp_mesh", share, rank) for rank in range(SLOTS)],
        report.DDP: [job("ddp", share, rank) for rank in range(SLOTS)],
        # These are torch's threads; XLA has its own.
        report.JAX: [job("jax_shard_map", 1, module="with_jax")],
    }


def measure(
    models: Iterable[str], rounds: int, command: str, jobs_of: Callable[[str], dict[str, list[Job]]] = jobs
) -> dict[str, Any]:
    """Run all contenders on all models; those that cannot run are left out, with the reason."""
    found = report.surroundings(command)
    found |= {"slots": SLOTS, "rounds": rounds, "skipped": {}, "models": {}}
    with tempfile.TemporaryDirectory() as folder, opened(jobs_of(f"{folder}/ranks")) as contenders:
        for model in models:
            print(f"{model}: loads and checks all contenders", file=sys.stderr)
            ready = load(contenders, model, found["skipped"])
            found["models"][model] = take_turns(ready, rounds)
            print(f"{model}: measured", file=sys.stderr)
    return found


def load(contenders: dict[str, Contender], model: str, skipped: dict[str, str]) -> list[Contender]:
    """Give each contender its model and check its gradients. The others run none of it meanwhile."""
    ready = []
    whole, parts, part = oracle(model, 1), oracle(model, SLOTS), first_part(model, SLOTS)
    for name, contender in contenders.items():
        if name in skipped:
            continue
        try:
            contender.ask("load", model)
        except Unavailable as reason:
            skipped[name] = str(reason)
            continue
        # Equal parts have the mean of the whole, unless each part is normalised by its own statistics.
        right = {report.PLAIN: whole, report.LIMIT: part}.get(name, parts)
        for sent in contender.ask("check"):
            check(f"{name}, {model}", torch.load(io.BytesIO(sent)), right, SPECS[model].tolerance)
        ready.append(contender)
    if not SPECS[model].normalises:
        check(f"whole and parts, {model}", whole, parts, SPECS[model].tolerance)
    return ready


def check(what: str, found: Figures, right: Figures, tolerance: float) -> None:
    """Raise unless the loss, and each gradient relative to its largest entry, are within the tolerance."""
    (loss, grads), (right_loss, right_grads) = found, right
    wrong = [] if abs(loss - right_loss) < tolerance else [f"loss {loss}, not {right_loss}"]
    if sorted(grads) != sorted(right_grads):
        wrong.append(f"gradients of {sorted(grads)}")
    else:
        errors = {key: float((right_grads[key] - grads[key]).abs().max()) for key in grads}
        wrong += [
            f"{key} off by {error:.1e}"
            for key, error in errors.items()
            if not error <= tolerance * max(1e-3, float(right_grads[key].abs().max()))
        ]
    if wrong:
        raise RuntimeError(f"{what}: wrong: {'; '.join(wrong)}")


def take_turns(contenders: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Measure each contender once a round, in an order drawn for the round."""
    repeats = {c.name: burst(c) for c in contenders}
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for contender in order:
            times[contender.name].append(contender.measure(repeats[contender.name]))
    return times


def burst(contender: Contender) -> int:
    """Calls a measurement, so that short ones last as long as long ones."""
    contender.measure(3)
    return max(1, round(BURST / statistics.median(contender.measure(1) for _ in range(5))))
