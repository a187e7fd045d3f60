"""Whether what is copied from a device to another arrives as it was.

Some machines copy wrong contents between GPUs without an error, because of the IOMMU, of PCI access control or of a
driver: https://github.com/pytorch/pytorch/issues/84803, https://github.com/pytorch/pytorch/issues/87363,
https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257. Training then goes on with wrong numbers.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from fdp._command._result import Result
from fdp._placement.moves import to_device

Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Cut = Callable[[torch.Tensor], torch.Tensor]

SIZES = (4 * 2**10, 64 * 2**10 + 128, 2**20, 16 * 2**20)  # bytes: small ones and large ones take different ways
FORMS: dict[str, Cut] = {
    "contiguous": lambda base: base,
    "later rows": lambda base: base.view(-1, 32)[3:],  # as scatter cuts them
    "transposed": lambda base: base.view(-1, 32).t(),
    "every second": lambda base: base.view(-1, 2)[:, 1],
}
ADVICE = (
    "do not use these devices together: switch the IOMMU and PCI access control (ACS) off, or update the driver; "
    "docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html has how"
)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy as all functions of fdp do."""
    return to_device(tensor, device, "pattern")


def check_copies(devices: Sequence[torch.device], move: Move = move) -> Result:
    """Copy patterns between every two devices, the CPU included, in both directions, and compare the contents."""
    pairs = list(itertools.permutations(dict.fromkeys((*devices, torch.device("cpu"))), 2))
    if not pairs:
        return Result("copies", "ok", "only the CPU: nothing is copied between devices")
    faults = list(faults_of(pairs, move))
    if not faults:
        tried = f"{len(SIZES)} sizes up to {max(SIZES) // 2**20} MiB, {len(FORMS)} layouts"
        return Result("copies", "ok", f"contents arrive between all {len(pairs)} pairs; {tried}")
    wrong = list(dict.fromkeys(pair for pair, _ in faults))
    summary = f"wrong contents in {len(wrong)} of {len(pairs)} pairs: {', '.join(wrong)}"
    return Result("copies", "failed", summary, ADVICE, [f"{pair}, {text}" for pair, text in faults[:8]])


def faults_of(pairs: Sequence[tuple[torch.device, torch.device]], move: Move) -> Iterator[tuple[str, str]]:
    """Every copy of the check that does not hold what it should: between which devices, and what is wrong.

    No two copies have the same contents. Else memory that held them before, and that the allocator gives out again,
    would look like a copy that arrived.
    """
    salts = itertools.count(1)
    for (source, target), nbytes, form in itertools.product(pairs, SIZES, FORMS):
        text = _wrong(source, target, nbytes // 4, FORMS[form], next(salts), move)
        if text is not None:
            yield f"{source} -> {target}", f"{nbytes} bytes, {form}: {text}"


def _wrong(source: torch.device, target: torch.device, count: int, cut: Cut, salt: int, move: Move) -> str | None:
    """What is wrong with one copy. The pattern is computed on each side, not copied there."""
    wanted = cut(pattern(count, salt, torch.device("cpu")))
    try:
        moved = move(cut(pattern(count, salt, source)), target)
        fetched = moved.cpu()
        on_target = torch.equal(moved, cut(pattern(count, salt, target)))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    wrong = (fetched != wanted).flatten().nonzero()
    if len(wrong):
        return f"{len(wrong)} of {wanted.numel()} elements wrong, from element {int(wrong[0])} on"
    return None if on_target else "right when fetched to the CPU, wrong where it arrived"


def pattern(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """Whole numbers in which no two stretches are alike, computed on the device: (count,), int32."""
    index = torch.arange(count, dtype=torch.int32, device=device)
    return ((index % 46337) * 46337) ^ index ^ (salt * 65537)  # 46337 is prime, and its square fits
