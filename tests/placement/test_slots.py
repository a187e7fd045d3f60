"""Sharded and Replicated: a tree per slot, immutable and not iterable."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree
from tests.common.hard_trees import TREES
from tests.common.numbers import numbers

CPU = torch.device("cpu")
SLOTS = fdp.virtual_devices(2)
X = numbers(3, 2)


def sharded() -> fdp.Sharded:
    return fdp.scatter({"x": X, "s": "text"}, SLOTS)


def replicated() -> fdp.Replicated:
    return fdp.replicate({"x": X, "s": "text"}, SLOTS)


BOTH = pytest.mark.parametrize("make", [sharded, replicated])


def test_what_scatter_says():
    value = sharded()
    assert len(value) == 2
    assert value.devices == (CPU, CPU)
    assert value.sizes == (2, 1)
    assert value.shards == (value[0], value[1])
    assert_same_tree(value[0], {"x": X[:2], "s": "text"})
    assert_same_tree(value[-1], {"x": X[2:], "s": "text"})


def test_what_replicate_says():
    value = replicated()
    assert len(value) == 2
    assert (value.devices, value.sizes, value.dims) == ((CPU, CPU), None, None)
    assert value.shards == (value[0], value[1])
    assert_same_tree(value[1], {"x": X, "s": "text"})


def test_dims_say_how_it_was_split():
    tree = {"a": [numbers(4), 1], "b": numbers(2, 4), "s": torch.tensor(1)}
    value = fdp.scatter(tree, SLOTS, {"a": 0, "b": lambda t: -1, "s": 0})
    assert_same_tree(fdp.gather(value, value.dims), tree)
    assert fdp.scatter(numbers(4), SLOTS).dims == 0
    assert fdp.scatter(numbers(2, 4), SLOTS, -1).dims == -1


# ---- immutable


@BOTH
@pytest.mark.parametrize("name", ["shards", "devices", "sizes", "dims", "new"])
def test_immutable(make: Any, name: str):
    value = make()
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"cannot assign to field '{name}'"):
        setattr(value, name, ())
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"cannot delete field '{name}'"):
        delattr(value, name)
    with pytest.raises(TypeError, match="does not support item assignment"):
        value[0] = X
    assert isinstance(value.shards, tuple)
    assert isinstance(value.devices, tuple)


@BOTH
def test_two_of_them_are_compared_by_identity(make: Any):
    value = make()
    assert value == value
    assert value != make()
    assert len({value, value, make()}) == 2


# ---- indexing


@BOTH
@pytest.mark.parametrize("slot", [2, -3, slice(0, 1), True, None, 0.0])
def test_index_that_is_no_slot(make: Any, slot: Any):
    no_slot = r"slot -?\d of a (Sharded|Replicated) with 2 slots"
    no_number = r"(Sharded|Replicated) is indexed by a slot number, not .*; \.shards is a tuple"
    with pytest.raises((IndexError, TypeError), match=no_slot if type(slot) is int else no_number):
        make()[slot]


# ---- not iterable


def unpack(value: Any) -> Any:
    a, b = value
    return a, b


ITERATES = {"unpack": unpack, "list": list, "star": lambda value: print(*value), "reversed": reversed}


@BOTH
@pytest.mark.parametrize("way", ITERATES)
def test_not_iterable(make: Any, way: str):
    with pytest.raises(TypeError, match=r"a (Sharded|Replicated) is not iterable.*x\.unzip\(\).*x\.shards"):
        ITERATES[way](make())


# ---- map and unzip


def test_map():
    value = sharded().map(lambda shard: shard["x"].sum(0))
    assert type(value) is fdp.Sharded
    assert (value.devices, value.sizes, value.dims) == (SLOTS, None, fdp.AUTO)  # what it returns may be anything
    assert_same_tree(value.shards, (X[:2].sum(0), X[2:].sum(0)))
    with pytest.raises(ValueError, match="gather: these shards carry no dims; pass out_dims"):
        fdp.gather(value)
    assert_same_tree(fdp.gather(value, "sum"), X[:2].sum(0) + X[2:].sum(0))


def test_map_of_a_replicated_is_a_replicated():
    value = replicated().map(lambda shard: shard["x"] * 2)
    assert type(value) is fdp.Replicated
    assert_same_tree(fdp.unreplicate(value, slot=1), X * 2)
    assert_same_tree(fdp.gather(value), X * 2)


def test_map_of_several_is_an_update_that_stays_on_the_slots():
    params, grads = fdp.replicate({"w": X}, SLOTS), fdp.replicate({"w": X + 1}, SLOTS)
    with fdp.transfers() as log:
        both = params.map(lambda p, g: ({"w": p["w"] - g["w"]}, "text"), grads)
    assert not log
    assert both.devices == SLOTS
    new, text = both.unzip()
    assert type(new) is type(text) is fdp.Replicated
    assert_same_tree(new.shards, ({"w": X - (X + 1)},) * 2)
    in_place = params.map(lambda p: p["w"].zero_())
    assert all(got is shard["w"] for got, shard in zip(in_place.shards, params.shards, strict=True))


def test_an_optimizer_on_each_slot():
    params = fdp.replicate({"w": X}, SLOTS)
    optimizers = params.map(lambda shard: torch.optim.SGD(shard.values(), lr=0.1))
    assert optimizers[1].param_groups[0]["params"][0] is params[1]["w"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: x.map(max, {"w": X}), TypeError, r"others\[0\] is dict, expected a Replicated; write fdp.replicate"),
        (lambda x: x.map(max, x, sharded()), TypeError, r"others\[1\] is Sharded, expected a Replicated"),
        (lambda x: x.map(max, fdp.replicate(X, "meta")), ValueError, r"others\[0\] is on other slots: .* on meta"),
        (lambda x: x.map(max, fdp.replicate(X, ["cpu"] * 3)), ValueError, r"others\[0\] is on other slots: .*3 slots"),
        (lambda x: x.map(lambda p: p if p is x[0] else (p,)), ValueError, r"differs .* on slot 0, .* on slot 1"),
        (lambda x: x.map(lambda p: p["x"] if p is x[0] else 1), ValueError, r"float64\[3, 2\] on slot 0, 1 on slot 1"),
        (lambda x: x.map({"x": X}, max), TypeError, r"expected a function first, got dict. Write x.map\(update, grads"),
        (lambda x: x.map(lambda p: int(p is x[0])), ValueError, r"differs between slots: 1 on slot 0, 0 on slot 1"),
        (lambda x: x.map(lambda p: X[: 1 + (p is x[0])]), ValueError, r"float64\[2, 2\] on slot 0, float64\[1, 2\] on"),
        (
            lambda x: x.map(lambda p: {"a": X.to("meta")}),
            ValueError,
            r"result\['a'\] of slot 0 is on meta, the slot on",
        ),
    ],
)
def test_map_of_what_cannot_be_the_same_on_all_slots(call: Any, error: Any, message: str):
    with pytest.raises(error, match=f"^Replicated.map: .*{message}"):
        call(replicated())


def test_map_writes_once_to_what_slots_share():
    """An update in place would be made once a slot."""
    with pytest.raises(RuntimeError, match=r"fn wrote in place to what slot 1 shares, .* without copy=False"):
        fdp.replicate(X.clone(), SLOTS, copy=False).map(lambda x: x.mul_(2))
    with pytest.raises(RuntimeError, match="what slot 1 shares"):
        fdp.replicate(X, SLOTS).map(lambda x, g: g.add_(x), fdp.replicate(X.clone(), SLOTS, copy=False))
    value = fdp.replicate(X, SLOTS, copy=False).map(lambda x: (x * 2, math.nan))
    assert_same_tree(value[1][0], X * 2)


@BOTH
def test_unzip(make: Any):
    value = make().map(lambda shard: (shard["x"], {"s": shard["s"]}, None))
    x, s, none = value.unzip()
    assert type(x) is type(s) is type(none) is type(value)
    assert x.devices == s.devices == value.devices
    assert_same_tree(x.shards, tuple(shard[0] for shard in value.shards))
    assert s.shards == ({"s": "text"},) * 2
    assert none.shards == (None, None)


@pytest.mark.parametrize("kind", [tuple, list])
def test_parts_of_what_was_scattered_keep_their_rows(kind: Any):
    x, y = fdp.scatter(kind((X, X[:, 0])), SLOTS, kind((1, None)), weights=[1, 1]).unzip()
    assert x.sizes == y.sizes == (1, 1)
    assert (x.dims, y.dims) == (1, None)
    assert_same_tree(fdp.gather(x), X)


def test_unzip_of_lists_of_rows():
    with pytest.raises(TypeError, match="unzip: the lists in the slots are rows, split by 'items'"):
        fdp.scatter(["a", "b"], SLOTS, "items").unzip()


@pytest.mark.parametrize(
    ("shards", "kinds"),
    [
        (([X], (X,)), r"\['list of 1', 'tuple of 1'\]"),
        (((X,), (X, X)), r"\['tuple of 1', 'tuple of 2'\]"),
        (((X,), X), r"\['tuple of 1', 'Tensor'\]"),
        (({"a": X}, {"a": X}), r"\['dict', 'dict'\]"),
    ],
)
def test_unzip_of_other_than_equal_tuples(shards: Any, kinds: str):
    with pytest.raises(
        TypeError, match=rf"unzip: every slot must hold a tuple, or a list, of the same length, got {kinds}"
    ):
        fdp.Sharded(shards, SLOTS).unzip()


# ---- pickle, copy, repr


@pytest.mark.parametrize("name", [name for name in TREES if name not in ("dtypes", "requires-grad")])
def test_pickle(name: str):
    make, dims = TREES[name]
    for value in (fdp.scatter(make(3), SLOTS, dims), fdp.replicate(make(3), SLOTS)):
        again = pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        assert type(again) is type(value)
        assert (again.devices, again.sizes, len(again)) == (value.devices, value.sizes, len(value))
        if name != "other-leaves":  # of those one is only equal to itself
            assert_same_tree(fdp.gather(again), fdp.gather(value))


def test_pickles_name_what_is_public_only():
    pickled = pickle.dumps([sharded(), fdp.replicate(torch.ones(2), SLOTS), fdp.AUTO])
    assert b"fdp\x94" in pickled
    assert b"fdp." not in pickled


def test_pickle_without_dims():
    again = pickle.loads(pickle.dumps(sharded().map(lambda shard: shard)))
    assert again.dims is fdp.AUTO
    assert pickle.loads(pickle.dumps(fdp.AUTO)) is fdp.AUTO


@BOTH
def test_deepcopy(make: Any):
    value = make()
    again = copy.deepcopy(value)
    assert_same_tree(again.shards, value.shards)
    assert again[0]["x"] is not value[0]["x"]


def test_repr():
    assert repr(sharded()) == "Sharded(2 slots on cpu x 2, rows 2+1: {'x': float64[2, 2], 's': 'text'})"
    assert repr(replicated()) == "Replicated(2 slots on cpu x 2: {'x': float64[3, 2], 's': 'text'})"
    assert repr(fdp.Sharded((1, 2), (CPU, torch.device("meta")))) == "Sharded(2 slots on cpu, meta: 1)"


def test_repr_of_a_large_tree_is_a_line():
    tree = {"deep": {"a": {"b": {"c": {"d": X}}}}, "wide": [X] * 100, "long": "x" * 1000, **dict.fromkeys("efgh", X)}
    text = repr(fdp.replicate(tree, SLOTS))
    assert len(text) < 400
    assert "\n" not in text


# ---- made by hand


@pytest.mark.parametrize("cls", [fdp.Sharded, fdp.Replicated])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((), ()), ValueError, "0 shards, 0 devices"),
        (((X,), SLOTS), ValueError, "1 shards?, 2 devices"),
        (((X, X), SLOTS, (3,)), ValueError, r"2 shards, 2 devices, sizes \(3,\); expected one of each a slot"),
        (([X, X], SLOTS), TypeError, "shards, devices and sizes are tuples with one entry per slot"),
        (((X, X), list(SLOTS)), TypeError, "shards, devices and sizes are tuples with one entry per slot"),
    ],
)
def test_made_wrongly(cls: Any, arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=rf"{cls.__name__}: {message}"):
        cls(*arguments)


def test_made_by_hand_it_is_taken_as_any_other():
    names: Any = ("cpu", "cpu")
    value = fdp.Sharded((X[:1], X[1:]), names)
    assert value.devices == SLOTS
    assert_same_tree(fdp.gather(value, 0), X)
    assert_same_tree(fdp.dp_apply(lambda w, x: x * w, 2.0, value), X * 2)
