"""Which slots a call has, and which rows each: what all arguments agree with."""

from collections.abc import Callable, Iterable, Sequence

import torch

from fdp._placement.devices import as_devices
from fdp._placement.partition import Partition, balanced, check_weights, make_partition, proportional
from fdp._placement.peers import Peers, peers_of
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Sharded, Slots
from fdp._placement.split_dims import WHOLE, check_lists, flatten_args, resolve, rows_of
from fdp._trees import torch_private
from fdp._trees.message_lists import listed, odd_first
from fdp._trees.tree import Flat, flatten
from fdp._trees.types import Devices, Dims, Tree


def partition_of_tree(
    tree: Tree,
    name: str,
    in_dims: Dims,
    devices: Devices,
    weights: Sequence[float] | None,
    where: str,
    *,
    keep_empty: bool,
) -> tuple[Flat, Partition]:
    """The leaves of a tree that is split, and which slot has which rows."""
    flat = flatten(tree, name, in_dims, "in_dims", where)
    specs = list(flat.specs)
    resolve([flat], where)
    _, partition = partition_of([flat], devices, weights, where, keep_empty=keep_empty)
    check_lists(flat, specs, partition, where)
    return flat, partition


def partition_of(
    flats: Sequence[Flat],
    devices: Devices,
    weights: Sequence[float] | None,
    where: str,
    *,
    keep_empty: bool = False,
    sizes_of: Callable[[int, int], tuple[int, ...]] = balanced,
    whole: str = WHOLE,
) -> tuple[tuple[torch.device, ...], Partition]:
    """The device of every slot, and the rows of each that all arguments agree with.

    Without `weights`, `sizes_of(rows, slots)` says how many rows each slot has.
    """
    held = [(flat, i, leaf) for flat in flats for i, leaf in enumerate(flat.leaves) if isinstance(leaf, Slots)]
    slots = _common_slots([(flat.path(i), leaf) for flat, i, leaf in held], devices, where)
    check_tracing(slots, where)
    sharded = [(flat, i, leaf) for flat, i, leaf in held if isinstance(leaf, Sharded)]
    measured = [(flat.path(i), _sizes_of(leaf, flat, i, where)) for flat, i, leaf in sharded]
    sized = [(path, sizes) for path, sizes in measured if sizes is not None]
    if weights is not None:
        weights = check_weights(weights, len(slots), where)
        if sized:
            raise ValueError(f"{where}: {sized[0][0]} is a Sharded, which fixes the rows of each slot; drop weights")
    if any(sizes != sized[0][1] for _, sizes in sized):
        sized = odd_first(sized, lambda each: each[1])
        each = listed(sized, lambda each: f"{each[0]} has {'+'.join(map(str, each[1]))}")
        raise ValueError(f"{where}: rows of the slots differ: {each}")
    rows = _common_rows(flats, sized, where, whole)
    if sized:
        return slots, make_partition(rows, slots, sized[0][1], keep_empty=keep_empty)
    if rows is None:
        return slots, make_partition(None, slots, keep_empty=keep_empty or bool(sharded))
    shares = sizes_of(rows, len(slots)) if weights is None else proportional(rows, weights)
    return slots, make_partition(rows, slots, shares, keep_empty=keep_empty)


def check_tracing(slots: Sequence[torch.device], where: str) -> None:
    """Raise where torch.jit would record one split for batches of every size."""
    if len(slots) > 1 and torch_private.is_tracing():
        raise RuntimeError(
            f"{where}: torch.jit traces here, and would record how this one batch is split. Trace what runs on a slot, "
            "the function or the module inside a DataParallel, and map the traced one"
        )


def _common_slots(held: Sequence[tuple[str, Slots]], devices: Devices, where: str) -> tuple[torch.device, ...]:
    """The devices that were given, else those of the Sharded arguments, else of the Replicated ones."""
    sharded = [(path, leaf) for path, leaf in held if isinstance(leaf, Sharded)]
    first = (sharded or held or [None])[0]
    if devices is not None or first is None:
        slots, source = as_devices(devices, where), "devices"
        if sharded and sharded[0][1].devices == slots[: len(sharded[0][1])]:
            slots = sharded[0][1].devices  # a short last batch leaves slots out
    else:
        slots, source = first[1].devices, first[0]
    for path, leaf in held:
        # A Replicated may have more slots than are used here, and lends its first ones.
        theirs = leaf.devices[: len(slots)] if isinstance(leaf, Replicated) else leaf.devices
        if theirs != slots:
            raise ValueError(
                f"{where}: {path} is on {len(leaf)} slots ({', '.join(map(str, leaf.devices))}), but {source} has "
                f"{len(slots)} ({', '.join(map(str, slots))})"
            )
    return slots


def common_peers(held: Iterable[tuple[str, Slots]], devices: Devices, where: str) -> Peers:
    """Those that the devices and all Sharded and Replicated arguments are spread over."""
    held = list(held)
    found = peers_of(devices) if devices is not None or not held else held[0][1].peers
    for path, slots in held:
        if slots.peers is not found:
            raise ValueError(
                f"{where}: the call is on {found.place}, but {path} is {found.elsewhere}. fdp.scatter(x, mesh) and "
                "fdp.replicate(x, mesh) put things on a mesh, and the mesh is given as devices, or not at all"
            )
    found.check(where)
    return found


def _sizes_of(sharded: Sharded, flat: Flat, index: int, where: str) -> tuple[int, ...] | None:
    """Rows of each slot: as it was scattered, else measured along its spec; None if it is not a part of the batch."""
    spec, path = flat.specs[index], flat.path(index)
    if sharded.sizes is not None or spec is None:
        return None if spec is None else sharded.sizes
    args = [(f"{path}[{i}]", shard, spec, "in_dims") for i, shard in enumerate(sharded.shards)]
    sizes = [_common_rows(flatten_args([each], where), [], where) for each in args]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _common_rows(
    flats: Sequence[Flat], sized: Sequence[tuple[str, tuple[int, ...]]], where: str, whole: str = WHOLE
) -> int | None:
    """The rows that all split leaves have, None if there is no such leaf."""
    found = [
        (flat, i, rows_of(leaf, spec))
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
    ]
    split = [each for each in found if each[2] >= 0]
    rows = [sum(sizes) for _, sizes in sized] + [size for _, _, size in split]
    if any(size != rows[0] for size in rows):

        def say(k: int) -> str:
            if k < len(sized):
                return f"{sized[k][0]} has {rows[k]}"
            flat, i, size = split[k - len(sized)]
            along = "its items" if flat.specs[i] == "items" else f"dim {flat.specs[i]}"
            return f"{flat.path(i)} has {size} along {along}"

        each = listed(odd_first(range(len(rows)), lambda k: rows[k], most=4), say, most=4)
        raise ValueError(
            f"{where}: rows differ: {each}. {whole[0].upper()}{whole[1:]} for what should not be split, 'items' for a "
            "list whose elements are rows"
        )
    return rows[0] if rows else None
