"""Which draws a function makes, and where each has its rows: seen by running it twice, with different rows."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fdp._placement.slot import Slot
from fdp._rows.drawing import AT_ONCE, DEPENDS, ONE_BY_ONE, Draw, Kind
from fdp._rows.numbered import Called, Numbered, each_of, names, where_called
from fdp._rows.row_order import RowOrder
from fdp._trees import torch_private

_PRIMES = 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157


def two_numbers(sizes: Iterable[int]) -> tuple[int, int]:
    """How many rows a function is run with: primes, of which no size of its arguments is a multiple."""
    sizes = set(sizes) - {0}
    one, other, *_ = (*(p for p in _PRIMES if all(size % p for size in sizes)), *_PRIMES)
    return one, other


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

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.items: dict[int, int] = {}
        """The rows of tensors that are, each, of one."""
        self.each: dict[int, Noted] = {}
        self.problems: dict[int, str] = {}
        """Why a place in a draw does not say which row it is for."""

    def mode(self, seed: int, slot: Slot) -> "Noting":
        """What notes them in a shard."""
        return Noting(self, seed, slot)


class Noting(Numbered):
    """Notes the draws of a shard of tensors without data."""

    def __init__(self, notes: Notes, seed: int, slot: Slot) -> None:
        super().__init__(seed, slot)
        self._notes = notes
        self._order = RowOrder(notes.rows, notes.items, notes.problems)

    def draw(self, number: int, call: Called) -> Any:
        result = torch.empty_like(call.arguments[0].value) if call.name in _LIKE_THE_FIRST else call()
        if any(x.device.type not in ("meta", self.slot.device.type) for x in each_of(result)):
            raise RuntimeError(
                f"randomness='rows': {call.func}{where_called()} draws on {each_of(result)[0].device}, and the slot is "
                f"on {self.slot.device}. Draw where the inputs are: torch.rand_like(x), or device=x.device"
            )
        at_once = call.name in AT_ONCE or call.name in ONE_BY_ONE
        is_new = number not in self._notes.each
        count, shapes = len(each_of(result)), call.shapes(result)
        self._notes.each.setdefault(number, Noted(str(call.func), shapes, count, call.others, where_called(), at_once))
        if torch_private.current_graph_task_id() == -1:
            self._order.drawn(number, call, each_of(result))
        elif is_new:  # and not of a checkpoint
            self._order.drawn_in_backward(number)
        return result

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "aten" and func._can_decompose():  # in inference mode nobody has done so before
            with self:
                return func.decompose(*args, **kwargs)
        name = func.__name__.split(".")[0]
        result = torch.empty_like(args[0]) if name in _LIKE_THE_FIRST else func(*args, **kwargs)
        if torch_private.current_graph_task_id() == -1:
            self._order.made(func, args, kwargs, each_of(result))
        else:  # goes the same ways back
            self._order.made_in_backward(each_of(result))
        return result

    def number(self, name: str) -> int:
        number = self._numbers.get(torch.default_generator.initial_seed())
        return super().number(name) if number is None else number

    def _read(self) -> list[bytes]:
        return []  # nothing is drawn here


# Of tensors without data, what torch knows no shapes of: it is that of the first argument.
_LIKE_THE_FIRST = names("binomial _sample_dirichlet _dirichlet_grad _standard_gamma_grad")


def joined(first: Notes, second: Notes, where: str) -> tuple[Draw, ...]:
    """The draws of both runs as those of any number of rows, or an error where they are not to be had."""
    for number in range(max(len(first.each), len(second.each))):
        one, other = first.each.get(number), second.each.get(number)
        if one is None or other is None or one.name != other.name:
            has, has_not = (first, second) if one else (second, first)
            raise RuntimeError(
                f"{where}: randomness='rows': {one or other} is drawn with {has.rows} rows, and not with "
                f"{has_not.rows}. {DEPENDS}. Draw once for all rows"
            )
    problems = first.problems | second.problems
    rows = first.rows, second.rows
    return tuple(_draw(first.each[i], second.each[i], problems.get(i), rows, where) for i in range(len(first.each)))


def _draw(one: Noted, other: Noted, order: str | None, rows: tuple[int, int], where: str) -> Draw:
    problem = None
    kinds = [_kind(a, b, rows) for a, b in zip(one.shapes, other.shapes, strict=True)]
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


def _kind(one: tuple[int, ...], other: tuple[int, ...], rows: tuple[int, int]) -> Any:
    """The shape for any number of rows, or why there is none."""
    if len(one) != len(other):
        return "has another number of dims with other rows"
    grown = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not grown:
        return Kind(one, None)
    if len(grown) > 1:
        return f"has rows in {len(grown)} dims"
    at = grown[0]
    if one[at] % rows[0] or other[at] % rows[1] or one[at] // rows[0] != other[at] // rows[1]:
        return f"has {one[at]} elements in dim {at} for {rows[0]} rows, and {other[at]} for {rows[1]}"
    return Kind((*one[:at], one[at] // rows[0], *one[at + 1 :]), at)
