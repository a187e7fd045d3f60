"""A tree per slot: `Slots`, which `Sharded` and `Replicated` have in common, and `Sharded`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, cast

import torch

from fdp._placement.devices import as_devices
from fdp._placement.leaf_table import Picture
from fdp._placement.peers import ALONE, Located, Peers
from fdp._placement.planned_leaf import on_slots
from fdp._trees.printed import runs_text
from fdp._trees.registry import register_leaf
from fdp._trees.tree import tensors_in
from fdp._trees.types import AUTO, Auto, Dims, Tree


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Slots(Located):
    """One tree per slot. Immutable; the tensors inside are not."""

    shards: tuple[Tree, ...]
    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...] | None = None
    dims: Dims | Auto = AUTO
    peers: Peers = dataclasses.field(default=cast(Peers, None), kw_only=True)  # the compiler knows None, and not ALONE

    def __post_init__(self) -> None:
        if self.peers is None:
            object.__setattr__(self, "peers", ALONE)
        if not all(isinstance(part, tuple) for part in (self.shards, self.devices, self.sizes or ())):
            raise TypeError(f"{type(self).__name__}: shards, devices and sizes are tuples with one entry per slot")
        if not all(isinstance(device, torch.device) for device in self.devices):
            object.__setattr__(self, "devices", as_devices(self.devices, type(self).__name__))
        if not self.shards or {len(self.devices), len(self.sizes or self.shards)} != {len(self.shards)}:
            raise ValueError(
                f"{type(self).__name__}: {len(self.shards)} shards, {len(self.devices)} devices, sizes {self.sizes}; "
                "expected one of each a slot"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not ALONE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({"peers": ALONE} | state)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, slot: int) -> Tree:
        if isinstance(slot, bool) or not isinstance(slot, int):
            what = f"x[i][{slot!r}] is in slot i" if isinstance(slot, str) else ".shards is a tuple"
            raise TypeError(f"{type(self).__name__} is indexed by a slot number, not {slot!r}; {what}")
        if not -len(self) <= slot < len(self):
            raise IndexError(f"slot {slot} of a {type(self).__name__} with {len(self)} slots")
        return self.shards[slot]

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(
            f"a {type(self).__name__} is not iterable: `a, b = x` would bind slots, not parts. Use x.unzip() for a "
            f"{type(self).__name__} of tuples or lists, x.shards for the shards. An optimizer takes the tensors of one "
            "device: give it module.parameters(), and write fdp.set_grads(module, grads)"
        )

    __reversed__ = __iter__

    def __repr__(self) -> str:
        devices = ", ".join(f"{device}" + f" x {n}" * (n > 1) for device, n in Counter(map(str, self.devices)).items())
        rows = "" if self.sizes is None else f", rows {'+'.join(map(str, self.sizes))}"
        slots = f"{len(self)} slot" + "s" * (len(self) > 1)
        return f"{type(self).__name__}({slots}{self.peers} on {devices}{rows}: {summary(self.shards[0])})"

    def picture(self, name: str = "") -> Picture:
        """Where the leaves live; they are called `name`."""
        kind = type(self).__name__
        slots = f"{len(self)} slot" + "s" * (len(self) > 1)
        rows = "" if self.sizes is None else f", rows {runs_text(self.sizes)}"
        on = {device: [str(i) for i, d in enumerate(self.devices) if d == device] for device in self.devices}
        where = "; ".join(f"{device}: {', '.join(slots)}" for device, slots in on.items())
        found = on_slots(self.shards, self.devices, self.sizes, self.dims, name)
        return Picture(f"{kind}: {slots}{rows} ({where})", tuple(found))

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def unzip(self) -> tuple[Self, ...]:
        """Tuples or lists in every slot, turned into a tuple with one of these for each position."""
        if self.dims == "items":
            raise TypeError("unzip: the lists in the slots are rows, split by 'items'")
        kinds = [kind_of(shard) for shard in self.shards]
        if len(set(kinds)) != 1 or type(self.shards[0]) not in (tuple, list):
            raise TypeError(f"unzip: every slot must hold a tuple, or a list, of the same length, got {kinds}")
        columns = list(zip(*self.shards, strict=True))
        given: Any = self.dims
        dims = given if type(given) in (tuple, list) else (given,) * len(columns)
        return tuple(dataclasses.replace(self, shards=c, dims=d) for c, d in zip(columns, dims, strict=True))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sharded(Slots):
    """A tree split over slots, or what a function returned on each of them.

    >>> import fdp, torch
    >>> batch = fdp.scatter({"x": torch.arange(5)}, fdp.virtual_devices(2))
    >>> batch
    Sharded(2 slots on cpu x 2, rows 3+2: {'x': int64[3]})
    >>> batch[1]
    {'x': tensor([3, 4])}
    >>> a, b = batch.map(lambda shard: (shard["x"].sum(), shard["x"].max())).unzip()
    >>> a.shards
    (tensor(3), tensor(7))

    Attributes:
        shards: One tree per slot.
        devices: The device of each slot.
        sizes: Rows of each slot, or None where that is not known.
        dims: Which dimension of each leaf was split, as a prefix tree, or `AUTO` where that is not known.
        peers: The processes of the mesh whose local slots these are.
    """

    def map(self, fn: Callable[[Tree], Tree]) -> "Sharded":
        """Apply a function to the tree of every slot, one after the other. The result carries no dims and no sizes."""
        return Sharded(tuple(fn(shard) for shard in self.shards), self.devices, peers=self.peers)


register_leaf(Sharded)
Sharded.__module__ = "fdp"  # where pickles find it, whatever file it is in


def leaf_tensors(leaf: Any) -> Sequence[torch.Tensor]:
    """The tensors in a leaf of the arguments: itself, those on all slots, those of a list under 'items'."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    return tensors_in(leaf.shards if isinstance(leaf, Slots) else leaf)


def kind_of(tree: Any) -> str:
    return f"{type(tree).__name__} of {len(tree)}" if type(tree) in (tuple, list) else type(tree).__name__


def summary(tree: Any, depth: int = 0) -> str:
    """A tree in a line: tensors as dtype and shape, deep or wide parts left out."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, dict):
        parts, opening, closing = [(f"{key!r}: ", value) for key, value in tree.items()], "{", "}"
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, Slots | type):
        fields = [field.name for field in dataclasses.fields(tree)]
        parts, opening, closing = [(f"{n}=", getattr(tree, n)) for n in fields], f"{type(tree).__name__}(", ")"
    elif isinstance(tree, list | tuple):
        opening, closing = "[]" if isinstance(tree, list) else ("(", ",)" if len(tree) == 1 else ")")
        parts = [("", value) for value in tree]
    else:
        return repr(tree)[:40]
    if depth > 2 and parts:
        return f"{opening}...{closing}"
    shown = [label + summary(value, depth + 1) for label, value in parts[:4]]
    return opening + ", ".join(shown + ["..."] * (len(parts) > 4)) + closing
