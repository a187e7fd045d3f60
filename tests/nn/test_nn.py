"""fdp.nn: scatter, gather, replicate and parallel_apply, as torch.nn.parallel has them and where they do better."""

# Modules are built, called and changed here in ways that types are there to prevent.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_sequence

from fdp import DataParallel
from fdp._placement.devices import imbalance, warn_of_imbalance
from fdp.nn import gather, parallel_apply, replicate, scatter, scatter_kwargs
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Pixel, Point, Two, tensors_of
from tests.common.hard_trees import TREES
from tests.common.numbers import COUNTS, DTYPES, numbers
from tests.common.threads import many_cores

pytestmark = pytest.mark.usefixtures("float64")

SCALARS = r"Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze"


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


class Empty(NamedTuple): ...


class Scale(nn.Module):
    """Buffers of two kinds, a plain tensor, a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("learned", numbers(3).requires_grad_())
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)
        self.plain = numbers(3)
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.log.append(len(x))
        return x * self.weight * self.learned + self.plain


# ---------------------------------------------------------------- scatter


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


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, "scatter: devices is empty"),
        ({"cpu"}, TypeError, "scatter: devices must be None, a device or a sequence of devices, got set"),
        (2, TypeError, r"scatter: devices=2 is a bare number"),
        (["cpu", "gpu"], ValueError, "scatter: 'gpu' is no device that torch knows"),
        (["cpu", None], TypeError, "scatter: None is no device"),
        ([-1], ValueError, "scatter: there is no accelerator with index -1"),
    ],
    ids=["empty", "set", "number", "unknown", "None", "negative"],
)
def test_devices_of_scatter(devices: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        scatter(numbers(4), devices)


@pytest.mark.parametrize("devices", [("cpu", "cpu"), [torch.device("cpu"), "cpu:0"]], ids=["strings", "devices"])
def test_ways_to_name_devices(devices: Any):
    assert_same_tree(scatter(numbers(4), devices), numbers(4).chunk(2))
    assert len(replicate(nn.Linear(1, 1), devices)) == 2


def test_scatter_to_another_device():
    on_cpu, on_meta = scatter((numbers(4), "a"), ["cpu", "meta"])
    assert_same_tree(on_cpu, (numbers(4)[:2], "a"))
    assert (on_meta[0].device.type, on_meta[0].shape, on_meta[1]) == ("meta", (2,), "a")


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


def test_scatter_kwargs_along_another_dim():
    args, keywords = scatter_kwargs((numbers(2, 3),), {"y": numbers(1, 3, 2).mT}, cpus(2), -1)
    assert_same_tree(args, tuple((part,) for part in numbers(2, 3).chunk(2, 1)))
    assert_same_tree(keywords, tuple({"y": part} for part in numbers(1, 3, 2).mT.chunk(2, 2)))


def test_parts_of_a_keyword_may_be_changed():
    _, (first, second) = scatter_kwargs((numbers(2),), {"flags": {"a": 1}}, cpus(2))
    first["flags"]["a"] = 2
    assert second == {"flags": {"a": 1}}


# ---------------------------------------------------------------- gather


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


def test_gather_on_another_device():
    joined = gather([{"x": numbers(2), "n": 1}, {"x": numbers(1).to("meta"), "n": 1}], "meta")
    assert (joined["x"].device.type, joined["x"].shape, joined["n"]) == ("meta", (3,), 1)


def test_scalars_become_a_vector():
    scalars = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match=SCALARS + " and return a vector"):
        joined = gather(scalars, "cpu")
    assert_same_tree(joined, torch.tensor([0.0, 1, 2]))
    (joined * numbers(3)).sum().backward()
    assert_same_tree(torch.stack([scalar.grad for scalar in scalars]), numbers(3))


@pytest.mark.parametrize("dim", [1, -1])
def test_scalars_become_a_vector_along_any_dim(dim: int):
    """Torch raises an IndexError."""
    with pytest.warns(UserWarning, match=f"gather along dimension {dim}, but all input tensors were scalars"):
        joined = gather([{"loss": torch.tensor(1.0), "x": numbers(2, 1)}] * 2, "cpu", dim)
    assert_same_tree(joined, {"loss": torch.ones(2), "x": numbers(2, 1).expand(2, 2)})


def test_one_output():
    assert_same_tree(gather([(numbers(3), None, "a", 2)], "cpu"), (numbers(3), None, "a", 2))
    with pytest.warns(UserWarning, match=SCALARS):
        assert_same_tree(gather([torch.tensor(1.0)], "cpu"), torch.ones(1))


def test_outputs_may_come_from_a_generator():
    assert_same_tree(gather((numbers(2) for _ in range(2)), "cpu"), numbers(2).repeat(2))


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


def test_gradient_of_a_complex_gather():
    parts = tuple(numbers(2, rows, dtype=torch.complex128).requires_grad_() for rows in (1, 2))
    assert gradcheck(lambda *parts: gather(parts, "cpu", -1), parts)
    assert gradgradcheck(lambda *parts: gather(parts, "cpu", -1), parts)


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_gradient_of_gathered_scalars():
    scalars = tuple(torch.tensor(float(i), requires_grad=True) for i in (1, 2))
    assert gradcheck(lambda *scalars: gather(scalars, "cpu"), scalars)
    assert gradgradcheck(lambda *scalars: gather(scalars, "cpu"), scalars)


# ---------------------------------------------------------------- replicate


def test_the_first_replica_has_the_modules_own_tensors():
    module = Scale()
    first, second, third = replicate(module, cpus(3))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in own.items():
        assert first.get_parameter(name) is tensor if name == "weight" else first.get_buffer(name) is tensor
        for other in (second, third):
            copied = other.get_buffer(name) if name != "weight" else other.weight
            assert_same_tree(copied, tensor)
            assert copied.data_ptr() != tensor.data_ptr()
    assert second.weight.data_ptr() != third.weight.data_ptr()


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_are_modules_of_the_same_class(detach: bool):
    """Torch's replicas name no parameters."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), Scale())
    for replica in replicate(module, cpus(3), detach):
        assert replica is not module
        assert type(replica) is nn.Sequential
        assert [type(part) for part in replica.modules()] == [type(part) for part in module.modules()]
        assert all(part is not own for part, own in zip(replica.modules(), module.modules(), strict=True))
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in module.named_parameters()]
        assert list(replica.state_dict()) == list(module.state_dict())
        assert replica[2].nothing is replica[2].absent is None
        assert "absent" in replica[2]._parameters
        assert "nothing" in replica[2]._buffers


