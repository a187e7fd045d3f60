"""How a DataParallel splits its inputs, and which it refuses."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fdp import DataParallel, data_parallel
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Keywords, KnownToOptree, KnownToTorch, Late, Output, Point, tensors_of
from tests.common.numbers import COUNTS, numbers
from tests.nn.modules_of_data_parallel import Apply, mlp, outputs_of, value_and_grads

TWO = ["cpu", "cpu"]


def sizes_seen(rows: int, slots: int, **options: Any) -> list[int]:
    seen: list[int] = []
    module = Apply(lambda x: seen.append(len(x)) or x)
    DataParallel(module, ["cpu"] * slots, executor="sequential", **options)(numbers(rows))
    return seen


def test_zero_rows_reach_every_slot():
    assert sizes_seen(0, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [([1, 1, 1, 1], [3, 2, 2, 2]), ([2, 1, 0, 0], [6, 3]), ([0, 0, 1, 2], [3, 6]), ([0, 1, 0, 0], [9])],
    ids=str,
)
def test_weights(weights: Any, sizes: list[int]):
    assert sizes_seen(9, 4, weights=weights) == sizes
    module, x = mlp(), numbers(9, 3)
    got = value_and_grads(DataParallel(module, ["cpu"] * 4, weights=weights), module, x)
    assert_close_tree(got, value_and_grads(module, module, x))


def test_a_last_row_alone_fails_batch_norm_and_equal_weights_help():
    module, x = nn.BatchNorm1d(3).double(), numbers(7, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        DataParallel(module, ["cpu"] * 3)(x)
    assert "in shard 2 of 3, rows 6:7, on cpu" in caught.value.__notes__
    out = DataParallel(module, ["cpu"] * 3, weights=[1] * 3)(x)
    want = [nn.BatchNorm1d(3).double()(part) for part in x.split([3, 2, 2])]
    assert_close_tree(out.detach(), torch.cat(want).detach())


def row_sums(tree: Any) -> Tensor:
    return torch.stack([tensor.reshape(len(tensor), -1).sum(1) for tensor in tensors_of(tree)]).sum(0)


Pair = namedtuple("Pair", "a b")
INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, (x + 1, x * 2)),
    "list": lambda x: [x, [x + 1], ()],
    "dict": lambda x: {"b": x, "a": {"c": x + 1}, "e": {}},
    "ordered-dict": lambda x: OrderedDict(b=x, a=x + 1),
    "defaultdict": lambda x: defaultdict(list, b=x, a=[x + 1]),
    "deque": lambda x: deque([x, x + 1]),
    "namedtuple": lambda x: Pair(x, Point(x + 1, None)),
    "structseq": lambda x: torch.return_types.max((x, x + 1)),
    "dataclass": lambda x: Batch(x, [x + 1]),
    "dataclass-frozen": lambda x: Keywords(x=x, y=Batch(x + 1)),
    "dataclass-late": lambda x: Late([x]),
    "dataclass-dict": lambda x: Output(logits=x, hidden=(x + 1, x)),
    "known-to-optree": lambda x: KnownToOptree(x, [x + 1]),
    "known-to-torch": lambda x: KnownToTorch(x, x + 1),
    "same-twice": lambda x: [x, x],
    "with-others": lambda x: (x, None, "s", 3, 2.5, True, [x + 1, torch.float64, len]),
}
each_container = pytest.mark.parametrize("container", INPUTS.values(), ids=INPUTS)


@each_container
def test_inputs_of_all_kinds_are_split(container: Any):
    """Torch gives every replica the whole of a dataclass."""
    x = numbers(5, 2).requires_grad_()
    types: list[Any] = []

    def fn(tree: Any, *, named: Any) -> Tensor:
        types.extend((type(tree), type(named)))
        return row_sums(tree) * 2 + row_sums(named)

    with unharmed(x):
        got = outputs_of(lambda tree: fn(tree, named=tree), container(x))
        shim = DataParallel(Apply(fn), ["cpu"] * 3)
        named = shim(container(x), named=container(x))
    want = row_sums(container(x)) * 3
    for out in (got, named):
        assert_close_tree(out, want)
        assert_close_tree(torch.autograd.grad(out, x, numbers(5)), torch.autograd.grad(want, x, numbers(5), True))
    assert set(types) == {type(container(x))}


@each_container
def test_outputs_of_all_kinds_are_joined(container: Any):
    """Torch fails on a dataclass, and makes garbage of a str."""
    x = numbers(5, 2)
    for slots in COUNTS:
        assert_same_tree(outputs_of(container, x, slots=slots), container(x))


@pytest.mark.parametrize(
    "args", [(), (None,), (3, "s"), (torch.tensor(2.0),), ([], {}), ({"a": [None]},)], ids=lambda args: str(args)
)
@pytest.mark.parametrize("slots", [1, 3])
def test_where_nothing_is_split_the_module_runs_once(args: Any, slots: int):
    """Torch runs it on every device, and returns as many outputs."""
    calls: list[Any] = []

    def fn(*args: Any) -> Tensor:
        calls.append(args)
        return numbers(2, 3)

    assert_same_tree(outputs_of(fn, *args, slots=slots), numbers(2, 3))
    assert len(calls) == 1
    assert_same_tree(calls[0], args)


def test_one_row_of_keyword_arguments_and_objects_beside_it():
    """Torch calls surplus replicas without their positional arguments."""
    calls: list[Any] = []

    def fn(x: Tensor, y: Any = None, *, flag: bool = False) -> Tensor:
        calls.append((len(x), flag))
        return x

    x = numbers(1, 2)
    shim = DataParallel(Apply(fn), ["cpu"] * 3)
    assert_same_tree(shim(x, flag=True), x)
    assert_same_tree(shim(x, "other", flag=True), x)
    assert_same_tree(shim(numbers(2, 2), y=3, flag=True), numbers(2, 2))
    assert calls == [(1, True)] * 4


def test_inputs_of_the_function():
    seen: list[Any] = []
    module = Apply(lambda *args, **kwargs: seen.append((args, kwargs)) or numbers(1))
    x = numbers(1)
    for inputs in (x, [x, x], (x, x), (), None, (None,)):
        data_parallel(module, inputs, TWO)
    data_parallel(module, (), TWO, module_kwargs={"y": 3})
    assert [[type(arg) for arg in args] for args, _ in seen] == [
        *([Tensor], [list], [Tensor, Tensor], [], [], [type(None)], [])
    ]
    assert seen[-1] == ((), {"y": 3})


@pytest.mark.parametrize("slots", [2, 3])
def test_rows_that_differ_are_named_before_anything_runs(slots: int):
    """Torch drops the surplus rows silently."""
    calls: list[Any] = []
    shim = DataParallel(Apply(lambda *args, **kwargs: calls.append(args)), ["cpu"] * slots)
    x = numbers(8, 2)
    message = r"rows differ: inputs\[0\]\['a'\] has 8 along dim 0, inputs\[1\] has 1 along dim 0, kwargs\['z'\] has 8"
    with pytest.raises(ValueError, match=f"^DataParallel: {message}") as caught:
        shim({"a": x}, x[:1], z=x)
    assert "in_dims" not in str(caught.value)  # which a DataParallel does not have
    with pytest.raises(ValueError, match=f"^data_parallel: {message}"):
        data_parallel(Apply(print), ({"a": x}, x[:1]), ["cpu"] * slots, module_kwargs={"z": x})
    assert calls == []


class Opaque:
    def __init__(self) -> None:
        self.tensor = numbers(4)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "opaque": (Opaque, r"inputs\[0\]\['k'\]\[1\] is a.* Opaque, which holds tensors.*dataclass"),
    "module": (lambda: nn.Linear(2, 2), r"inputs\[0\]\['k'\]\[1\] is the nn.Module Linear"),
    "numpy": (lambda: numbers(4).numpy(), r"inputs\[0\]\['k'\]\[1\] is a numpy array of shape \(4,\).*as_tensor"),
    "packed": (
        lambda: nn.utils.rnn.pack_sequence([numbers(3), numbers(2)]),
        r"inputs\[0\]\['k'\]\[1\] is a PackedSequence, which cannot be split by rows. Pass the padded tensor",
    ),
    "sparse": (lambda: numbers(4, 2).to_sparse(), r"inputs\[0\]\['k'\]\[1\] is a sparse tensor.*to_dense"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_is_refused(make: Any, message: str):
    """Torch gives every replica the whole, with its tensors on the first device, or splits nonsense."""
    shim = DataParallel(Apply(lambda *_: pytest.fail("it ran")), TWO)
    with pytest.raises(TypeError, match=f"^DataParallel: {message}") as caught:
        shim({"k": [numbers(4), make()]})
    assert "in_dims" not in str(caught.value)
