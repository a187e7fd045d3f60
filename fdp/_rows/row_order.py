"""Whether rows are still in their order, while a function runs on tensors without data.

A draw numbers its rows as the batch does. So it is only right where the rows are in that order. What reorders, cuts or
joins rows is not followed: from then on they are `Moved`, and a draw for them is refused. The same holds for what was
drawn, until it has met the rows that it is for.

A dim has rows if its size is a multiple of their number, which is a prime. How often it has all of them, one turn after
the other, is known: once as a rule, T times where a dim of T and the rows have become one, as (time, rows) does.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fdp._rows.moving_operations import OVERWRITES, VIEWS, MadeOf, counts, moves, row_dims
from fdp._rows.numbered import Called, where_called
from fdp._trees.tree import tensors_in

_OUTSIDE = "draw the noise for the whole batch outside of the function, and pass it as an argument that is split"
MOVED = (
    "is for rows that {how} has reordered, cut or joined. That is refused, not followed. Draw before that. Or "
    + _OUTSIDE
)
NOISE_MOVED = (
    "is reordered, cut or joined by {how} before it has met its rows. That is refused, not followed. Draw in the shape "
    "in which it is used. Or " + _OUTSIDE
)
INSIDE = (
    "is for a dim that holds others and rows as one, in that order, as (time, rows) does. Put the rows first. Or "
    + _OUTSIDE
)


class Moved:
    """Rows that may not be in their order any more. It is equal to itself only."""

    def __init__(self, how: str) -> None:
        self.how = how


class Rows(NamedTuple):
    """The rows that a tensor has.

    Attributes:
        turns: By the size of a dim, how often it has all rows, one turn after the other.
        part: Which row of a list of rows it is; or some rows, that are no dim of all.
        noise: The numbers of the draws in it that have not met their rows.
    """

    turns: dict[int, "int | Moved"]
    part: "int | Moved | None" = None
    noise: frozenset[int] = frozenset()


class RowOrder:
    """The rows in each tensor of a run. Tensors have no data, and are kept until it ends."""

    def __init__(self, rows: int, items: dict[int, int], problems: dict[int, str]) -> None:
        self._rows = rows
        self._problems = problems  # of draws, by their numbers
        self._kept: list[torch.Tensor] = []
        self._known = {item: Rows({}, row) for item, row in items.items()}
        self._roots: dict[int, torch.Tensor] = {}  # what a tensor is a view of
        self._views: dict[int, list[torch.Tensor]] = {}  # of a root
        self._places: dict[int, int] = {}  # views that are one place of a dim for all rows
        self._counted: set[int] = set()  # 0, 1, 2, ... for all rows
        self._moved: Moved | None = None  # the first time

    def drawn(self, number: int, call: Called, results: Sequence[torch.Tensor]) -> None:
        """Note a draw."""
        for tensor in results:
            rows = self._met(MadeOf(tensor, call.parameters(), call.func, {}))
            for turns in rows.turns.values():
                if turns != 1:
                    self._refuse([number], MOVED.format(how=turns.how) if isinstance(turns, Moved) else INSIDE)
            if self._sizes(tensor) and (not rows.turns or rows.noise):
                rows = rows._replace(turns=self._in_order(tensor), noise=rows.noise | {number})
            self._keep(tensor, rows, is_written=id(tensor) in self._known)

    def drawn_in_backward(self, number: int) -> None:
        """Note one for gradients, which are not followed."""
        if self._moved is not None:
            self._refuse([number], MOVED.format(how=self._moved.how))

    def made_in_backward(self, results: Iterable[Any]) -> None:
        for tensor in tensors_in(list(results)):
            if self._moved is not None:
                self._keep(tensor, Rows(dict.fromkeys(self._sizes(tensor), self._moved)), is_written=False)

    def made(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Iterable[Any]) -> None:
        """Note what another operation has made, or written to."""
        schema = func._schema.arguments
        values = {a.name: a.default_value for a in schema if a.has_default_value()}
        values |= dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        written = tensors_in([values.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write])
        outs = {id(values.get(a.name)) for a in schema if a.is_out}
        name = func.__name__.split(".")[0]
        given = [x for x in tensors_in((args, kwargs)) if id(x) not in outs]
        if name.startswith("new_") or name.endswith("_like"):
            given = []  # of which only the shape is taken
        elif name in OVERWRITES:
            given = given[1:]
        tensors = {id(x): x for x in (*written, *results) if isinstance(x, torch.Tensor)}
        for tensor in tensors.values():
            made = MadeOf(tensor, given, func, values)
            is_written = any(x is tensor for x in written)
            if func.is_view and given and not is_written:
                self._note_view(made)
            self._keep(tensor, self._after(made) if given else Rows({}), is_written)
            if counts(made, self._rows, self._counted):
                self._counted.add(id(tensor))

    # ---- what is known of tensors

    def _sizes(self, tensor: torch.Tensor) -> set[int]:
        return {n for n in tensor.shape if n and n % self._rows == 0}

    def _in_order(self, tensor: torch.Tensor) -> dict[int, int | Moved]:
        return dict.fromkeys(self._sizes(tensor), 1)

    def _of(self, tensor: torch.Tensor) -> Rows:
        """What nothing here has made is an argument, whose rows are in order."""
        if id(tensor) not in self._known:
            self._kept.append(tensor)
            self._known[id(tensor)] = Rows(self._in_order(tensor))
        return self._known[id(tensor)]

    def _note_view(self, made: MadeOf) -> None:
        view, source = made.tensor, made.given[0]
        root = self._roots[id(view)] = self._roots.get(id(source), source)
        self._views.setdefault(id(root), [root]).append(view)
        if made.name == "select" and source.shape[made.values["dim"]] == self._rows:
            self._places[id(view)] = made.values["index"] % self._rows
        elif id(source) in self._places:
            self._places[id(view)] = self._places[id(source)]

    def _keep(self, tensor: torch.Tensor, rows: Rows, is_written: bool) -> None:
        before = self._of(tensor) if is_written else None
        self._kept.append(tensor)
        self._known[id(tensor)] = rows
        if before is None:
            return
        family = self._views.get(id(self._roots.get(id(tensor), tensor)), [tensor])
        self._counted.difference_update(map(id, family))
        if rows != before and rows != Rows({}):
            for other in family:
                if other is not tensor:
                    self._write(other, tensor, rows)

    def _write(self, other: torch.Tensor, tensor: torch.Tensor, rows: Rows) -> None:
        """Rows have been written to one view, and so to another one."""
        own, place, turns = self._of(other), self._places.get(id(tensor)), {}
        if self._places.get(id(other), place) != place:
            return  # of another row
        for size in self._sizes(other):
            is_in_place = size == self._rows and rows.part is not None and rows.part == place
            new = 1 if is_in_place else rows.turns.get(size)
            is_same = new is not None and own.turns.get(size, new) == new
            turns[size] = new if new is not None and is_same else self._move(f"a write{where_called()}")
        parts = {own.part} if turns else {own.part, rows.part} - {None}
        part = parts.pop() if len(parts) == 1 else self._move(f"a write{where_called()}") if parts else None
        noise = own.noise | rows.noise
        for moved in turns.values():
            if isinstance(moved, Moved):
                self._refuse(noise, NOISE_MOVED.format(how=moved.how))
        self._known[id(other)] = Rows(turns, part, noise)

    def _move(self, how: str) -> Moved:
        moved = Moved(how)
        self._moved = self._moved or moved
        return moved

    def _refuse(self, numbers: Iterable[int], why: str) -> None:
        for number in numbers:
            self._problems.setdefault(number, why)

    # ---- what operations do to rows

    def _after(self, made: MadeOf) -> Rows:
        if made.name in ("cat", "stack") and self._joins_items(made):
            sizes = self._sizes(made.tensor)
            return Rows(dict.fromkeys(sizes, 1))
        has_rows = any(own.turns or own.part is not None for own in map(self._of, made.given))
        if has_rows and moves(made, self._rows, self._counted):
            return self._moved_by(made)
        return self._viewed(made) if made.name in VIEWS else self._met(made)

    def _met(self, made: MadeOf) -> Rows:
        """Rows stay where they are. Beside others they are in no order, and so in a dim of a size that is new."""
        each, turns = [self._of(x) for x in made.given], {}
        for size in self._sizes(made.tensor):
            found = {own.turns[size] for own in each if size in own.turns}
            if len(found) == 1:
                turns[size] = found.pop()
            elif found or any(own.turns or own.part is not None for own in each):
                known = next((x for x in found if isinstance(x, Moved)), None)
                moved = turns[size] = known or self._move(made.how())
                why = INSIDE if found and known is None else MOVED.format(how=moved.how)
                self._refuse([i for own in each if size in own.turns or not found for i in own.noise], why)
        parts = {own.part for own in each} - {None}
        part = parts.pop() if len(parts) == 1 else self._move(made.how()) if parts else None
        settled = {size for own in each if not own.noise for size in own.turns}
        noise = frozenset[int]().union(*(own.noise for own in each if not own.turns.keys() & settled))
        return Rows(turns, part, noise if turns or part is not None else frozenset())

    def _moved_by(self, made: MadeOf) -> Rows:
        moved = self._move(made.how())
        for x in made.given:
            self._refuse(self._of(x).noise, NOISE_MOVED.format(how=moved.how))
        is_cut = row_dims(made.tensor, self._rows) < max(row_dims(x, self._rows) for x in made.given)
        return Rows(dict.fromkeys(self._sizes(made.tensor), moved), moved if is_cut else None)

    def _viewed(self, made: MadeOf) -> Rows:
        """The row of an element is `i // step % rows`, if it is the i-th: so it can be said where rows are then."""
        source, view, own = made.given[0], made.tensor, self._of(made.given[0])
        found: dict[int, set[int]] = {}
        for i, size in enumerate(source.shape):
            turns = own.turns.get(size, 1)
            if isinstance(turns, Moved):
                return own._replace(turns=dict.fromkeys(self._sizes(view), turns))
            if size not in own.turns:
                continue
            step = size // (turns * self._rows) * math.prod(source.shape[i + 1 :])
            for j, new in enumerate(view.shape):
                inner = math.prod(view.shape[j + 1 :])
                if step % inner == 0 and (inner * new) % (step * self._rows) == 0:
                    found.setdefault(new, set()).add(inner * new // (step * self._rows))
                    break
            else:
                return self._moved_by(made)
        if any(len(found.get(size, ())) != 1 for size in self._sizes(view)) and own.turns:
            return self._moved_by(made)
        return own._replace(turns={size: turns.pop() for size, turns in found.items()})

    def _joins_items(self, made: MadeOf) -> bool:
        """Whether it joins a list of rows, all of one shape, in their order."""
        parts = [self._of(x).part for x in made.given]
        return parts == list(range(self._rows)) and len({x.shape for x in made.given}) == 1
