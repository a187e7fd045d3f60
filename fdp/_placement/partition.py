"""Which rows each slot has. Nothing here sees a tensor."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import torch


class Partition(NamedTuple):
    """Which shards there are: the position of each in the device list, its device, its rows.

    `sizes` is None where nothing is split. Gradient accumulation gives a slot several shards.
    """

    slots: tuple[int, ...]
    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...] | None

    def rows(self, index: int) -> range | None:
        """The rows of the whole that a shard holds."""
        if self.sizes is None:
            return None
        start = sum(self.sizes[:index])
        return range(start, start + self.sizes[index])


def make_partition(
    rows: int | None,
    devices: tuple[torch.device, ...],
    shares: Sequence[int] | None = None,
    *,
    keep_empty: bool = False,
) -> Partition:
    """Leave out slots without rows, unless they are kept; no rows at all are one empty shard on slot 0."""
    sizes = None if rows is None else tuple(shares or balanced(rows, len(devices)))
    slots = tuple(range(len(devices)))
    if not keep_empty:
        slots = tuple(i for i in slots if sizes and sizes[i] > 0) or (0,)
    return Partition(slots, tuple(devices[i] for i in slots), sizes and tuple(sizes[i] for i in slots))


def microbatched(partition: Partition, microbatches: int) -> Partition:
    """Cut every shard into pieces, as even as can be and none empty."""
    if not partition.sizes or microbatches == 1:
        return partition
    found = [
        (slot, device, piece)
        for slot, device, size in zip(partition.slots, partition.devices, partition.sizes, strict=True)
        for piece in pieces(size, microbatches)
    ]
    slots, devices, sizes = zip(*found, strict=True)
    return Partition(slots, devices, sizes)


def pieces(rows: int, microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch of a shard."""
    return balanced(rows, max(1, min(rows, microbatches)))


def balanced(rows: int, slots: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger first."""
    each, extra = rows // slots, rows % slots
    return tuple(each + (i < extra) for i in range(slots))


def chunked(rows: int, slots: int) -> tuple[int, ...]:
    """The sizes that `torch.chunk` makes, with zeros for the chunks that it does not make."""
    each = -(-rows // slots)
    return tuple(max(0, min(each, rows - i * each)) for i in range(slots))


def proportional(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Sizes in proportion to the weights, by the method of largest remainder."""
    # In whole numbers: floats could round a quota up and give out too many rows.
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = max(denominator for _, denominator in ratios)  # powers of two
    shares = [numerator * (common // denominator) for numerator, denominator in ratios]
    sizes = [rows * share // sum(shares) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(rows * shares[i] % sum(shares)))
    for i in by_remainder[: rows - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def check_weights(weights: Iterable[float], slots: int, where: str, *, whole: bool = True) -> tuple[float, ...]:
    """The weights as numbers: one per slot, finite, none negative, and if they are the `whole`, not all zero."""
    try:
        if isinstance(weights, Mapping | Set | str):
            raise TypeError("unordered")
        numbers = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{where}: weights must be a sequence of numbers, one per slot, got {weights!r}") from None
    if len(numbers) != slots:
        raise ValueError(f"{where}: {len(numbers)} weights for {slots} slots; expected one per slot")
    if not all(math.isfinite(weight) and weight >= 0 for weight in numbers) or (whole and sum(numbers) == 0):
        raise ValueError(f"{where}: weights must be finite, not negative and not all zero, got {list(numbers)}")
    return numbers
