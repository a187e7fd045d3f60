"""Where the rows of a batch are in what is made of it, while a function runs on tensors without data.

Rows are followed through dims whose size is a multiple of their number. A view, cat or slice puts them at places that
are known; an order that depends on values, at such that are not. A draw needs them outside in its dim, and in order:
there the numbers of a slot's rows are one part of those of all rows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fdp._trees.tree import tensors_in
from fdp._trees.untraced import leave_alone

INSIDE = (
    "is for a dim which is made of others and rows, in that order: (time, rows) as one. Put the rows first, or draw "
    "before the two become one. For cat([x, x]) write stack([x, x], 1).flatten(0, 1)"
)
MOVED = (
    "is for rows that have changed places, as by x[order], sort or flip, or is put in other places itself, as by "
    "draw.flip(0), draw.argsort(), or draw[:n] of more than n. Which row it is for depends on the others. Draw for "
    "rows where they are, and once for each use"
)
_PIECE = 0  # in place of a size: a part of the rows, which is not followed by size


class RowOrder(NamedTuple):
    """The rows along a dim: `each` elements for each of `order`, or, with a token, in an order that is not known."""

    order: bytes
    each: int = 1
    token: object = None

    def elements(self) -> bytes:
        """The row of each element."""
        return self.order if self.each == 1 else b"".join(bytes([row]) * self.each for row in self.order)


def _shortest(order: bytes, each: int = 1) -> RowOrder:
    run = len(order) - len(order.lstrip(order[:1]))
    known = run > 1 and len(order) % run == 0 and len({order[i::run] for i in range(run)}) == 1
    return RowOrder(order[::run], each * run) if known else RowOrder(order, each)


RowOrders = dict[int, RowOrder]
"""The rows of a tensor, by the size of the dim that has them."""


class MadeOf(NamedTuple):
    """A tensor, and the operation that has made it."""

    tensor: torch.Tensor
    given: Sequence[torch.Tensor]
    values: dict[str, Any]
    nth: int  # among what the operation returns

    def dim(self, default: int = 0) -> int:
        return self.values.get("dim", default) % max(self.given[0].ndim, 1)


class RowPlaces:
    """The rows, and the draws, that are in each tensor of a run. These have no data, and are kept until it ends."""

    def __init__(self, rows: int, items: dict[int, int], problems: dict[int, str]) -> None:
        self._problems = problems  # of draws, by their numbers
        self._rows, self._order = rows, bytes(range(rows))
        self._kept: list[torch.Tensor] = []
        self._layouts = {item: {_PIECE: RowOrder(bytes([row]))} for item, row in items.items()}
        self._draws: dict[int, frozenset[int]] = {}
        self._roots: dict[int, torch.Tensor] = {}  # what a tensor is a view of
        self._counted: set[int] = set()  # 0, 1, 2, ... for all rows

    def drawn(self, number: int, given: Sequence[torch.Tensor], made: torch.Tensor) -> None:
        """Note a draw."""
        layouts = self._followed(MadeOf(made, given, {}, 0))
        for size in self._sizes(made):
            layout = layouts.setdefault(size, self._outside(size))
            if layout.order != self._order:
                self._problems[number] = self._why([layout])
        self._keep(made, layouts, frozenset([number]) if layouts else frozenset())

    def made(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Iterable[Any]) -> None:
        """Note what another operation has made."""
        name = func.__name__.split(".")[0]
        values = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        given = [] if name.startswith("new_") else tensors_in((args, kwargs))
        for index, tensor in enumerate(results):
            if not isinstance(tensor, torch.Tensor):
                continue
            if name == "arange" and tensor.shape == (self._rows,):
                self._counted.add(id(tensor))
            if func.is_view:
                self._roots[id(tensor)] = self._root(given[0])
                self._counted.update([id(tensor)] if id(given[0]) in self._counted else ())
                if name in ("alias", "detach"):
                    self._layouts[id(tensor)] = self._of(given[0])  # also what is written later
            layouts = _KINDS.get(name, RowPlaces._followed)(self, MadeOf(tensor, given, values, index)) if given else {}
            self._keep(tensor, layouts, self._draws_in(given))

    def _keep(self, tensor: torch.Tensor, layouts: RowOrders, draws: frozenset[int]) -> None:
        self._kept.append(tensor)
        own = self._layouts.setdefault(id(tensor), layouts)
        if own is not layouts:
            layouts = layouts.copy()
            own.clear()
            own.update(layouts)
        root = self._root(tensor)
        if draws:
            self._draws[id(root)] = self._draws_in([root]) | draws
        if root is not tensor and layouts.keys() - {_PIECE}:  # it may have been written to
            for size in self._sizes(root):
                self._of(root).setdefault(size, layouts.get(size, RowOrder(b"", token=id(root))))

    def _sizes(self, tensor: torch.Tensor) -> set[int]:
        return {n for n in tensor.shape if self._rows and n and n % self._rows == 0}

    def _outside(self, size: int) -> RowOrder:
        return RowOrder(self._order, size // self._rows)

    def _of(self, tensor: torch.Tensor) -> RowOrders:
        """What nothing here has made is an argument, whose rows are outside."""
        if id(tensor) not in self._layouts:
            self._kept.append(tensor)
            self._layouts[id(tensor)] = {size: self._outside(size) for size in self._sizes(tensor)}
        return self._layouts[id(tensor)]

    def _root(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._roots.get(id(tensor), tensor)

    def _draws_in(self, given: Iterable[torch.Tensor]) -> frozenset[int]:
        return frozenset[int]().union(*(self._draws.get(id(self._root(x)), ()) for x in given))

    def _why(self, layouts: Iterable[RowOrder]) -> str:
        """What is said of rows that are not outside, and in order."""
        inside = (x.token is INSIDE or (len(x.order) > self._rows and x.order.startswith(self._order)) for x in layouts)
        return INSIDE if any(inside) else MOVED

    def _refuse(self, given: Iterable[torch.Tensor], why: str) -> None:
        for number in self._draws_in(given):
            self._problems.setdefault(number, why)

    def _rows_at(self, tensor: torch.Tensor, dim: int) -> RowOrder | None:
        """Of a piece of them only where it has its dim."""
        layouts, size = self._of(tensor), tensor.shape[dim] if tensor.ndim else 1
        piece = layouts.get(_PIECE)
        if piece is not None and len(piece.order) == 1:
            piece = RowOrder(piece.order, size)  # all of it is of one row
        return layouts.get(size) or (piece if piece and len(piece.order) * piece.each == size else None)

    # ---- what operations do to rows

    def _followed(self, made: MadeOf) -> RowOrders:
        """They stay where they are. Beside others they are in no order, and so in a dim of a size that is new."""
        before, found = [self._of(x) for x in made.given], {}
        for size in (_PIECE, *self._sizes(made.tensor)):
            layouts = {own[size] for own in before if size in own}
            if len(layouts) == 1:
                found[size] = layouts.pop()
            elif size != _PIECE and (layouts or any(own.keys() - {_PIECE} for own in before)):
                beside = [x for x, own in zip(made.given, before, strict=True) if size in own]
                self._refuse(beside, self._why(layouts))
                found[size] = RowOrder(b"", token=id(made.tensor))
        return found

    def _sliced(self, made: MadeOf) -> RowOrders:
        source, values = made.given[0], made.values
        layout = self._rows_at(source, made.dim())
        if layout is None:
            return self._followed(made)
        if "split_sizes" in values:
            start, step = sum(values["split_sizes"][: made.nth]), 1
        elif "split_size" in values:
            start, step = made.nth * values["split_size"], 1
        else:  # slice, select, unbind
            start, step = values.get("start") or values.get("index", made.nth), values.get("step", 1)
        whole = source.shape[made.dim()]
        start = max(start + whole, 0) if start < 0 else start
        count = made.tensor.shape[made.dim()] if made.tensor.ndim == source.ndim else 1
        found = {size: own for size, own in self._of(source).items() if size in self._sizes(made.tensor)}
        if layout.token is None:
            part = _shortest(layout.elements()[start::step][:count])
            if count in self._sizes(made.tensor) and part.order != self._order:  # some rows, several times
                self._refuse([source], MOVED)
        else:
            part = layout if count == whole else RowOrder(b"", token=(layout.token, start, step, count))
        return found | {
            count if made.tensor.ndim == source.ndim and count in self._sizes(made.tensor) else _PIECE: part
        }

    def _joined(self, made: MadeOf) -> RowOrders:
        """By cat, or by stack."""
        is_new = made.tensor.ndim > made.given[0].ndim
        dim = made.values.get("dim", 0) % made.tensor.ndim
        if is_new:
            parts = [self._of(x).get(_PIECE) for x in made.given]
        else:
            parts = [self._rows_at(x, dim) for x in made.given if x.ndim == made.tensor.ndim]
        found = self._followed(made)
        if not any(parts):
            return found if not is_new or self._sizes(made.given[0]) else {}
        known = [part.elements() for part in parts if part is not None and part.token is None]
        size = made.tensor.shape[dim]
        joined = _shortest(b"".join(known)) if len(known) == len(parts) else RowOrder(b"", token=id(made.tensor))
        return found | {size if size in self._sizes(made.tensor) else _PIECE: joined}

    def _repeated(self, made: MadeOf) -> RowOrders:
        source, times = made.given[0], made.values["repeats"]
        found = {size: own for size, own in self._of(source).items() if size in self._sizes(made.tensor)}
        for size, count in zip(source.shape, times[len(times) - source.ndim :], strict=True):
            layout = self._of(source).get(size)
            if layout is not None and count > 1:
                token = layout.token and (layout.token, count)
                found[size * count] = RowOrder(b"", token=token) if token else _shortest(layout.elements() * count)
        return found

    def _viewed(self, made: MadeOf) -> RowOrders:
        """The rows of a tensor's elements in turn, and where they are then."""
        source, view = made.given[0], made.tensor
        dims = [i for i, n in enumerate(source.shape) if n in self._of(source)]
        if len(dims) != 1 or source.numel() != view.numel() or source.shape == view.shape:
            return self._followed(made)
        layout, lead = self._of(source)[source.shape[dims[0]]], math.prod(source.shape[: dims[0]])
        order, each = layout.order * lead, layout.each * math.prod(source.shape[dims[0] + 1 :])
        for i, size in enumerate(view.shape):
            inner = math.prod(view.shape[i + 1 :])
            if layout.token is not None:
                if size == source.shape[dims[0]] and math.prod(view.shape[:i]) == lead:
                    return {size: layout}
            elif each % inner == 0 and size % (each // inner) == 0:
                part = order[: size // (each // inner)]
                if part and size in self._sizes(view) and part * (len(order) // len(part)) == order:
                    return {size: _shortest(part, each // inner)}
        return {size: RowOrder(b"", token=INSIDE) for size in self._sizes(view)}

    def _strided(self, made: MadeOf) -> RowOrders:
        source, view = made.given[0], made.tensor
        pairs = [sorted(zip(x.shape, x.stride(), strict=True)) for x in (source, view)]
        if pairs[0] == pairs[1] and source.storage_offset() == view.storage_offset():
            return self._followed(made)
        return {size: RowOrder(b"", token=id(view)) for size in self._sizes(view)} if self._of(source) else {}

    def _moved(self, made: MadeOf) -> RowOrders:
        """By an index, or along a dim: rows are in an order of its own."""
        source, values = made.given[0], made.values
        rows = [i for i, n in enumerate(source.shape) if n in self._of(source)]
        if "indices" in values:  # None for dims that stay
            by = [x for i, x in enumerate(values["indices"]) if i in rows and x is not None]
            by = [x for x in by if id(x) not in self._counted]
        else:
            dims = values.get("dim", values.get("dims", [] if "shifts" in values else -1))
            dims = [dims] if isinstance(dims, int) else dims or range(source.ndim)  # roll of all as one
            by = [x for x in (values.get("index"),) if isinstance(x, torch.Tensor)] or [source]
            by = by if any(i % max(source.ndim, 1) in rows for i in dims) else []
        if not by:
            return self._followed(made)
        self._refuse([x for x in by if x is not source], MOVED)
        token = (*map(id, by), str(values.get("shifts")))
        return {size: RowOrder(b"", token=token) for size in self._sizes(made.tensor)}

    def _looked_up(self, made: MadeOf) -> RowOrders:
        weight, indices = made.given[0], made.values["indices"]
        return (
            self._moved(made._replace(values={"index": indices, "dim": 0}))
            if self._of(weight)
            else self._followed(made)
        )


_KINDS: dict[str, Callable[[RowPlaces, MadeOf], RowOrders]] = {
    **dict.fromkeys(["slice", "select", "split", "split_with_sizes", "unsafe_split", "unbind"], RowPlaces._sliced),
    **dict.fromkeys(["unsafe_split_with_sizes"], RowPlaces._sliced),
    **dict.fromkeys(["cat", "stack"], RowPlaces._joined),
    **dict.fromkeys(["view", "_unsafe_view", "_reshape_alias"], RowPlaces._viewed),
    **dict.fromkeys(["as_strided", "as_strided_", "resize_", "unfold"], RowPlaces._strided),
    **dict.fromkeys(
        ["index", "_unsafe_index", "index_put", "index_put_", "index_select", "gather", "take"], RowPlaces._moved
    ),
    **dict.fromkeys(
        ["flip", "roll", "sort", "topk", "scatter", "scatter_", "index_copy", "index_copy_"], RowPlaces._moved
    ),
    "repeat": RowPlaces._repeated,
    "embedding": RowPlaces._looked_up,
}

leave_alone(globals())
