"""One table of hard trees: of every kind of container, leaf, dtype and layout, and of every way to give dims."""

import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.common.containers import Batch, Keywords, KnownToFdp, KnownToOptree, KnownToTorch, Late, Output, Pixel, Point
from tests.common.numbers import DTYPES, numbers


class Colour(enum.Enum):
    RED = 1


class Hard(NamedTuple):
    """A tree with a given number of rows, and the dims that they are along."""

    make: Callable[[int], Any]
    dims: Any = 0


def _last(_: Tensor) -> int:
    return -1


def _floats_only(tensor: Tensor) -> int | None:
    return 0 if tensor.is_floating_point() else None


def _late(x: Any, late: Any) -> Late:
    obj = Late(x)
    obj.late = late
    return obj


def _tied(rows: int) -> Any:
    x = numbers(rows, 2)
    return {"b": x, "a": [x, x[:]]}


OPAQUE = object()

TREES: dict[str, Hard] = {
    "tensor": Hard(lambda rows: numbers(rows, 3)),
    "tuple": Hard(lambda rows: (numbers(rows), numbers(rows, 2))),
    "list": Hard(lambda rows: [numbers(rows), [numbers(rows, 2)]]),
    "dict": Hard(lambda rows: {"b": numbers(rows), "a": {"d": numbers(rows, 1), "c": numbers(rows)}}),
    "dict-mixed-keys": Hard(lambda rows: {"b": numbers(rows), 3: numbers(rows, 2), ("t", 1): None, None: "s"}),
    "ordered-dict": Hard(lambda rows: OrderedDict(b=numbers(rows), a=numbers(rows, 2))),
    "defaultdict": Hard(lambda rows: defaultdict(list, {"b": numbers(rows), "a": [numbers(rows)]})),
    "deque": Hard(lambda rows: deque([numbers(rows), 1, numbers(rows, 2)], maxlen=5)),
    "namedtuple": Hard(lambda rows: Point(numbers(rows), Pixel(numbers(rows, 2), "v"))),
    "structseq": Hard(lambda rows: torch.return_types.max((numbers(rows, 2), numbers(rows, 2, dtype=torch.int64)))),
    "dataclass": Hard(lambda rows: Batch(numbers(rows), [numbers(rows)])),
    "dataclass-frozen": Hard(lambda rows: Keywords(x=numbers(rows), y=Batch(numbers(rows, 2)))),
    "dataclass-late": Hard(lambda rows: _late(numbers(rows), numbers(rows, 2))),
    "dataclass-dict": Hard(lambda rows: Output(logits=numbers(rows), hidden=(numbers(rows, 2), numbers(rows)))),
    "known-to-optree": Hard(lambda rows: KnownToOptree(numbers(rows), {"a": numbers(rows)})),
    "known-to-fdp": Hard(lambda rows: KnownToFdp(numbers(rows), {"a": numbers(rows)})),
    "known-to-torch": Hard(lambda rows: KnownToTorch(numbers(rows), KnownToTorch(numbers(rows, 2), 1))),
    "empty-containers": Hard(lambda rows: {"x": numbers(rows), "e": [(), [], {}, None, deque(), OrderedDict()]}),
    "other-leaves": Hard(
        lambda rows: [numbers(rows), "s", b"b", 3, True, 2.5, 1j, float("nan"), Colour.RED, len, range(3), {1}, OPAQUE]
    ),
    "torch-leaves": Hard(lambda rows: (numbers(rows), torch.float16, torch.device("cpu"), torch.Size([2]), Tensor)),
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
    "functions": Hard(lambda rows: {"a": numbers(2, rows), "b": [numbers(1, 1, rows), 1]}, _last),
    "function-whole": Hard(lambda rows: (numbers(rows), numbers(5, dtype=torch.int64)), _floats_only),
    "items": Hard(
        lambda rows: {"images": [numbers(i, 2) for i in range(rows)], "names": tuple(map(str, range(rows)))},
        {"images": "items", "names": "items"},
    ),
}
