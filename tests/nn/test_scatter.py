"""fdp.nn.scatter and scatter_kwargs, as torch.nn.parallel has them and where they do better."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_sequence

from fdp.nn import gather, replicate, scatter, scatter_kwargs
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Pixel, Point, Two, tensors_of
from tests.common.depth import few
from tests.common.hard_trees import TREES
from tests.common.numbers import COUNTS, numbers

pytestmark = pytest.mark.usefixtures("float64")

SCALARS = r"Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze"


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


class Empty(NamedTuple): ...


# ---------------------------------------------------------------- scatter


@few(2)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 9, 36])
def test_scatter_cuts_where_chunk_cuts(rows: int, count: int, dim: int):
    x = numbers(*((rows, 3) if dim in (0, -2) else (3, rows)))
    parts = scatter(x, cpus(count), dim)
    assert type(parts) is tuple
    assert_same_tree(parts, torch.chunk(x, count, dim))


@pytest.mark.parametrize("count", COUNTS)
def test_scatter_of_no_rows_gives_every_device_no_rows(count: int):
    parts = scatter({"x": numbers(0, 3), "n": 2}, cpus(count))
    assert_same_tree(parts, [{"x": numbers(0, 3), "n": 2}] * count)


def test_scattered_parts_are_views():
    x = numbers(5, 2)
    parts = scatter(x, cpus(2))
    assert [part.data_ptr() for part in parts] == [x.data_ptr(), x[3:].data_ptr()]
    parts[1].fill_(7)
    assert_same_tree(x[3:], torch.full((2, 2), 7.0))


def test_scatter_keeps_types():
    tree = {
        "tuple": (numbers(4), [numbers(4, 2), None]),
        "named": Point(numbers(4), Pixel("u", numbers(4))),
        "ordered": OrderedDict(b=numbers(4), a=1),
        "default": defaultdict(list, {"x": numbers(4)}),
    }
    first, second = scatter(tree, cpus(2))
    for part, rows in ((first, slice(0, 2)), (second, slice(2, 4))):
        want = {
            "tuple": (numbers(4)[rows], [numbers(4, 2)[rows], None]),
            "named": Point(numbers(4)[rows], Pixel("u", numbers(4)[rows])),
            "ordered": OrderedDict(b=numbers(4)[rows], a=1),
            "default": defaultdict(list, {"x": numbers(4)[rows]}),
        }
        assert_same_tree(part, want)


@few(2)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", [name for name, hard in TREES.items() if hard.dims == 0])
def test_gather_is_the_inverse_of_scatter(name: str, count: int):
    tree = TREES[name].make(5)
    with unharmed(tree):
        parts = scatter([tree], cpus(count))
        if name == "0-dim":  # a whole on every device becomes a vector
            with pytest.warns(UserWarning, match=SCALARS):
                joined = gather(parts, "cpu")[0]
            used = len(parts)
            want = {"x": tree["x"], "s": torch.tensor([2.5] * used), "n": torch.tensor([7] * used)}
            assert_same_tree(joined, want)
            return
        assert_same_tree(gather(parts, "cpu")[0], tree)


@pytest.mark.parametrize(
    "value",
    [None, 3, 2.5, True, "abc", b"", len, object(), torch.float32, torch.Size([3])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_tensor_goes_to_every_device_as_it_is(value: Any):
    parts = scatter(value, cpus(3))
    assert type(parts) is list
    assert len(parts) == 3
    assert all(part is value for part in parts)


@pytest.mark.parametrize("value", [(), [], {}, OrderedDict(), Empty()], ids=lambda value: type(value).__name__)
def test_empty_containers_go_to_every_device(value: Any):
    """Torch gives an empty namedtuple to no device, and one empty list to all of them."""
    parts = scatter(value, cpus(3))
    assert_same_tree(parts, [value] * 3)
    if isinstance(value, list | dict):
        parts[0].extend([1]) if isinstance(value, list) else parts[0].update(a=1)
        assert [len(part) for part in parts] == [1, 0, 0]


def test_a_tensor_without_dimensions_goes_to_every_device():
    """Torch raises: chunk expects at least a 1-dimensional tensor."""
    parts = scatter((numbers(4), torch.tensor(2.5)), cpus(2))
    assert_same_tree(parts, [(numbers(4)[:2], torch.tensor(2.5)), (numbers(4)[2:], torch.tensor(2.5))])
    assert_same_tree(scatter(torch.tensor(2.5), cpus(2)), (torch.tensor(2.5),) * 2)


def test_lists_are_not_split_but_their_elements_are():
    names = ["a", "b", "c", "d"]
    parts = scatter({"x": [numbers(4), numbers(4, 2)], "names": names}, cpus(2))
    assert [part["names"] for part in parts] == [names, names]
    assert_same_tree(parts[1]["x"], [numbers(4)[2:], numbers(4, 2)[2:]])


def test_keys_are_not_scattered():
    """Torch scatters keys as well."""
    key = ("k", 1)
    parts = scatter({key: numbers(4), 3: "x"}, cpus(2))
    assert [list(part) for part in parts] == [[key, 3]] * 2


def test_scatter_splits_dataclasses():
    """Torch gives every device the whole."""
    parts = scatter(Batch(numbers(3), Output(logits=numbers(3, 2)), "train"), cpus(2))
    assert_same_tree(parts[1], Batch(numbers(3)[2:], Output(logits=numbers(3, 2)[2:]), "train"))


def test_tensors_that_differ_in_rows():
    """Torch drops the surplus parts silently."""
    with pytest.raises(
        ValueError, match=r"scatter: rows differ: inputs\['x'\] has 8 along dim 0, inputs\['y'\]\[0\] has 1 along dim 0"
    ):
        scatter({"x": numbers(8), "y": [numbers(1, 2)]}, cpus(2))


def _holding() -> Any:
    return Two(numbers(4), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_holding, r"inputs\[0\]\['a'\].*Two"),
        (lambda: nn.Linear(2, 2), r"inputs\[0\]\['a'\].*Linear"),
        (lambda: numbers(4).numpy(), r"inputs\[0\]\['a'\] is a numpy array of shape \(4,\)"),
        (lambda: pack_sequence([numbers(2), numbers(1)]), r"inputs\[0\]\['a'\].*PackedSequence"),
        (lambda: numbers(4, 2).to_sparse(), r"inputs\[0\]\['a'\].*sparse"),
    ],
    ids=["object", "module", "numpy", "packed-sequence", "sparse"],
)
def test_what_holds_rows_but_is_no_tree(make: Callable[[], Any], message: str):
    """Torch gives every device the whole, or breaks it."""
    with pytest.raises(TypeError, match=f"scatter: .*{message}"):
        scatter(({"a": make()}, numbers(4)), cpus(2))


def test_dim_out_of_range():
    with pytest.raises(ValueError, match=r"scatter: dim 1 is out of range for inputs\['x'\] of shape \(4,\)"):
        scatter({"x": numbers(4)}, cpus(2), 1)


@pytest.mark.parametrize("devices", [("cpu", "cpu"), [torch.device("cpu"), "cpu:0"]], ids=["strings", "devices"])
def test_ways_to_name_devices(devices: Any):
    assert_same_tree(scatter(numbers(4), devices), numbers(4).chunk(2))
    assert len(replicate(nn.Linear(1, 1), devices)) == 2


def test_gradient_of_scatter():
    x = numbers(5, 2).requires_grad_()
    parts = scatter(x, cpus(3))
    (part,) = torch.autograd.grad((3 * parts[1]).sum(), x)
    assert_same_tree(part, torch.tensor([0.0, 0, 3, 3, 0])[:, None].expand(5, 2))
    for dim in (0, 1, -1):
        assert gradcheck(lambda x: scatter(x, cpus(2), dim), x)  # noqa: B023
        assert gradgradcheck(lambda x: scatter(x, cpus(2), dim), x)  # noqa: B023


def test_parts_need_a_gradient_where_the_whole_does():
    tree = (numbers(4).requires_grad_(), numbers(4))
    for part in scatter(tree, cpus(2)):
        assert [tensor.requires_grad for tensor in part] == [True, False]
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in tensors_of(scatter(tree, cpus(2))))


def test_scatter_keeps_nothing_alive():
    x = numbers(4)
    gc.collect()
    gc.disable()
    try:
        ref = weakref.ref(x)
        del x
        assert ref() is None
        x = numbers(4, 2)
        ref = weakref.ref(x)
        parts = scatter({"x": x}, cpus(2))
        gather(parts, "cpu")
        with pytest.raises(ValueError, match="rows differ"):
            scatter((x, numbers(1)), cpus(2))
        del x, parts
        assert ref() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- scatter_kwargs


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_positional_and_keyword_arguments_have_one_plan(rows: int, count: int):
    """Torch pads what has fewer parts with empty arguments."""
    inputs, kwargs = (numbers(rows), "a", [numbers(rows, 2)]), {"y": numbers(rows, 3), "scale": 2.5, "none": None}
    args, keywords = scatter_kwargs(inputs, kwargs, cpus(count))
    used = len(numbers(rows).chunk(count))
    assert (type(args), type(keywords), len(args), len(keywords)) == (tuple, tuple, used, used)
    for i, (part, keyword) in enumerate(zip(args, keywords, strict=True)):
        want = (numbers(rows).chunk(count)[i], "a", [numbers(rows, 2).chunk(count)[i]])
        assert_same_tree(part, want)
        assert_same_tree(keyword, {"y": numbers(rows, 3).chunk(count)[i], "scale": 2.5, "none": None})


@pytest.mark.parametrize("kwargs", [None, {}], ids=["None", "empty"])
def test_without_keywords_each_device_has_none(kwargs: Any):
    args, keywords = scatter_kwargs((numbers(4),), kwargs, cpus(2))
    assert_same_tree(args, tuple((part,) for part in numbers(4).chunk(2)))
    assert keywords == ({}, {})
    assert keywords[0] is not keywords[1]
    assert scatter_kwargs((), kwargs, cpus(2)) == ((), ())


def test_keywords_only():
    args, keywords = scatter_kwargs((), {"x": numbers(3)}, cpus(2))
    assert args == ((), ())
    assert_same_tree(keywords, tuple({"x": part} for part in numbers(3).chunk(2)))


def test_fewer_parts_than_devices_with_a_keyword_that_is_no_tensor():
    """Torch calls the surplus replicas without positional arguments."""
    args, keywords = scatter_kwargs((numbers(2),), {"flag": True}, cpus(4))
    assert_same_tree(args, ((numbers(2)[:1],), (numbers(2)[1:],)))
    assert keywords == ({"flag": True},) * 2


def test_one_positional_argument_that_is_split_and_a_keyword_that_is_not():
    """Torch 2.13 compares the parts with the number of arguments, and raises an AssertionError."""
    args, keywords = scatter_kwargs((numbers(4),), {"scale": torch.tensor(2.0)}, cpus(2))
    assert (len(args), keywords) == (2, ({"scale": torch.tensor(2.0)},) * 2)


def test_arguments_that_differ_in_their_number_of_chunks():
    with pytest.raises(
        ValueError, match=r"scatter_kwargs: rows differ: inputs\[1\] has 8 along dim 0, kwargs\['y'\] has 6 along dim 0"
    ):
        scatter_kwargs(("a", numbers(8)), {"y": numbers(6)}, cpus(4))


@few(2)
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 9])
def test_arguments_are_cut_each_by_itself_unless_that_would_lose_rows(rows: int, slots: int):
    x = numbers(rows, 2)
    for other in range(10):
        y = numbers(other)
        chunks = [tensor.chunk(slots) for tensor in (x, y)]
        if min(rows, other) > 0 and len(chunks[0]) != len(chunks[1]):
            with pytest.raises(ValueError, match="rows differ"):
                scatter((x, {"y": y}), cpus(slots))
        else:
            want = [(a, {"y": b}) for a, b in zip(*chunks, strict=False)]
            assert_same_tree(scatter((x, {"y": y}), cpus(slots)), want)
            assert [sum(len(a) for a, _ in want), sum(len(b["y"]) for _, b in want)] == [rows, other]