def test_what_replicas_write_in_place():
    """The first writes to the module's own buffers, the others to theirs."""
    module = Scale()
    replicas = replicate(module, cpus(3))
    parallel_apply(replicas, [numbers(rows, 3) for rows in (1, 2, 3)])
    assert_same_tree([module.seen, *(replica.seen for replica in replicas)], [torch.ones(3)] * 4)
    parallel_apply(replicas[1:], [numbers(1, 3)] * 2)
    assert_same_tree(
        [replica.seen for replica in replicas], [torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 2.0)]
    )
    assert_same_tree(module.seen, torch.ones(3))


def test_replicas_have_hooks_of_their_own_and_share_lists():
    """Torch's replicas share both with the module."""
    module, calls = Scale(), []
    module.register_forward_hook(lambda part, args, out: calls.append(part))
    first, second = replicate(module, cpus(2))
    first.register_forward_hook(lambda part, args, out: out * 0)
    parallel_apply([first, second], [numbers(1, 3), numbers(2, 3)])
    assert first.log is second.log is module.log
    assert module.log == [1, 2]
    assert [id(part) for part in calls] == [id(first), id(second)]
    assert len(module._forward_hooks) == len(second._forward_hooks) == 1


def test_gradients_of_replicas_add_up():
    module, x = Scale(), numbers(6, 3)
    replicas = replicate(module, cpus(3))
    outputs = parallel_apply(replicas, x.chunk(3))
    (torch.cat(outputs) * x.cos()).sum().backward()
    got = (module.weight.grad, module.learned.grad)
    module.weight.grad = module.learned.grad = None
    (module(x) * x.cos()).sum().backward()
    assert_close_tree(got, (module.weight.grad, module.learned.grad))


def test_an_unused_parameter_has_no_gradient():
    """Torch gives it zeros."""
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    outputs = [replica["used"](numbers(3, 2)) for replica in replicate(module, cpus(2))]
    torch.cat(outputs).sum().backward()
    assert module["used"].weight.grad is not None
    assert [param.grad for param in module["unused"].parameters()] == [None, None]


