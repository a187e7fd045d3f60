"""What the tests share: one table of hard trees, and what it means for two trees to be the same."""

import contextlib
import contextvars
import dataclasses
import enum
import random
import sys
import threading
import traceback
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE
from torch import Tensor
from torch.utils import _pytree as torch_pytree

COUNTS = (1, 2, 3, 4, 7)
"""Numbers of slots."""

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different numbers, the same at every call."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(torch.sin(1 + count), torch.cos(2 + count)).to(dtype).reshape(shape)
    values = torch.sin(1 + count) if dtype.is_floating_point else (7 * count + 3) % (2 if dtype is torch.bool else 100)
    return values.to(dtype).reshape(shape)


def anew(fn: Any) -> Any:
    """The same function, of which nothing is known."""
    code = fn.__code__.replace(co_firstlineno=random.randrange(1, 10**6))
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


# ---- threads


@contextlib.contextmanager
def many_cores(count: int = 4) -> Iterator[None]:
    """As many shards at once as on a machine with that many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fdp._execution.threads.cores", lambda: count)
        patch.setattr("fdp._collectives.lockstep.cores", lambda: count)
        patch.setattr("fdp._collectives.run.may_compile", lambda: False)
        patch.setattr("fdp._execution.threads.may_compile", lambda: False)  # else the first shards may run alone
        yield


@contextlib.contextmanager
def side_by_side(count: int = 4) -> Iterator[None]:
    """`many_cores`, whose threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with many_cores(count):
            yield
    finally:
        sys.setswitchinterval(before)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises; fail if it does neither in time, and show where all threads stand."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        pytest.fail("it hangs:\n" + "\n\n".join(stacks))
    result, error = found.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error
    return result


# ---- containers


class Point(NamedTuple):
    x: Any
    y: Any


Pixel = namedtuple("Pixel", "u v")


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None
    tag: Any = "train"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass
class Late:
    """A field that the constructor does not take."""

    x: Any
    late: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """An ordered dict of its fields that are not None, as Hugging Face's outputs are."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Two:
    """Two parts, in a class that no pytree library knows by itself."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class KnownToOptree(Two): ...


class KnownToFdp(Two): ...


class KnownToTorch(Two): ...


def _parts(two: Two) -> tuple[list[Any], None]:
    return [two.left, two.right], None


def _named_parts(two: Two) -> Any:
    return [(torch_pytree.GetAttrKey("left"), two.left), (torch_pytree.GetAttrKey("right"), two.right)], None


_register: Any = optree.register_pytree_node

_register(KnownToOptree, _parts, lambda _, parts: KnownToOptree(*parts), namespace=EVERYWHERE)
_register(KnownToFdp, _parts, lambda _, parts: KnownToFdp(*parts), namespace="fdp")
torch_pytree.register_pytree_node(
    KnownToTorch, _parts, lambda parts, _: KnownToTorch(*parts), flatten_with_keys_fn=_named_parts
)


class Colour(enum.Enum):
    RED = 1


# ---- the table


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
    "dataclass-frozen": Hard(lambda rows: Frozen(x=numbers(rows), y=Batch(numbers(rows, 2)))),
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


# ---- comparing


def children_of(node: Any) -> list[Any] | None:
    """The parts of a container, None for a leaf; asks neither optree nor fdp."""
    if node is None:
        return []
    if isinstance(node, Two):
        return [node.left, node.right]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple | deque) and type(node) is not torch.Size else None


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors, depth first."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for child in children_of(tree) or [] for tensor in tensors_of(child)]


def with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with other tensors, depth first."""
    if isinstance(tree, Tensor):
        return next(tensors)
    children = [with_tensors(child, tensors) for child in children_of(tree) or []]
    if not children:
        return tree
    if isinstance(tree, dict) and not dataclasses.is_dataclass(tree):
        return type(tree)(zip(tree, children, strict=True))
    return type(tree)(children) if type(tree) in (list, tuple, deque) else type(tree)(*children)


def assert_same_tree(got: Any, want: Any) -> None:
    """Structure, types of containers, order of dicts, dtypes, values bit by bit, and leaves that are no tensors."""
    _compare(got, want, _assert_same_bits, "tree")


def assert_close_tree(got: Any, want: Any, rtol: float = 1e-10) -> None:
    """As `assert_same_tree`, but values up to rounding."""

    def close(a: Tensor, b: Tensor, path: str) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda message: f"{path}: {message}")

    _compare(got, want, close, "tree")


def _compare(got: Any, want: Any, compare: Callable[[Tensor, Tensor, str], None], path: str) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{path}: {type(got)} is no tensor"
        assert (got.dtype, got.shape, got.device, got.layout) == (want.dtype, want.shape, want.device, want.layout), (
            path
        )
        compare(got.detach(), want.detach(), path)
        return
    assert type(got) is type(want), f"{path}: {type(got)} != {type(want)}"
    parts, others = children_of(want), children_of(got)
    if parts is None or others is None:
        assert got is want or got == want or (got != got and want != want), f"{path}: {got!r} != {want!r}"
        return
    assert len(others) == len(parts), path
    if isinstance(want, dict):
        assert list(got) == list(want), f"{path}: keys {list(got)} != {list(want)}"
    if isinstance(want, defaultdict):
        assert got.default_factory is want.default_factory, path
    if isinstance(want, deque):
        assert got.maxlen == want.maxlen, path
    for i, (other, part) in enumerate(zip(others, parts, strict=True)):
        _compare(other, part, compare, f"{path}[{i}]")


def _assert_same_bits(got: Tensor, want: Tensor, path: str) -> None:
    a, b = (t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(a, b), f"{path}: {got} != {want}"


@contextlib.contextmanager
def unharmed(*trees: Any) -> Iterator[None]:
    """Whatever happens inside, nobody writes to the tensors of these trees."""
    tensors = [tensor for tree in trees for tensor in tensors_of(tree)]
    before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
    yield
    for tensor, values, version in before:
        _assert_same_bits(tensor.detach(), values, "unharmed")
        assert tensor._version == version
