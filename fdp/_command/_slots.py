"""Whether trees come back from slots as they were."""

from collections.abc import Sequence

import torch

from fdp._command._copies import pattern
from fdp._command._results import Result
from fdp._replicate import replicate
from fdp._scatter import gather, scatter

ADVICE = "an error in fdp, or in copies between these devices: please report it with the output of --json"


def check_slots(devices: Sequence[torch.device]) -> Result:
    """Scatter and gather batches that the slots do not divide, and replicate parameters; compare bit by bit."""
    slots = tuple(devices) if len(devices) > 1 else tuple(devices) * 2
    problems = [text for rows in _rows(len(slots)) for text in _round_trip(rows, slots)] + _copies(slots)
    details = {"slots": len(slots), "problems": problems}
    if problems:
        return Result("slots", "failed", problems[0], ADVICE, problems[1:], details)
    summary = f"scatter, gather and replicate on {len(slots)} slots give back every bit"
    return Result("slots", "ok", summary, details=details)


def _rows(slots: int) -> list[int]:
    return [0, 1, slots - 1, slots, 5 * slots + 1]


def _round_trip(rows: int, slots: Sequence[torch.device]) -> list[str]:
    """What is wrong after gather(scatter(tree))."""
    x = pattern(rows * 12, rows, torch.device("cpu")).view(rows, 3, 4)
    tree = {"rows": x, "columns": x.permute(1, 0, 2)}
    dims = {"rows": 0, "columns": 1}
    back = gather(scatter(tree, slots, dims), device="cpu")
    wrong = [name for name in tree if not torch.equal(back[name], tree[name])]
    return [f"gather(scatter(x)) is not x with {rows} rows along dim {dims[name]}" for name in wrong]


def _copies(slots: Sequence[torch.device]) -> list[str]:
    """What is wrong with replicas: each must hold the values, in memory of its own."""
    held = pattern(1024, 0, torch.device("cpu"))
    replicas = replicate({"w": held}, slots)
    for shard in replicas.shards:
        if not torch.equal(shard["w"].cpu(), held):
            return ["a replica does not hold what was replicated"]
        shard["w"].zero_()  # the next one must not see it
    return []