def test_detached_replicas():
    module = Scale()
    with unharmed(list(module.parameters())):
        first, second = replicate(module, cpus(2), detach=True)
    assert first.weight is module.weight
    assert not second.weight.requires_grad
    assert not second.learned.requires_grad
    second(numbers(2, 3)).sum()
    assert module.weight.grad is None
    with torch.no_grad():
        assert not replicate(module, cpus(2))[1].weight.requires_grad


def test_copies_need_a_gradient_where_the_original_does():
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    for replica in replicate(module, cpus(3)):
        assert (replica.weight.requires_grad, replica.bias.requires_grad) == (False, True)


def test_shared_tensors_and_modules_stay_shared():
    module = nn.Module()
    module.a, module.b = nn.Linear(2, 2), nn.Linear(2, 2)
    module.b.weight, module.c = module.a.weight, module.a
    for replica in replicate(module, cpus(2)):
        assert replica.a is replica.c
        assert replica.a.weight is replica.b.weight
        assert replica.a.bias is not replica.b.bias


def test_plain_tensors_are_shared():
    module = Scale()
    assert all(replica.plain is module.plain for replica in replicate(module, cpus(2)))


class Bound(nn.Module):
    """An override on the instance, as libraries make them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.how = self.double
        self.forward = self.how

    def double(self, x: Tensor) -> Tensor:
        return 2 * self.weight * x


def test_methods_on_the_instance_are_those_of_the_replica():
    """In torch they stay those of the module."""
    module = Bound()
    _, second = replicate(module, cpus(2))
    assert second.how.__self__ is second
    assert second.forward.__self__ is second
    with torch.no_grad():
        module.weight.fill_(5)
    assert_same_tree(second(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0, 16), torch.float64), ((3, 0, 8), torch.float64), ((2, 3), torch.complex128), ((), torch.float64)],
    ids=["no-rows", "no-columns", "complex", "0-dim"],
)
def test_odd_parameters(shape: tuple[int, ...], dtype: torch.dtype):
    """Torch makes empty parameters flat."""
    module = nn.Module()
    module.register_parameter("odd", nn.Parameter(numbers(*shape, dtype=dtype)))
    module.register_parameter("other", nn.Parameter(numbers(3)))
    for replica in replicate(module, cpus(3)):
        assert_same_tree([replica.odd, replica.other], [module.odd, module.other])


def test_lists_and_dicts_of_parameters():
    """Torch's replicas of them are empty to parameters()."""
    module = nn.ModuleDict(
        {
            "list": nn.ParameterList([numbers(2), numbers(3)]),
            "dict": nn.ParameterDict({"b": numbers(2), "a": numbers(1)}),
        }
    )
    for replica in replicate(module, cpus(2)):
        assert_same_tree([*replica["list"], *replica["dict"].values()], [*module["list"], *module["dict"].values()])
        assert list(replica["dict"]) == list(module["dict"])
        assert [tensor.requires_grad for tensor in replica.parameters()] == [True] * 4


def test_recurrent_networks():
    module = nn.LSTM(3, 2, num_layers=2, bidirectional=True)
    x = numbers(4, 2, 3)
    for replica in replicate(module, cpus(3)):
        replica.flatten_parameters()
        assert_close_tree(replica(x), module(x))
        assert [id(weight) for weight in replica._flat_weights] == [id(param) for param in replica.parameters()]


@pytest.mark.parametrize("make", [list, tuple, OrderedDict.fromkeys, iter], ids=["list", "tuple", "dict", "iterator"])
def test_any_iterable_of_devices(make: Callable[[Any], Any]):
    assert len(replicate(nn.Linear(1, 1), make(["cpu", "cpu:0"]))) == 2
    assert replicate(nn.Linear(1, 1), make([])) == []


def test_a_set_of_devices():
    (replica,) = replicate(nn.Linear(1, 1), {"cpu"})
    assert isinstance(replica, nn.Linear)


def test_replicas_on_another_device():
    module = nn.BatchNorm1d(3)
    _, on_meta = replicate(module, ["cpu", "meta"])
    assert {tensor.device.type for tensor in on_meta.state_dict().values()} == {"meta"}
    assert on_meta(numbers(2, 3).to("meta")).shape == (2, 3)


def test_lazy_modules():
    message = r"Modules with uninitialized parameters can't be used with `DataParallel`\. Run a dummy forward pass"
    with pytest.raises(RuntimeError, match=message):
        replicate(nn.Sequential(nn.LazyLinear(2)), cpus(2))
    with pytest.raises(RuntimeError, match=message):
        replicate(nn.LazyBatchNorm1d(), cpus(1))


