"""Which draws a function makes, and where each has its rows: seen by running it twice, with different rows."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fdp._execution.draws import Called, Numbered, each_of, where_called
from fdp._execution.row_draws import AT_ONCE, DEPENDS, ONE_BY_ONE, Draw, Kind
from fdp._placement.slot import Slot
from fdp._trees import torch_private
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
        self.problems: dict[int, str] = {}
        """Why a place in a draw does not say which row it is for."""

    def mode(self, seed: int, slot: Slot) -> "Noting":
        """What notes them in a shard."""
        return Noting(self, seed, slot)


_INSIDE = (
    "is for a dim which is made of others and rows, in that order: (time, rows) as one. Put the rows first, or draw "
    "before the two become one"
)
_MOVED = (
    "is for rows that have changed places, as by x[order], sort or flip, and which row it is for depends on the "
    "others. Draw before that"
)


class Noting(Numbered):
    """Notes the draws of a shard of tensors without data."""

    def __init__(self, notes: Notes, seed: int, slot: Slot) -> None:
        super().__init__(seed, slot)
        self._notes, self._rows = notes, len(slot.rows or ())
        # Of tensors that have rows, by id: what is wrong with the order of these, and which draws are in them.
        # They have no data, and are kept until the run ends.
        self._problems: dict[int, tuple[torch.Tensor, str]] = {}
        self._draws: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}

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
        given = tensors_in([argument.value for argument in call.arguments])
        for made in each_of(result):
            self._draws[id(made)] = made, frozenset([number])
            self._follow([*given, made], made)
        return result

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__.split(".")[0]
        result = torch.empty_like(args[0]) if name in _LIKE_THE_FIRST else func(*args, **kwargs)
        if torch_private.current_graph_task_id() != -1:  # a backward goes the same ways back
            return result
        given = tensors_in((args, kwargs))
        for made in each_of(result):
            if isinstance(made, torch.Tensor):
                if name in _VIEWS:
                    self._turn(given[0], made)
                elif name in _MOVES and self._moves_rows(func, args, kwargs):
                    self._problems[id(made)] = made, _MOVED  # with the draws in it
                else:
                    self._follow(given, made)
        return result

    def number(self, name: str) -> int:
        number = self._numbers.get(torch.default_generator.initial_seed())
        return super().number(name) if number is None else number

    def _read(self) -> list[bytes]:
        return []  # nothing is drawn here

    def _dims(self, tensor: torch.Tensor) -> list[int]:
        """Those that hold rows."""
        return [i for i, n in enumerate(tensor.shape) if self._rows and n and n % self._rows == 0]

    def _follow(self, given: Sequence[torch.Tensor], made: torch.Tensor) -> None:
        """What is made of tensors has their rows. A draw that is put beside rows in another order is not theirs."""
        sizes = {made.shape[i] for i in self._dims(made)}
        alike = [x for x in given if sizes.intersection(x.shape)] if sizes else []
        wrong = [x for x in alike if id(x) in self._problems]
        draws = frozenset[int]().union(*(self._draws[id(x)][1] for x in alike if id(x) in self._draws))
        if wrong:
            problem = self._problems[id(wrong[0])][1]
            self._problems[id(made)] = made, problem
            self._notes.problems.update(dict.fromkeys(draws, problem))
        elif draws:
            self._draws[id(made)] = made, draws

    def _turn(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """A view in another shape: whether the rows are still outside in the dim where they are."""
        before, after = self._dims(given), self._dims(made)
        if len(before) != 1 or len(after) != 1:
            return
        if math.prod(given.shape[: before[0]]) == math.prod(made.shape[: after[0]]):
            self._follow([given], made)
        elif made.shape[after[0]] > self._rows:
            self._problems[id(made)] = made, _INSIDE
        elif self._problems.get(id(given), (given, ""))[1] != _INSIDE:  # it was drawn as if rows were outside
            self._notes.problems.update(dict.fromkeys(self._draws.get(id(given), (given, ()))[1], _INSIDE))

    def _moves_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation works along a dim with rows: by `dim`, by several, or by indices for it."""
        values = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        source = args[0]
        if "indices" in values:
            return any(i in self._dims(source) for i, index in enumerate(values["indices"]) if index is not None)
        dims = values.get("dim", values.get("dims", -1))
        return any(
            i % max(source.ndim, 1) in self._dims(source) for i in (dims if isinstance(dims, list | tuple) else [dims])
        )


# Of tensors without data, what torch knows no shapes of: it is that of the first argument.
_LIKE_THE_FIRST = frozenset(["binomial", "_sample_dirichlet", "_dirichlet_grad", "_standard_gamma_grad"])
_VIEWS = frozenset(["view", "_unsafe_view", "reshape", "_reshape_alias"])
_MOVES = frozenset(["index", "index_select", "gather", "flip", "roll", "sort", "topk"])


def joined(first: Notes, second: Notes, where: str) -> tuple[Draw, ...]:
    """The draws of both runs as those of any number of rows, or an error where they are not to be had."""
    for number in range(max(len(first.each), len(second.each))):
        one, other = first.each.get(number), second.each.get(number)
        if one is None or other is None or one.name != other.name:
            raise RuntimeError(
                f"{where}: randomness='rows': {one or other} is drawn with {ROWS[0] if one else ROWS[1]} rows, and not "
                f"with {ROWS[1] if one else ROWS[0]}. {DEPENDS}. Draw once for all rows"
            )
    return tuple(_draw(first.each[i], second.each[i], first.problems.get(i), where) for i in range(len(first.each)))


def _draw(one: Noted, other: Noted, order: str | None, where: str) -> Draw:
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
    elif any(kind.dim is not None for kind in results):
        problem = order
    if problem is not None:
        raise RuntimeError(f"{where}: randomness='rows': {one} {problem}")
    return Draw(one.name, tuple(kinds), one.results, one.others, one.where)


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
