"""One table of hard trees: of every kind of container, leaf, dtype and layout, and of every way to give dims."""

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.common.containers import KINDS, Batch, Pixel, Point
from tests.common.numbers import DTYPES, numbers


class Colour(enum.Enum):
    """A leaf that is no tensor."""

    RED = 1


VALUES = ("text", b"bytes", 3, 2.5, 1j, True, float("nan"), Colour.RED, range(3), {1}, torch.float32, len)
OTHERS = (*VALUES, object())
"""Leaves that are no tensors; the last is equal to nothing else."""


def last(_: Tensor) -> int:
    """A function for in_dims: the last dimension."""
    return -1


def integers_whole(tensor: Tensor) -> int | None:
    """A function for in_dims: integers go whole to every slot."""
    return 0 if tensor.is_floating_point() or tensor.is_complex() else None


class Hard(NamedTuple):
    """A tree with a given number of rows, and the dims that they are along."""

    make: Callable[[int], Any]
    dims: Any = 0


def _of_kind(kind: type) -> Hard:
    """A container of tensors, and of a list of one."""
    arity = max(KINDS[kind].arities)
    return Hard(lambda rows: KINDS[kind].make([[numbers(rows, 1)], numbers(rows), numbers(rows, 2), None][:arity]))


def _tied(rows: int) -> Any:
    x = numbers(rows, 2)
    return {"b": x, "a": [x, x[:]]}


TREES: dict[str, Hard] = {
    "tensor": Hard(lambda rows: numbers(rows, 3)),
    **{kind.__name__: _of_kind(kind) for kind in KINDS},
    "nested": Hard(
        lambda rows: {"b": Point(numbers(rows), Pixel(numbers(rows, 2), "v")), None: [Batch(numbers(rows))]}
    ),
    "empty-containers": Hard(lambda rows: {"x": numbers(rows), "e": [(), [], {}, None, deque()]}),
    "other-leaves": Hard(lambda rows: [numbers(rows), *OTHERS, torch.device("cpu"), torch.Size([2]), Tensor]),
    "0-dim": Hard(lambda rows: {"x": numbers(rows), "s": torch.tensor(2.5), "n": torch.tensor(7)}),
    "dtypes": Hard(lambda rows: {dtype: numbers(rows, 2, dtype=dtype) for dtype in DTYPES}),
    "special-values": Hard(lambda rows: torch.tensor([float("nan"), float("inf"), -0.0]).repeat(rows, 1)),
    "no-columns": Hard(lambda rows: (numbers(rows, 0, 2), numbers(rows, 0))),
    "layouts": Hard(
        lambda rows: (
            *(numbers(2, rows).T, numbers(rows, 4)[:, ::2], numbers(1, 3).expand(rows, 3)),
            *(numbers(rows, 2, dtype=torch.complex64).conj(), numbers(rows, 2, 1, 2).permute(0, 3, 2, 1)),
        )
    ),
    "requires-grad": Hard(lambda rows: [torch.nn.Parameter(numbers(rows)), numbers(rows, 2).requires_grad_() * 2]),
    "tied": Hard(_tied),
    "dim-1": Hard(lambda rows: {"a": numbers(2, rows), "b": numbers(1, rows, 3)}, 1),
    "dim--1": Hard(lambda rows: {"a": numbers(2, rows), "b": numbers(rows)}, -1),
    "prefix": Hard(
        lambda rows: {"a": (numbers(rows), numbers(rows, 2)), "b": numbers(2, rows), "c": None, "d": [numbers(5)]},
        {"a": 0, "b": 1, "c": None, "d": [None]},
    ),
    "prefix-names": Hard(
        lambda rows: Batch(Point(numbers(rows), numbers(2, rows)), numbers(5)), {"x": {"y": 1}, "y": None}
    ),
    "functions": Hard(lambda rows: {"a": numbers(2, rows), "b": [numbers(1, 1, rows), 1]}, last),
    "function-whole": Hard(lambda rows: (numbers(rows), numbers(5, dtype=torch.int64)), integers_whole),
    "items": Hard(
        lambda rows: {"images": [numbers(i, 2) for i in range(rows)], "names": tuple(map(str, range(rows)))},
        {"images": "items", "names": "items"},
    ),
}