def test_zero_grad_of_a_replica():
    module = nn.Sequential(nn.Linear(2, 1))
    first, second = replicate(module, cpus(2))
    (first(numbers(1, 2)) + second(numbers(1, 2))).sum().backward()
    before = module[0].weight.grad.clone()
    for replica in (first, second[0]):
        with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"):
            replica.zero_grad()
    assert_same_tree(module[0].weight.grad, before)


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(detach: bool):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    file = io.BytesIO()
    torch.save(replicate(module, cpus(2), detach), file)
    file.seek(0)
    for loaded in torch.load(file, weights_only=False):
        assert_same_tree(loaded.state_dict(), module.state_dict())
        assert_close_tree(loaded(numbers(4, 2)), copy.deepcopy(module)(numbers(4, 2)))


def test_copies_of_replicas():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for replica in replicate(module, cpus(2), detach=True):
        for copied in (copy.deepcopy(replica), pickle.loads(pickle.dumps(replica))):
            assert_same_tree(copied.state_dict(), module.state_dict())
            assert copied[0].weight is not replica[0].weight
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(replicate(module, cpus(2))[1])


def test_gradient_of_replicate():
    module = nn.Linear(3, 2)

    def run(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
        holder = nn.Linear(3, 2)
        del holder.weight, holder.bias
        holder.register_buffer("weight", weight)
        holder.register_buffer("bias", bias)
        return [(replica(x) ** 2) * (i + 1) for i, replica in enumerate(replicate(holder, cpus(3)))]

    inputs = (module.weight, module.bias, numbers(2, 3).requires_grad_())
    assert gradcheck(lambda *inputs: tuple(run(*inputs)), inputs)
    assert gradgradcheck(lambda *inputs: tuple(run(*inputs)), inputs)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "function": lambda module: torch.compile(module, backend="eager"),
    "part": lambda module: nn.Sequential(torch.compile(module, backend="eager")),
    "method": in_place,
}


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_compiled_modules(compiled: Callable[[nn.Module], Any]):
    """Torch's replicate takes the parameters of a compiled module away, and its replicas are the module itself."""
    torch.compiler.reset()
    layer, x = nn.Linear(3, 2), numbers(4, 3)
    module = compiled(layer)
    want = module(x)
    first, second = replicate(module, cpus(2))
    assert len(list(module.parameters())) == 2
    assert_same_tree(module(x), want)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert_same_tree(first(x), torch.zeros(4, 2))
    assert_close_tree(second(x), want)


