"""Random numbers that belong to rows: each draw is made for the whole batch, and a shard keeps those of its rows."""

import os
import sys
from typing import Any, NamedTuple, TypeVar

import torch

from fdp._placement.slot import Slot
from fdp._rows.numbered import Called, Numbered, each_of, names, where_called
from fdp._trees.tree import flatten_any

T = TypeVar("T")


class Kind(NamedTuple):
    """The shape of a tensor, in which the dim that holds rows, if there is one, says how many elements each has."""

    shape: tuple[int, ...]
    dim: int | None

    def __str__(self) -> str:
        rows = "" if self.dim is None else "rows" if self.shape[self.dim] == 1 else f"{self.shape[self.dim]} * rows"
        return f"[{', '.join(rows if i == self.dim else str(size) for i, size in enumerate(self.shape))}]"

    def of(self, rows: int) -> tuple[int, ...]:
        """The shape with so many rows."""
        return tuple(size * rows if i == self.dim else size for i, size in enumerate(self.shape))

    def rows_of(self, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """A part of a tensor; itself if it has no rows."""
        if self.dim is None:
            return tensor
        each = self.shape[self.dim]
        return tensor.narrow(self.dim, first * each, count * each)


class Draw(NamedTuple):
    """One draw of a function: its operation, its tensors, results after arguments, and what else it is called with."""

    name: str
    kinds: tuple[Kind, ...]
    results: int
    others: tuple[Any, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.name} of shape {self.kinds[-1]}{self.where}"


class Draws(NamedTuple):
    """All draws of a function, in order, and the rows of the whole batch."""

    each: tuple[Draw, ...]
    rows: int

    def mode(self, seed: int, slot: Slot) -> "Numbered":
        """What makes them in a shard."""
        return RowDraws(self, seed, slot)


class DrawsDiffer(RuntimeError):
    """A function draws something else than it did when its draws were noted."""


class RowDraws(Numbered):
    """Makes the draws of a shard: those of its rows."""

    def __init__(self, draws: Draws, seed: int, slot: Slot) -> None:
        super().__init__(seed, slot)
        rows = range(0) if slot.rows is None else slot.rows
        self._draws, self._first, self._count = draws, rows.start, len(rows)
        self._most = 0  # draws so far, of which some may have been made once more
        self._repeats: Draw | None = None  # the first draw that activation checkpointing may want once more

    def draw(self, number: int, call: "Called") -> Any:
        if number == len(self._draws.each):
            raise DrawsDiffer(f"randomness='rows': {call.func}{where_called()} is not always drawn. {DEPENDS}")
        draw, self._most = self._draws.each[number], max(self._most, number + 1)
        if torch.is_grad_enabled() and self._repeats is None and _is_checkpointed():
            self._repeats = draw
        given = tuple(kind.of(self._count) for kind in draw.kinds)
        if not self._is(call, draw):
            raise self._differs(call, draw, (*call.shapes(), call.size(given[-1])))
        has_rows = any(kind.dim is not None for kind in draw.kinds)
        if has_rows and call.name in ONE_BY_ONE:
            result = self._row_by_row(number, call, draw)
        elif not has_rows or (self._count == self._draws.rows and call.is_dense()):
            result = call()
        else:
            result = self._of_whole(call, draw)
        if call.shapes(result) != given:
            raise self._differs(call, draw, call.shapes(result))
        return result

    def _is(self, call: Called, draw: Draw) -> bool:
        given = tuple(kind.of(self._count) for kind in draw.kinds)
        found = str(call.func), call.shapes(), call.others, call.size(given[-1])
        return found == (draw.name, given[: -draw.results], draw.others, given[-1])

    def which(self, number: int, call: Called) -> int:
        """Where there are no rows, torch may leave out draws for them."""
        if self._count:
            return number
        for i, draw in enumerate(self._draws.each[number:], number):
            if self._is(call, draw):
                self.go_to(i)
                return i
            if all(kind.dim is None for kind in draw.kinds):
                break
        return number

    def _differs(self, call: Called, draw: Draw, shapes: tuple[tuple[int, ...], ...]) -> DrawsDiffer:
        found = f"{call.func} of shape {list(shapes[-1])}" if shapes else str(call.func)
        others = f" with {_text(call.others)} in place of {_text(draw.others)}"
        return DrawsDiffer(
            f"randomness='rows': {found}{others * (draw.others != call.others)}{where_called()} was to be {draw}, and "
            f"there are {self._count} rows here. {DEPENDS}"
        )

    def ended(self, result: T) -> T:
        self.number("the end of the shard")
        draws = self._draws.each
        if self._most < len(draws) and self._count:  # where there are no rows, torch may draw nothing
            raise DrawsDiffer(f"randomness='rows': {draws[self._most]} is not always drawn. {DEPENDS}")
        leaves = [] if self._repeats is None else flatten_any(result, "out").leaves
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise RuntimeError(
                f"randomness='rows': {self._repeats} is inside torch.utils.checkpoint, and a backward after this call "
                "would draw other numbers. Differentiate within the call, as fdp.value_and_grad does"
            )
        return result

    def _of_whole(self, call: "Called", draw: Draw) -> Any:
        """Draw for all rows, and keep those of this shard."""
        kinds, grown = iter(draw.kinds), []
        for argument in call.arguments:
            value, kind = argument.value, next(kinds) if isinstance(argument.value, torch.Tensor) else None
            if kind is not None and kind.dim is not None:
                make = torch.empty if argument.is_written else torch.ones
                whole = make(kind.of(self._draws.rows), dtype=value.dtype, device=value.device)
                if not argument.is_written:  # a parameter of the distribution, which is this shard's
                    kind.rows_of(whole, self._first, self._count).copy_(value)
                value = whole
            elif argument.name == "size":
                value = draw.kinds[-1].of(self._draws.rows)
            grown.append(value)
        found = call(grown)
        kept = [
            kind.rows_of(x, self._first, self._count)
            for x, kind in zip(each_of(found), draw.kinds[-len(each_of(found)) :], strict=True)
        ]
        return call.returned(found, grown, kept)

    def _row_by_row(self, number: int, call: "Called", draw: Draw) -> Any:
        """Draw for each row by itself, where what is drawn for one depends on the values of those before it."""
        parts, first = [], []
        for row in range(self._count):
            kinds, values, written = iter(draw.kinds), [], []
            for argument in call.arguments:
                value = argument.value
                if isinstance(value, torch.Tensor):
                    value = next(kinds).rows_of(value, row, 1)
                    if argument.is_written:  # some kernels take what they write to for contiguous
                        written.append((value, value.clone(memory_format=torch.contiguous_format)))
                        value = written[-1][1]
                values.append(value)
            self.reseed(number, self._first + row)
            parts.append(each_of(call(values)))
            for own, new in written:
                own.copy_(new)
            first = values if row == 0 else first
        if not parts:
            return call()
        kinds = draw.kinds[-len(parts[0]) :]
        kept = [torch.cat(column, kind.dim or 0) for column, kind in zip(zip(*parts, strict=True), kinds, strict=True)]
        return call.returned(parts[0] if len(kept) > 1 else parts[0][0], first, kept)


DEPENDS = "What a function draws must not depend on values, or on how many rows there are"
ONE_BY_ONE = names("poisson binomial _standard_gamma _sample_dirichlet rrelu_with_noise rrelu_with_noise_")
"""How many numbers these take for an element depends on its value: each row has a seed of its own."""

AT_ONCE = names(
    "rand randn randint normal uniform bernoulli exponential log_normal cauchy geometric random rand_like randn_like "
    "randint_like normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_ native_dropout "
    "multinomial normal_functional"
)
"""These take the same for each element, whatever the values."""


def _text(others: tuple[Any, ...]) -> str:
    return ", ".join(str(other) for other in others if other is not None) or "defaults"


def _is_checkpointed() -> bool:
    """Whether a backward would run this once more."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith(_CHECKPOINT):
        frame = frame.f_back
    return frame is not None


_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
