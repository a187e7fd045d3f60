"""Which dim of which leaf is split, and the rows of each slot that all arguments agree with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fdp._placement.devices import as_devices
from fdp._placement.partition import Partition, balanced, check_weights, make_partition, proportional
from fdp._placement.peers import Peers, peers_of
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Sharded, Slots
from fdp._trees import torch_private
from fdp._trees.listing import listed, odd_first, quoted
from fdp._trees.opaque import array_inside
from fdp._trees.tree import Flat, flatten, lists_in
from fdp._trees.types import Devices, Dims, Tree

_WHOLE = "pass None in in_dims"


def flatten_args(args: Iterable[tuple[str, Tree, Dims, str]], where: str, whole: str = _WHOLE) -> list[Flat]:
    """Flatten named trees; the spec of each leaf becomes the dim that it is split along, None if it is not.

    `whole` is what to do, in messages, for what should not be split.
    """
    flats = [flatten(tree, name, dims, choices, where) for name, tree, dims, choices in args]
    resolve(flats, where, whole)
    return flats


def resolve(flats: Sequence[Flat], where: str, whole: str = _WHOLE) -> None:
    """Put the dim that each leaf is split along in the place of its spec, None if it is not."""
    problems: list[TypeError | ValueError] = []
    for flat in flats:
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
            if callable(spec) and not isinstance(leaf, Slots):
                spec = spec(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 else None
            try:
                flat.specs[i] = None if spec is None else _split_dim(leaf, spec, flat, i, whole)
            except (TypeError, ValueError) as error:
                problems.append(error)
    if problems:
        raise type(problems[0])(f"{where}: {listed(problems, separator='; ')}")


def _split_dim(leaf: Any, spec: Any, flat: Flat, index: int, whole: str) -> Any:
    """The dim that `spec` comes to for a leaf: an int, 'items', or None where there is nothing to split."""
    if isinstance(leaf, Slots):
        return spec
    if type(spec) is not int and not (isinstance(spec, str) and spec == "items"):
        raise ValueError(
            f"the dim for {flat.path(index)} is {quoted(spec)}; expected an int (split), None (whole), 'items' "
            "(split a list) or a function of the tensor that returns one of these"
        )
    if spec == "items":
        if type(leaf) not in (list, tuple):
            raise TypeError(f"{flat.path(index)} is a {type(leaf).__name__}; 'items' splits lists and tuples")
        return spec
    if not isinstance(leaf, torch.Tensor):
        if (found := array_inside(leaf)) is not None:
            raise TypeError(
                f"{flat.path(index)}{found[0]} is a numpy array of shape {found[1]}, which is not split. "
                f"Pass torch.as_tensor(array), or {whole} to give it whole to every slot"
            )
        return None
    if leaf.ndim == 0:
        return None
    if not -leaf.ndim <= spec < leaf.ndim:
        raise ValueError(f"dim {spec} is out of range for {flat.path(index)} of shape {tuple(leaf.shape)}")
    if leaf.is_nested or leaf.layout is not torch.strided:
        kind, way_out = ("nested", "a padded one") if leaf.is_nested else ("sparse", "it .to_dense()")
        raise TypeError(f"{flat.path(index)} is a {kind} tensor, which is not split. Pass {way_out}, or {whole}")
    return spec


def check_lists(flat: Flat, specs: Sequence[Any], partition: Partition, where: str) -> None:
    """Raise if a list has a value for each row: each slot would get all of them. `specs` are those that were given."""
    rows = sum(partition.sizes or ())
    are_values = [spec is not None and type(x) in _VALUES for x, spec in zip(flat.leaves, specs, strict=True)]
    if not rows or len(partition.slots) < 2 or sum(are_values) < rows:
        return
    for first, count, path in lists_in(flat):
        if count == rows and all(are_values[first : first + count]):
            raise ValueError(
                f"{where}: {path} is a list of as many values as there are rows, {rows}, and each slot would get all "
                "of them. Its spec is 'items' if each row has one, or None if it is to be whole"
            )


_VALUES = frozenset({int, float, complex, bool, str, bytes})


# ---- one plan for all arguments


def plan_tree(
    tree: Tree,
    name: str,
    in_dims: Dims,
    devices: Devices,
    weights: Sequence[float] | None,
    where: str,
    *,
    keep_empty: bool,
) -> tuple[Flat, Partition]:
    """The leaves of a tree that is split, and its plan."""
    flat = flatten(tree, name, in_dims, "in_dims", where)
    specs = list(flat.specs)
    resolve([flat], where)
    _, plan = plan_args([flat], devices, weights, where, keep_empty=keep_empty)
    check_lists(flat, specs, plan, where)
    return flat, plan


def plan_args(
    flats: Sequence[Flat],
    devices: Devices,
    weights: Sequence[float] | None,
    where: str,
    *,
    keep_empty: bool = False,
    sizes_of: Callable[[int, int], tuple[int, ...]] = balanced,
    whole: str = _WHOLE,
) -> tuple[tuple[torch.device, ...], Partition]:
    """The device of every slot, and the plan on them that all arguments agree with.

    Without `weights`, `sizes_of(rows, slots)` says how many rows each slot has.
    """
    held = [(flat.path(i), leaf, flat.specs[i]) for flat in flats for i, leaf in _slots_in(flat)]
    slots = _common_slots([(path, leaf) for path, leaf, _ in held], devices, where)
    check_tracing(slots, where)
    sharded = [(path, leaf, spec) for path, leaf, spec in held if isinstance(leaf, Sharded)]
    measured = [(path, _sizes_of(leaf, spec, path, where)) for path, leaf, spec in sharded]
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
    if len(slots) > 1 and torch_private.get_tracing_state() is not None:
        raise RuntimeError(
            f"{where}: torch.jit traces here, and would record how this one batch is split. Trace what runs on a slot, "
            "the function or the module inside a DataParallel, and map the traced one"
        )


def _slots_in(flat: Flat) -> Iterable[tuple[int, Slots]]:
    return [(i, leaf) for i, leaf in enumerate(flat.leaves) if isinstance(leaf, Slots)]


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


def _sizes_of(sharded: Sharded, spec: Any, path: str, where: str) -> tuple[int, ...] | None:
    """Rows of each slot: as it was scattered, else measured along `spec`; None if it is not a part of the batch."""
    if sharded.sizes is not None or spec is None:
        return None if spec is None else sharded.sizes
    sizes = [
        _common_rows(flatten_args([(f"{path}[{i}]", shard, spec, "in_dims")], where), [], where)
        for i, shard in enumerate(sharded.shards)
    ]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _common_rows(
    flats: Sequence[Flat], sized: Sequence[tuple[str, tuple[int, ...]]], where: str, whole: str = _WHOLE
) -> int | None:
    """The rows that all split leaves have, None if there is no such leaf."""
    split = [
        (flat, i, rows_of(leaf, spec))
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if rows_of(leaf, spec) >= 0
    ]
    rows = [sum(sizes) for _, sizes in sized] + [size for _, _, size in split]
    if any(size != rows[0] for size in rows):

        def say(k: int) -> str:
            if k < len(sized):
                return f"{sized[k][0]} has {rows[k]}"
            flat, i, size = split[k - len(sized)]
            return f"{flat.path(i)} has {size} along {_along(flat.specs[i])}"

        each = listed(odd_first(range(len(rows)), lambda k: rows[k], most=4), say, most=4)
        items = ". A list whose elements are rows is split by the spec 'items'"
        hint = items if any(_has_lists(flat.structure) for flat, *_ in split) else ""
        raise ValueError(
            f"{where}: rows differ: {each}. {whole[0].upper()}{whole[1:]} for what should not be split{hint}"
        )
    return rows[0] if rows else None


def _has_lists(structure: Any) -> bool:
    return structure.type is list or any(map(_has_lists, structure.children()))


def rows_of(leaf: Any, spec: Any) -> int:
    """The rows of a tensor or list that is split, -1 for what is not."""
    if spec is None or not isinstance(leaf, torch.Tensor | list | tuple):
        return -1
    return leaf.shape[spec] if isinstance(leaf, torch.Tensor) else len(leaf)


def _along(spec: Any) -> str:
    return "its items" if spec == "items" else f"dim {spec}"