def test_a_hook_that_closes_over_the_module():
    """It goes on to see the module that it closes over, which the first replica shares its tensors with."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].register_forward_hook(lambda part, args, out: out * module[0].weight.sum())
    x = numbers(4, 2)
    want = copy.deepcopy(module)(x)
    replicas = replicate(module, cpus(2))
    for replica in replicas:
        assert_close_tree(replica(x), want)
        assert len(list(replica.parameters())) == 4
    assert replicas[1][0].weight is not module[0].weight
    assert int(module[1].num_batches_tracked) == int(replicas[1][1].num_batches_tracked) == 1


def test_under_transforms():
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            parts = scatter(x, cpus(2))
            return gather(parallel_apply(replicate(self.inner, cpus(len(parts))), parts), "cpu")

    module, xs = Split(), numbers(5, 4, 2)
    params = {name: param.detach() for name, param in module.named_parameters()}
    alone = {name.removeprefix("inner."): param for name, param in params.items()}

    def split(params: Any, x: Tensor) -> Tensor:
        return (torch.func.functional_call(module, params, (x,)) ** 2).sum()

    def whole(params: Any, x: Tensor) -> Tensor:
        return (torch.func.functional_call(module.inner, params, (x,)) ** 2).sum()

    for transform in (
        lambda loss: torch.func.grad(loss, argnums=(0, 1)),
        lambda loss: lambda params, x: torch.func.hessian(loss, argnums=1)(params, x),
    ):
        per_batch = torch.func.vmap(transform(split), (None, 0))(params, xs)
        want = torch.func.vmap(transform(whole), (None, 0))(alone, xs)
        assert_close_tree([*tensors_of(per_batch)], [*tensors_of(want)])


def test_replicas_of_replicas():
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    _, second = replicate(module, cpus(2))
    outputs = parallel_apply(replicate(second, cpus(3)), [numbers(2, 2)] * 3)
    torch.cat([output * numbers(2, 1) for output in outputs]).sum().backward()
    got = module[0].weight.grad
    module[0].weight.grad = None
    (3 * module(numbers(2, 2)) * numbers(2, 1)).sum().backward()
    assert_close_tree(got, module[0].weight.grad)


def test_replicas_made_in_inference_mode():
    module = nn.BatchNorm1d(2)
    with torch.inference_mode():
        for replica in replicate(module, cpus(2)):
            replica(numbers(3, 2))
    assert int(module.num_batches_tracked) == 1
    module(numbers(3, 2)).sum().backward()


def test_replicate_makes_no_cycles():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def replicas_that_were_used(slots: int) -> list[weakref.ref[nn.Module]]:
        replicas = replicate(module, cpus(slots))
        gather(parallel_apply(replicas, numbers(2 * slots, 2).chunk(slots)), "cpu").sum().backward()
        return [weakref.ref(replica) for replica in replicas]

    replicas_that_were_used(2)  # the first of a process imports and keeps more
    while gc.collect():  # what the compiler has left goes in several rounds
        continue
    gc.disable()
    try:
        assert [replica() for replica in replicas_that_were_used(3)] == [None] * 3
        assert gc.collect() == 0
    finally:
        gc.enable()


# ---------------------------------------------------------------- parallel_apply


def test_each_module_is_called_with_its_inputs():
    modules = [nn.Linear(3, 2), nn.Linear(3, 4), torch.neg]
    xs = [numbers(rows, 3) for rows in (1, 2, 3)]
    want = [module(x) for module, x in zip(modules, xs, strict=True)]
    for inputs in ([(x,) for x in xs], [[x] for x in xs], xs):
        assert_same_tree(parallel_apply(modules, inputs), want)


def test_keyword_arguments():
    got = parallel_apply([torch.add, torch.add], [(numbers(2), 1), (numbers(3), 2)], [{"alpha": 2}, {}])
    assert_same_tree(got, [numbers(2) + 2, numbers(3) + 2])
    assert_same_tree(parallel_apply([dict], [()], [{"a": 1}]), [{"a": 1}])


def test_no_modules():
    """Torch raises an IndexError."""
    assert parallel_apply([], []) == []


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("inputs 2", {"inputs": [1, 2]}),
        ("kwargs_tup 2", {"inputs": [1], "kwargs_tup": [{}, {}]}),
        ("devices 0", {"inputs": [1], "devices": []}),
    ],
    ids=["inputs", "kwargs", "devices"],
)
def test_as_many_of_everything_as_modules(name: str, others: dict[str, Any]):
    with pytest.raises(AssertionError, match=f"The number of modules 1 is not equal to the number of {name}$"):
        parallel_apply([len], **others)


def test_one_after_the_other_in_the_calling_thread():
    """Torch starts a thread for each module."""
    threads: list[threading.Thread] = []

    def run(x: int) -> int:
        threads.append(threading.current_thread())
        return x

    with many_cores():
        assert parallel_apply([run] * 4, [3, 1, 2, 0]) == [3, 1, 2, 0]
    assert threads == [threading.current_thread()] * 4


def test_the_exception_itself_arrives():
    """Torch makes another of its text."""

    class Custom(Exception):
        def __init__(self, number: int, *, text: str) -> None:
            super().__init__(number)
            self.text = text

    error = Custom(3, text="wonderful")

    def fail(x: Any) -> None:
        raise error

    with pytest.raises(Custom, match=r"^3\n") as caught:
        parallel_apply([torch.neg, fail, torch.neg], [numbers(1)] * 3)
    assert caught.value is error
    assert caught.value.text == "wonderful"
    assert caught.value.__notes__ == ["Caught Custom in replica 1 on device cpu.", "in shard 1 of 3, on cpu"]
    with pytest.raises(Custom, match=r"^3\n"):
        parallel_apply([fail], [numbers(1)])
    assert caught.value.__notes__.count("Caught Custom in replica 0 on device cpu.") == 1


def test_the_first_of_several_exceptions_arrives():
    def fail(x: str) -> None:
        raise KeyError(x)

    with pytest.raises(KeyError, match="'a'") as caught:
        parallel_apply([len, fail, fail], ["", "a", "b"])
    assert caught.value.__notes__[:2] == [
        "Caught KeyError in replica 1 on device cpu.",
        "in shard 1 of 3, on cpu",
    ]


def test_an_interrupt_passes():
    """Torch's main thread dies of a KeyError."""

    def interrupt(x: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        parallel_apply([len, interrupt], ["", ""])


@pytest.mark.parametrize("count", [1, 4])
def test_modules_see_what_the_caller_sees(count: int):
    """Torch's threads lose the dtype of autocast, inference mode and default devices."""

    def seen(_: Any) -> tuple[Any, ...]:
        return (
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.empty(0).device.type),
        )

    assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count
        assert seen(0) == (False, False, torch.float64, True, torch.bfloat16, "meta")
    with torch.inference_mode():
        assert parallel_apply([seen] * count, [0] * count) == [seen(0)] * count


