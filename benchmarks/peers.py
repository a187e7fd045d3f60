"""fdp beside its peers: value and gradients of five models, float32, on two slots of one CPU.

Contenders: plain torch with all cores; one shard alone, which two slots cannot beat; fdp sequential, on threads, and
on threads with a compiled loss; fdp and DistributedDataParallel with two processes; JAX's shard_map with two virtual
devices.
Each is checked against an oracle, then all run in turns, in another order each round, each in processes of its own.
A measurement is a call that is not timed and then some that are, without a pause: what a training loop pays.

Targets, as ratios. fdp threads to plain torch: small MLP 1.4, wide MLP 1.2, CNN 0.75, transformer 0.98, LSTM 0.95; to
DDP: 0.8, 0.65, 0.95, 0.9, 0.95. With two processes fdp is no slower than DDP; fdp compiled is ahead of JAX.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _peers_report as report
import torch
from _peers_models import SPECS, Figures, first_part, oracle
from _peers_process import Contender, Job, Unavailable, opened

SLOTS = 2
BURST = 0.02  # seconds that a measurement should last


def main() -> None:
    options = arguments()
    if options.profile:
        from _peers_profile import profile

        return profile(options.profile, SLOTS)
    found = json.loads(options.show.read_text()) if options.show else measure(options.models, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.show:
        (options.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    report.show(found)
    from _peers_plot import draw

    draw(found, options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="measurements of each contender and model")
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(SPECS), metavar="MODEL", help=str([*SPECS]))
    parser.add_argument("--out", type=Path, default=Path("docs/explanation/peers"), help="folder of the plot and the figures")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that everything works")
    parser.add_argument("--show", type=Path, metavar="JSON", help="tables and plot of an earlier run")
    parser.add_argument(
        "--profile", choices=SPECS, metavar="MODEL", help="show instead where a call of fdp spends time"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = 6
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    return options


def jobs(rendezvous: str) -> dict[str, list[Job]]:
    """The processes of each contender. A slot has its share of the cores, in every contender that has slots."""
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // SLOTS)

    def job(function: str, threads: int = cores, rank: int = 0, module: str = "_peers_torch") -> Job:
        return Job(module, function, rank, SLOTS, threads, rendezvous)

    return {
        report.PLAIN: [job("plain")],
        report.LIMIT: [job("one_shard", share)],
        report.SEQUENTIAL: [job("fdp_sequential")],
        report.THREADS: [job("fdp_threads")],
        report.COMPILED: [job("fdp_compiled")],
        report.MESH: [job("fdp_mesh", share, rank) for rank in range(SLOTS)],
        report.DDP: [job("ddp", share, rank) for rank in range(SLOTS)],
        report.JAX: [job("jax_shard_map", 1, module="_peers_jax")],  # these are torch's threads; XLA has its own
    }


def measure(models: Iterable[str], rounds: int) -> dict[str, Any]:
    """Run all contenders on all models; those that cannot run are left out, with the reason."""
    found = report.surroundings(" ".join(["python", "benchmarks/peers.py", *sys.argv[1:]]))
    found |= {"slots": SLOTS, "rounds": rounds, "skipped": {}, "models": {}}
    with tempfile.TemporaryDirectory() as folder, opened(jobs(f"{folder}/ranks")) as contenders:
        for model in models:
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
        for answer in contender.ask("check"):
            check(f"{name}, {model}", answer, right, SPECS[model].tolerance)
        ready.append(contender)
    if not SPECS[model].normalises:
        check(f"whole and parts, {model}", whole, parts, SPECS[model].tolerance)
    return ready


def check(what: str, found: Any, right: Figures, tolerance: float) -> None:
    """Raise unless the loss, and each gradient relative to its largest entry, are within the tolerance."""
    (loss, grads), (right_loss, right_grads) = found, right
    wrong = [] if abs(loss - right_loss) < tolerance else [f"loss {loss}, not {right_loss}"]
    if sorted(grads) != sorted(right_grads):
        wrong.append(f"gradients of {sorted(grads)}")
    else:
        errors = {key: float((right_grads[key] - torch.as_tensor(grads[key])).abs().max()) for key in grads}
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


if __name__ == "__main__":
    main()
