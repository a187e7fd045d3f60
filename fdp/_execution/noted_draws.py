"""Which draws a function makes, and where each has its rows: seen by running it twice, with different rows."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._execution.draws import Called, Numbered, each_of, where_called
from fdp._execution.row_draws import AT_ONCE, DEPENDS, ONE_BY_ONE, Draw, Kind
from fdp._placement.slot import Slot
from fdp._trees.tree import tensors_in
from fdp._trees.untraced import leave_alone

ROWS = 101, 103
"""How many rows a function is run with: primes, which few other sizes are multiples of."""


class Noted(NamedTuple):
    """A draw of one run."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    results: int
    others: tuple[Any, ...]
    where: str
    at_once: bool

    def __str__(self) -> str:
        return f"{self.name} of shape {list(self.shapes[-1])}{self.where}"


class Notes:
    """The draws of one run, by their numbers."""

    def __init__(self) -> None:
        self.each: dict[int, Noted] = {}
        self.inner: set[int] = set()
        """Draws in which the rows are not the outer part of a dim: what they are for has `(time, rows)` as one dim."""

    def mode(self, seed: int, slot: Slot) -> "Noting":
        """What notes them in a shard."""
        return Noting(self, seed, slot)


class Noting(Numbered):
    """Notes the draws of a shard of tensors without data."""

    def __init__(self, notes: Notes, seed: int, slot: Slot) -> None:
        super().__init__(seed, slot)
        self._notes, self._rows = notes, len(slot.rows or ())
        # Of tensors in which rows and something else are one dim, by id: those in which rows are not outside, and which
        # draws others are made of. They have no data, and are kept until the run ends.
        self._inner: dict[int, torch.Tensor] = {}
        self._made: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}

    def draw(self, number: int, call: Called) -> Any:
        result = torch.empty_like(call.arguments[0].value) if call.name in _LIKE_THE_FIRST else call()
        if any(x.device.type not in ("meta", self.slot.device.type) for x in each_of(result)):
            raise RuntimeError(
                f"randomness='rows': {call.func}{where_called()} draws on {each_of(result)[0].device}, and the slot is "
                f"on {self.slot.device}. Draw where the inputs are: torch.rand_like(x), or device=x.device"
            )
        at_once = call.name in AT_ONCE or call.name in ONE_BY_ONE
        count, shapes = len(each_of(result)), call.shapes(result)
        self._notes.each.setdefault(number, Noted(str(call.func), shapes, count, call.others, where_called(), at_once))
        self._follow(call, tensors_in([argument.value for argument in call.arguments]), each_of(result), number)
        return result

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__.split(".")[0]
        result = torch.empty_like(args[0]) if name in _LIKE_THE_FIRST else func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        made = [x for x in each_of(result) if isinstance(x, torch.Tensor)]
        if name in _VIEWS and len(given) == len(made) == 1:
            self._turn(given[0], made[0])
        else:
            self._follow(func, given, made, None)
        return result

    def number(self, name: str) -> int:
        number = self._numbers.get(torch.default_generator.initial_seed())
        return super().number(name) if number is None else number

    def _read(self) -> list[bytes]:
        return []  # nothing is drawn here

    def _shared(self, tensor: torch.Tensor) -> set[int]:
        """Sizes of dims that rows have together with something else."""
        return {n for n in tensor.shape if self._rows and n % self._rows == 0 and n > self._rows}

    def _turn(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """A view in another shape: whether the rows are still outside in the dim where they are."""
        places = [self._place(x) for x in (given, made)]
        if None in places or not self._shared(made):
            return
        if places[0] != places[1] or id(given) in self._inner:
            self._inner[id(made)] = made
        if id(given) in self._made:
            self._made[id(made)] = made, self._made[id(given)][1]

    def _place(self, tensor: torch.Tensor) -> int | None:
        """How many times the rows repeat: the product of the sizes before their dim."""
        dims = [i for i, n in enumerate(tensor.shape) if self._rows and n % self._rows == 0 and n > 0]
        return math.prod(tensor.shape[: dims[0]]) if len(dims) == 1 else None

    def _follow(
        self, func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], number: int | None
    ) -> None:
        """What is made of tensors is as they are."""
        for x in made:
            sizes = self._shared(x)
            if not sizes:
                continue
            alike = [y for y in given if sizes & self._shared(y)]
            draws = frozenset(() if number is None else (number,)).union(*map(self._draws_of, alike))
            if any(id(y) in self._inner for y in alike):
                self._inner[id(x)] = x
                self._notes.inner |= draws
            elif draws:
                self._made[id(x)] = x, draws

    def _draws_of(self, tensor: torch.Tensor) -> frozenset[int]:
        return self._made[id(tensor)][1] if id(tensor) in self._made else frozenset()


# Of tensors without data, what torch knows no shapes of: it is that of the first argument.
_LIKE_THE_FIRST = frozenset(["binomial", "_sample_dirichlet", "_dirichlet_grad", "_standard_gamma_grad"])
_VIEWS = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias"])


def joined(first: Notes, second: Notes, where: str) -> tuple[Draw, ...]:
    """The draws of both runs as those of any number of rows, or an error where they are not to be had."""
    for number in range(max(len(first.each), len(second.each))):
        one, other = first.each.get(number), second.each.get(number)
        if one is None or other is None or one.name != other.name:
            raise RuntimeError(
                f"{where}: randomness='rows': {one or other} is drawn with {ROWS[0] if one else ROWS[1]} rows, and not "
                f"with {ROWS[1] if one else ROWS[0]}. {DEPENDS}. Draw once for all rows"
            )
    return tuple(_draw(first.each[i], second.each[i], i in first.inner, where) for i in range(len(first.each)))


def _draw(one: Noted, other: Noted, is_inner: bool, where: str) -> Draw:
    problem = None
    kinds = [_kind(a, b) for a, b in zip(one.shapes, other.shapes, strict=True)]
    results = kinds[-one.results :]
    if any(isinstance(kind, str) for kind in kinds):
        problem = next(kind for kind in kinds if isinstance(kind, str))
    elif one.others != other.others:
        problem = "is called with something that depends on how many rows there are, or has an order of the rows"
    elif any(kind.dim is not None for kind in kinds) and any(kind.dim is None for kind in results):
        problem = "draws over the rows, and they are on several slots"
    elif any(kind.dim is not None for kind in results) and not one.at_once:
        problem = (
            "is a kernel whose numbers fdp cannot share out to rows. If it is attention with dropout, use "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    elif is_inner:
        problem = (
            "is for a dim which is made of others and rows, in that order: (time, rows) as one. Put the rows first, "
            "or draw before the two become one"
        )
    if problem is not None:
        raise RuntimeError(f"{where}: randomness='rows': {one} {problem}")
    return Draw(one.name, tuple(kinds), one.others, one.where)


def _kind(one: tuple[int, ...], other: tuple[int, ...]) -> Any:
    """The shape for any number of rows, or why there is none."""
    if len(one) != len(other):
        return "has another number of dims with other rows"
    grown = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not grown:
        return Kind(one, None)
    if len(grown) > 1:
        return f"has rows in {len(grown)} dims"
    at = grown[0]
    if one[at] % ROWS[0] or other[at] % ROWS[1] or one[at] // ROWS[0] != other[at] // ROWS[1]:
        return f"has {one[at]} elements in dim {at} for {ROWS[0]} rows, and {other[at]} for {ROWS[1]}"
    return Kind((*one[:at], one[at] // ROWS[0], *one[at + 1 :]), at)


leave_alone(globals())
