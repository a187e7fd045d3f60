"""fdp.nn.gather, as torch.nn.parallel has it and where it does better."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fdp.nn import gather
from tests.common.comparing import assert_same_tree
from tests.common.containers import Batch, Output, Pixel, Point, Two
from tests.common.numbers import DTYPES, numbers

pytestmark = pytest.mark.usefixtures("float64")

SCALARS = r"Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze"


def _holding() -> Any:
    return Two(numbers(4), 1)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_concatenates(dtype: torch.dtype, dim: int):
    """Torch cuts complex tensors along the wrong axis if dim is negative."""
    outer = dim in (0, -2)
    parts = [numbers(*((rows, 4) if outer else (4, rows)), dtype=dtype) for rows in (2, 1, 3)]
    assert_same_tree(gather(parts, "cpu", dim), torch.cat(parts, dim))


@pytest.mark.parametrize("target", ["cpu", torch.device("cpu"), "cpu:0"], ids=["string", "device", "index"])
def test_targets(target: Any):
    """Torch knows no target but the string "cpu" for the CPU, and gathers no tensors that are there."""
    assert gather([numbers(2), numbers(1)], target).device == torch.device("cpu")


def test_minus_one_stands_for_the_cpu():
    with pytest.warns(FutureWarning, match=r"Using -1 to represent CPU tensor is deprecated"):
        joined = gather([numbers(2), numbers(1)], -1)
    assert_same_tree(joined, torch.cat([numbers(2), numbers(1)]))


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (99, ValueError, "gather: there is no accelerator with index 99"),
        ("cuda:9", ValueError, "gather: device 'cuda:9' is not available"),
        (None, TypeError, "gather: None is no device"),
        (True, TypeError, "gather: True is no device"),
    ],
    ids=["index", "unavailable", "None", "bool"],
)
def test_targets_that_there_are_not(target: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        gather([numbers(2)], target)


def test_scalars_become_a_vector():
    scalars = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match=SCALARS + " and return a vector"):
        joined = gather(scalars, "cpu")
    assert_same_tree(joined, torch.tensor([0.0, 1, 2]))
    (joined * numbers(3)).sum().backward()
    assert_same_tree(torch.stack([scalar.grad for scalar in scalars]), numbers(3))


def test_gather_keeps_types():
    """Torch raises for dataclasses and lists of numbers, and makes strings of nonsense."""
    first, second = (
        [
            (part, [part.sin(), None], OrderedDict(b=part, a={"c": "same"})),
            Point(part, Pixel(1, part)),
            Batch(part, Output(logits=part, hidden=(part, part)), tag=2.5),
            defaultdict(list, {"x": part}),
        ]
        for part in numbers(4, 2).chunk(2)
    )
    whole = numbers(4, 2)
    want = [
        (whole, [whole.sin(), None], OrderedDict(b=whole, a={"c": "same"})),
        Point(whole, Pixel(1, whole)),
        Batch(whole, Output(logits=whole, hidden=(whole, whole)), tag=2.5),
        defaultdict(list, {"x": whole}),
    ]
    assert_same_tree(gather([first, second], "cpu"), want)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, r"dict with keys \['a'\] in shard 0, a dict with keys \['a', 'b'\] in shard 1"),
        ({"a": 1}, {"b": 1}, r"dict with keys \['a'\] in shard 0, a dict with keys \['b'\] in shard 1"),
        ([1], [1, 1], "shards differ in structure: output is"),
        ([1], (1,), "shards differ in structure: output is"),
        (None, numbers(1), "output is None in shard 0, a leaf in shard 1"),
        (numbers(1), None, "output is a leaf in shard 0, None in shard 1"),
        ("a", "b", "output differs between shards: a in shard 0, b in shard 1"),
        ([0, 1], [0, 2], r"output\[1\] differs between shards: 1 in shard 0, 2 in shard 1"),
        (numbers(1), 1, "output"),
        (numbers(1, 2), numbers(1, 3), r"output has shapes \(1, 2\), \(1, 3\), which cannot be concatenated"),
        (numbers(1, 2), numbers(1), r"output has shapes \(1, 2\), \(1,\), which cannot be concatenated"),
        (torch.ones(1), torch.ones(()), r"output has shapes \(1,\), \(\), which cannot be concatenated"),
        (torch.ones(1), torch.ones(1).int(), "output has dtypes"),
    ],
    ids=[
        *("more-keys", "other-keys", "longer-list", "tuple", "tensor-for-None", "None-for-tensor", "strings"),
        *("numbers", "number-for-tensor", "shapes", "ndims", "scalar-for-vector", "dtypes"),
    ],
)
def test_outputs_that_do_not_fit(first: Any, second: Any, message: str):
    """Torch takes the first output for all, in part silently."""
    with pytest.raises(ValueError, match=f"gather: .*{message}"):
        gather([first, second], "cpu")


def test_no_outputs():
    with pytest.raises(ValueError, match="gather: there are no outputs; expected at least one tree to gather from"):
        gather([], "cpu")


def test_gather_of_what_holds_tensors_but_is_no_tree():
    with pytest.raises(TypeError, match=r"gather: .*Two"):
        gather([_holding(), _holding()], "cpu")


def test_gradient_of_gather():
    parts = (numbers(2, 3).requires_grad_(), numbers(1, 3).cos().requires_grad_())
    gather(parts, "cpu").backward(numbers(3, 3))
    assert_same_tree([part.grad for part in parts], [numbers(3, 3)[:2], numbers(3, 3)[2:]])
    assert gradcheck(lambda *parts: gather(parts, "cpu"), parts)
    assert gradgradcheck(lambda *parts: gather(parts, "cpu"), parts)


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_gradient_of_gathered_scalars():
    scalars = tuple(torch.tensor(float(i), requires_grad=True) for i in (1, 2))
    assert gradcheck(lambda *scalars: gather(scalars, "cpu"), scalars)
    assert gradgradcheck(lambda *scalars: gather(scalars, "cpu"), scalars)