@pytest.mark.parametrize("devices", [["cpu", "meta"], [torch.device("cpu"), None]], ids=["strings", "some-unknown"])
def test_devices_of_modules(devices: Any):
    """Torch wants devices of CUDA."""
    assert_same_tree(parallel_apply([torch.neg] * 2, [numbers(1)] * 2, devices=devices), [-numbers(1)] * 2)


def test_a_device_that_there_is_not():
    with pytest.raises(ValueError, match="parallel_apply: there is no accelerator with index 99"):
        parallel_apply([len], [""], devices=[99])


def test_without_tensors_the_device_is_that_of_the_parameters():
    class Failing(nn.Linear):
        def forward(self, *args: Any) -> Any:
            raise RuntimeError("no")

    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=r"^no\n") as caught:
            parallel_apply([Failing(1, 1, device=device)], [None])
        assert caught.value.__notes__[0] == f"Caught RuntimeError in replica 0 on device {device}."


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_composition_is_the_module(rows: int, count: int):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    x = numbers(rows, 3).requires_grad_()
    want = module(x)
    grads = torch.autograd.grad((want * want.cos()).sum(), [x, *module.parameters()])
    args, keywords = scatter_kwargs((x,), None, cpus(count))
    replicas = replicate(module, cpus(len(args)))
    got = gather(parallel_apply(replicas, args, keywords, cpus(len(args))), "cpu")
    assert_close_tree(got, want)
    assert_close_tree(torch.autograd.grad((got * got.cos()).sum(), [x, *module.parameters()]), grads)


@pytest.mark.parametrize("count", COUNTS)
def test_random_numbers_come_from_the_generator_of_the_device(count: int):
    """Replicas draw in turn: dropout is not that of the whole batch."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), numbers(8, 3)
    torch.manual_seed(3)
    want = torch.cat([module(part) for part in x.chunk(count)])
    drawn = torch.rand(1)
    for call in (
        DataParallel(module, cpus(count), executor="sequential"),
        lambda x: gather(parallel_apply(replicate(module, cpus(count))[: len(x.chunk(count))], x.chunk(count)), "cpu"),
    ):
        torch.manual_seed(3)
        assert_close_tree(call(x), want)
        assert_same_tree(torch.rand(1), drawn)


def test_notes_name_the_replica():
    def fail(*_: Any) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        parallel_apply([fail, fail], [None, None])
    assert caught.value.__notes__[0] == "Caught ValueError in replica 0 on device cpu."
    assert "also in shard 1 of 2" in "\n".join(caught.value.__notes__)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("figures", "poor", "rich"),
    [
        ([(4, 8), (4, 8)], None, None),
        ([(3, 8), (4, 8), (4, 6)], None, None),
        ([(4, 8), (2, 8), (3, 8)], 6, 5),
        ([(4, 5), (4, 8)], 5, 6),
        ([(2, 8), (4, 2)], 5, 6),  # memory comes first
    ],
    ids=["same", "three-quarters", "memory", "cores", "both"],
)
def test_gpus_of_which_one_is_weaker(figures: list[tuple[float, float]], poor: int | None, rich: int | None):
    message = imbalance([torch.device("cuda", 5 + i) for i in range(len(figures))], figures)
    if poor is None:
        assert message is None
    else:
        assert message is not None
        assert f"exclude GPU {poor}, which has less than 75% of the memory or cores of GPU {rich}" in message
    warn_of_imbalance([torch.device("cpu")] * 2)
