"""Trees: which types are containers, what is a leaf, what is refused, and how messages call a place in a tree."""

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as torch_pytree

import fdp
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import Batch, Keywords, KnownToFdp, KnownToTorch, Point
from tests.common.depth import few
from tests.common.hard_trees import TREES
from tests.common.numbers import numbers


@dataclasses.dataclass
class Normalised:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x / self.x.sum()


@dataclasses.dataclass
class NeedsMore:
    x: torch.Tensor
    factor: dataclasses.InitVar[float]


W = torch.tensor(2.0, dtype=torch.float64)
SLOTS = fdp.virtual_devices(2)


def first(_: Any, x: Any) -> Any:
    return x


# ---- containers


@few(2)
@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_scattered_and_gathered_is_the_same(name: str, slots: int, rows: int):
    make, dims = TREES[name]
    tree = make(rows)
    with unharmed(tree):
        sharded = fdp.scatter(tree, fdp.virtual_devices(slots), dims)
    assert_same_tree(fdp.gather(sharded), tree)


@few()
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_replicated_is_the_same_on_every_slot(name: str, copy: bool):
    tree = TREES[name].make(2)
    replicated = fdp.replicate(tree, SLOTS, copy=copy)
    for slot in range(2):
        assert_same_tree(fdp.unreplicate(replicated, slot=slot), tree)
    assert_same_tree(fdp.gather(replicated), tree)


@few()
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", [name for name in TREES if name != "0-dim" and not name.startswith("function")])
def test_function_that_returns_its_input(name: str, slots: int):
    make, dims = TREES[name]
    tree = make(5)
    out = fdp.shard_map(first, devices=fdp.virtual_devices(slots), in_dims=(None, dims), out_dims=dims)(W, tree)
    assert_same_tree(out, tree)


@few()
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_params_arrive_whole(name: str, slots: int):
    tree = TREES[name].make(2)
    seen: list[Any] = []
    with unharmed(tree):
        fdp.dp_apply(lambda p, x: seen.append(p), tree, numbers(3), fdp.virtual_devices(slots))
    assert len(seen) == slots
    for params in seen:
        assert_same_tree(params, tree)


def test_dict_keeps_the_order_of_the_first_slot():
    def fn(_: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"b": x, "a": -x} if x[0] == 0 else {"a": -x, "b": x}

    x = torch.arange(2.0)
    assert_same_tree(fdp.dp_apply(fn, W, x, SLOTS), {"b": x, "a": -x})


def test_dict_subclass_is_a_leaf_if_it_holds_no_tensors():
    class Config(dict): ...

    config = Config(width=3)
    sharded = fdp.scatter({"x": numbers(2), "config": config}, SLOTS)
    assert all(shard["config"] is config for shard in sharded.shards)


def test_types_that_are_met_late_are_known_from_then_on():
    class Inner:
        def __init__(self, x: Any) -> None:
            self.x = x

    torch_pytree.register_pytree_node(Inner, lambda obj: ([obj.x], None), lambda parts, _: Inner(*parts))
    sharded = fdp.scatter([Inner({"x": numbers(3)})], SLOTS)
    assert sharded[0][0].x["x"].shape == (2,)
    assert sharded[1][0].x["x"].shape == (1,)


def test_a_dataclass_that_changes_its_fields_is_changed_no_more():
    """It is rebuilt from its shards, which are what they are."""
    tree = Normalised(numbers(4).abs())
    assert_same_tree(fdp.scatter(tree, SLOTS)[0].x, tree.x[:2])
    assert_same_tree(fdp.gather(fdp.scatter(tree, SLOTS)), tree)


def test_a_dataclass_that_cannot_be_rebuilt():
    with pytest.raises(
        TypeError, match=r"cannot rebuild the dataclass NeedsMore from its fields .*; register it with optree"
    ):
        fdp.scatter(NeedsMore(numbers(3), 2), SLOTS)


# ---- None


def test_none_is_a_node_without_leaves_in_data():
    seen: list[Any] = []
    out = fdp.dp_apply(
        lambda w, b: (seen.append(b["n"]), {"n": None, "x": b["x"]})[1], W, {"n": None, "x": numbers(3)}, SLOTS
    )
    assert seen == [None, None]
    assert_same_tree(out, {"n": None, "x": numbers(3)})


@pytest.mark.parametrize("dims", [0, {"n": 0, "x": 0}, {"n": None, "x": 0}, {"n": 5, "x": 0}])
def test_none_in_data_takes_any_spec(dims: Any):
    assert_same_tree(fdp.gather(fdp.scatter({"n": None, "x": numbers(3)}, SLOTS, dims)), {"n": None, "x": numbers(3)})


def test_none_is_a_value_in_specs():
    sharded = fdp.scatter((numbers(3), numbers(5)), SLOTS, (0, None))
    assert [shard[1].shape[0] for shard in sharded.shards] == [5, 5]


def test_none_against_a_container_of_specs():
    with pytest.raises(ValueError, match=r"scatter: tree\['n'\] is None, but in_dims has a list of 1 there"):
        fdp.scatter({"n": None, "x": numbers(3)}, SLOTS, {"n": [0], "x": 0})


# ---- leaves


def test_other_objects_are_passed_by_reference():
    opaque = types.SimpleNamespace(name="a")
    sharded = fdp.scatter({"x": numbers(3), "o": opaque, "f": len}, SLOTS)
    assert all(shard["o"] is opaque and shard["f"] is len for shard in sharded.shards)
    replicated = fdp.replicate({"x": numbers(3), "o": opaque}, SLOTS)
    assert all(shard["o"] is opaque for shard in replicated.shards)
    assert fdp.dp_apply(lambda w, x: (x, opaque), W, numbers(3), SLOTS)[1] is opaque


def test_module_without_tensors_is_an_ordinary_object():
    relu = nn.ReLU()
    assert_same_tree(fdp.dp_apply(lambda p, x: p["act"](x), {"act": relu}, numbers(5), SLOTS), relu(numbers(5)))


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


class DictSubclass(dict): ...


class ListSubclass(list): ...


class Cache(list):
    """Of keys and values, in a class that no pytree library knows, as language models return it."""


OPAQUE = {
    "object": (lambda x: Plain(x), "is a Plain, which holds tensors but is no tree"),
    "dict-subclass": (lambda x: DictSubclass(a=x), "is a DictSubclass, which holds tensors but is no tree"),
    "list-subclass": (lambda x: ListSubclass([x]), "is a ListSubclass, which holds tensors but is no tree"),
    "cache": (lambda x: Cache([x]), "is a Cache, which holds tensors .* with use_cache=False$"),
    "iterator": (lambda x: iter([x]), "is a list_iterator, which one slot would use up. Pass a list or a dict"),
    "generator": (lambda _: nn.Linear(1, 1).parameters(), "is a generator, which one slot .*fdp.functional.module."),
    "view": (lambda x: {"a": x}.values(), "is a dict_values, which one slot would use up"),
    "module": (lambda _: nn.Linear(1, 1), "is the nn.Module Linear. Pass its tensors instead: .*fdp.functional"),
    "buffers-only": (lambda _: nn.BatchNorm1d(1, affine=False), "is the nn.Module BatchNorm1d"),
    "packed": (lambda x: pack_sequence([x, x[:1]]), "is a PackedSequence, .* Pass the padded tensor and the lengths"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_object_that_holds_tensors_is_refused(name: str):
    make, message = OPAQUE[name]
    x = numbers(3)
    obj = make(x)
    with unharmed(x):
        with pytest.raises(TypeError, match=rf"^scatter: tree\['k'\]\[1\] {message}"):
            fdp.scatter({"k": [x, obj]}, SLOTS)
        with pytest.raises(TypeError, match=rf"^scatter: tree {message}"):
            fdp.scatter(obj, SLOTS, None)
        with pytest.raises(TypeError, match=rf"^replicate: tree\[0\] {message}"):
            fdp.replicate([obj], SLOTS)
        with pytest.raises(TypeError, match=rf"^dp_apply: params\['m'\] {message}"):
            fdp.dp_apply(first, {"m": obj}, x, SLOTS)
        with pytest.raises(TypeError, match=rf"^dp_apply: inputs\[1\] {message}"):
            fdp.dp_apply(first, W, (x, obj), SLOTS, in_dims=(0, None))
        with pytest.raises(TypeError, match=rf"^dp_apply: kwargs\['y'\] {message}"):
            fdp.dp_apply(first, W, x, SLOTS, kwargs={"y": obj})
        with pytest.raises(TypeError, match=rf"^dp_apply: out\['m'\] {message}"):
            fdp.dp_apply(lambda w, x: {"x": x, "m": obj}, W, x, SLOTS)
        with pytest.raises(TypeError, match=rf"^shard_map: args\[0\]\.x {message}"):
            fdp.shard_map(lambda b: b, devices=SLOTS)(Batch(obj))
        with pytest.raises(TypeError, match=rf"^parallel_apply: args\[1\].*\[0\] {message}"):
            fdp.parallel_apply(first, x, [obj], devices=SLOTS)


@pytest.mark.parametrize("slots", [1, 2])
def test_object_that_holds_tensors_in_aux(slots: int):
    with pytest.raises(TypeError, match=r"^grad: aux\[0\] is a Plain, which holds tensors"):
        fdp.grad(lambda w, x: ((w * x).mean(), [Plain(x)]), has_aux=True, devices=fdp.virtual_devices(slots))(
            W, numbers(3)
        )


@pytest.mark.parametrize("slots", [1, 2])
def test_sharded_inside_a_tree_of_parameters_is_not_copied_to_every_slot(slots: int):
    """A function of shards would find a Sharded there, or all rows on every slot."""
    held = {"x": fdp.scatter(numbers(4), fdp.virtual_devices(slots))}
    with pytest.raises(TypeError, match=r"^replicate: tree\['x'\] is a Sharded"):
        fdp.replicate(held, fdp.virtual_devices(slots))
    with pytest.raises(TypeError, match=r"^parallel_apply: args\[0\].*\['x'\] is a Sharded"):
        fdp.parallel_apply(lambda tree: tree, held, devices=fdp.virtual_devices(slots))


def test_way_out_for_objects_that_hold_tensors_works():
    with pytest.raises(
        TypeError, match=r"Make it a dataclass, or register it with optree\.register_pytree_node\(.*'fdp'"
    ):
        fdp.scatter(Plain(numbers(3)), SLOTS)
    fdp.scatter(KnownToFdp(numbers(3), numbers(3)), SLOTS)
    fdp.scatter(Batch(numbers(3)), SLOTS)


def test_all_objects_that_hold_tensors_are_named():
    x = numbers(3)
    with pytest.raises(TypeError, match=r"tree\['a'\] is a set.*; tree\['b'\] is a Plain"):
        fdp.scatter({"a": {x}, "b": Plain(x)}, SLOTS)


# ---- numpy


@pytest.mark.parametrize("dims", [0, {"a": 0, "x": 0}, {"a": 1, "x": 0}])
def test_numpy_array_is_not_split(dims: Any):
    tree = {"a": np.zeros((3, 2)), "x": numbers(3)}
    with pytest.raises(
        TypeError, match=r"scatter: tree\['a'\] is a numpy array of shape \(3, 2\).*torch.as_tensor.*None"
    ):
        fdp.scatter(tree, SLOTS, dims)


NUMPY = (np.zeros((3, 2)), np.zeros(()), np.float64(3), np.int64(3), np.bool_(True))


@pytest.mark.parametrize("value", NUMPY, ids=repr)
def test_numpy_arrays_go_whole_under_none_and_numbers_always(value: Any):
    tree, ways = {"a": value, "x": numbers(3)}, [{"a": None, "x": 0}, lambda tensor: 0]  # asked about tensors only
    for dims in [*ways, 0] if value.ndim == 0 else ways:
        assert all(shard["a"] is value for shard in fdp.scatter(tree, SLOTS, dims).shards)


def test_numpy_array_in_params():
    assert_same_tree(
        fdp.dp_apply(lambda p, x: x * float(p["a"].sum()), {"a": np.ones(3)}, numbers(4), SLOTS), numbers(4) * 3
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_numpy_array_is_not_joined_by_rows(slots: int):
    """Equal on all slots it would be returned once, and rows would be missing from the result."""
    with pytest.raises((TypeError, ValueError), match=r"dp_apply: out\['a'\] .*numpy"):
        fdp.dp_apply(lambda w, x: {"a": np.ones(len(x))}, W, numbers(4), fdp.virtual_devices(slots))


def test_numpy_arrays_of_different_shapes_differ():
    with pytest.raises((TypeError, ValueError), match=r"dp_apply: out"):
        fdp.dp_apply(lambda w, x: np.ones(len(x)), W, numbers(3), SLOTS, out_dims="mean")
    assert fdp.dp_apply(lambda w, x: np.ones(len(x)), W, numbers(3), SLOTS, out_dims=None).shape == (2,)


# ---- tied tensors


@pytest.mark.parametrize("slots", [1, 3])
def test_tied_tensors_are_placed_once_and_stay_tied(slots: int):
    x, devices = numbers(5, 2), fdp.virtual_devices(slots)
    tree = {"a": x, "b": Batch([x, numbers(5)]), "c": x[:]}
    placed = fdp.scatter(tree, devices), fdp.replicate(tree, devices), fdp.replicate(tree, devices, copy=False)
    for shard in [shard for each in placed for shard in each.shards]:
        assert shard["a"] is shard["b"].x[0]
        assert shard["a"] is not shard["c"]
    joined = fdp.gather(placed[0])
    assert joined["a"] is joined["b"].x[0]


@pytest.mark.parametrize("slots", [1, 3])
def test_tied_parameters_reach_the_function_tied(slots: int):
    w = numbers(2)

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        assert params["encoder"] is params["decoder"]
        return x

    fdp.dp_apply(fn, {"encoder": w, "decoder": w}, numbers(5), fdp.virtual_devices(slots))


def test_tied_under_different_dims_are_split_differently():
    x = numbers(4, 4)
    a, b = fdp.scatter((x, x), SLOTS, (0, 1))[0]
    assert_same_tree((a, b), (x[:2], x[:, :2]))


# ---- paths


PATHS = {
    "tree": lambda bad: bad,
    "tree[1]": lambda bad: (numbers(1), bad),
    "tree[0][1]": lambda bad: [deque([1, bad])],
    "tree['a'][3]": lambda bad: {"a": {3: bad}},
    "tree[('t', 1)]": lambda bad: {("t", 1): bad},
    "tree['b']['a']": lambda bad: OrderedDict(b=defaultdict(list, a=bad)),
    "tree.x.y": lambda bad: Batch(Point(1, bad)),
    "tree.y[0]": lambda bad: Keywords(x=1, y=[bad]),
    "tree.indices": lambda bad: torch.return_types.max((numbers(1), bad)),
    "tree[1].left": lambda bad: (None, KnownToTorch(bad, 1)),
    "tree[0].x": lambda bad: (Batch(bad, None),),
}


@pytest.mark.parametrize("path", PATHS)
def test_messages_name_the_place(path: str):
    with pytest.raises(ValueError, match=r"^scatter: dim 3 is out of range for .*") as info:
        fdp.scatter(PATHS[path](numbers(2, 2)), SLOTS, lambda tensor: 3 if tensor.ndim == 2 else None)
    assert f"for {path} of shape (2, 2)" in str(info.value)


def test_all_places_in_one_message():
    with pytest.raises(
        ValueError, match=r"dim 1 is out of range for tree\['a'\].*; dim 1 is out of range for tree\['c'\]"
    ):
        fdp.scatter({"a": numbers(3), "b": numbers(3, 2), "c": numbers(3)}, SLOTS, 1)


# ---- prefix trees


def test_dict_of_names_stands_for_fields():
    batch = Batch(numbers(4), Point(numbers(2, 4), numbers(4)))
    sharded = fdp.scatter(batch, SLOTS, {"y": {"x": 1}})
    assert_same_tree(sharded[0], Batch(numbers(4)[:2], Point(numbers(2, 4)[:, :2], numbers(4)[:2])))


def test_spec_of_the_same_type_stands_for_fields():
    tree = Point(numbers(4), numbers(5))
    assert_same_tree(fdp.scatter(tree, SLOTS, Point(0, None))[1], Point(numbers(4)[2:], numbers(5)))
    batch = Batch(numbers(4), numbers(5))
    assert_same_tree(fdp.scatter(batch, SLOTS, Batch(0, None, None))[1], Batch(numbers(4)[2:], numbers(5)))


NOT_PREFIXES = {
    "missing-key": ({"a": 0}, r"tree is a dict with keys \['a', 'b'\], but in_dims .* keys \['a'\]"),
    "extra-key": ({"a": 0, "b": 0, "c": 0}, r"tree is a dict with keys \['a', 'b'\], but in_dims .*'c'\]"),
    "other-key": ({"a": 0, "B": 0}, r"tree is a dict with keys \['a', 'b'\], but in_dims .*'B'"),
    "empty": ({}, r"tree is a dict with keys \['a', 'b'\], but in_dims has a dict with keys \[\]"),
    "list-for-dict": ([0, 0], "tree is a dict .*, but in_dims has a list of 2"),
    "tuple-for-list": ({"a": (0, 0), "b": 0}, r"tree\['a'\] is a list of 2, but in_dims has a tuple of 2"),
    "too-short": ({"a": [0], "b": 0}, r"tree\['a'\] is a list of 2, but in_dims has a list of 1"),
    "too-long": ({"a": [0, 0, 0], "b": 0}, r"tree\['a'\] is a list of 2, but in_dims has a list of 3"),
    "deeper": ({"a": [0, [0]], "b": 0}, r"tree\['a'\]\[1\] is a leaf \(Tensor\), but in_dims has a list of 1"),
    "ordered-for-list": ({"a": OrderedDict(x=0), "b": 0}, r"tree\['a'\] is a list of 2, but in_dims has a OrderedDict"),
    "list-for-tuple": ({"a": 0, "b": [0, 0]}, r"tree\['b'\] is a tuple of 2, but in_dims has a list of 2"),
}


@pytest.mark.parametrize("name", NOT_PREFIXES)
def test_spec_that_is_not_a_prefix(name: str):
    dims, message = NOT_PREFIXES[name]
    tree = {"a": [numbers(3), numbers(3)], "b": (numbers(3), numbers(3))}
    with unharmed(tree):
        with pytest.raises(ValueError, match=rf"^scatter: {message}"):
            fdp.scatter(tree, SLOTS, dims)
        with pytest.raises(ValueError, match=rf"^dp_apply: {message.replace('tree', 'inputs')}"):
            fdp.dp_apply(first, W, tree, SLOTS, in_dims=dims)
        with pytest.raises(
            ValueError, match=rf"^gather: {message.replace('tree', 'shard').replace('in_dims', 'out_dims')}"
        ):
            fdp.gather(fdp.scatter(tree, SLOTS), dims)


def test_other_key_in_a_dict_of_one():
    with pytest.raises(ValueError, match=r"tree is a dict with keys \['a'\], but in_dims has a dict with keys \['b'\]"):
        fdp.scatter({"a": numbers(3)}, SLOTS, {"b": 0})


@pytest.mark.parametrize("tree", [Batch(numbers(3)), Point(numbers(3), numbers(3))])
def test_unknown_field_name(tree: Any):
    with pytest.raises(ValueError, match=r"scatter: in_dims names \['z'\], but tree is a \w+ .*with fields \['x', 'y'"):
        fdp.scatter(tree, SLOTS, {"x": 0, "z": 0})


# ---- outputs of different structure


DIFFERENT = {
    "length": (lambda i: {"x": i, "l": [i] * (i + 1)}, r"out\['l'\] is a list of 1 in shard 0, a list of 2 in shard 1"),
    "keys": (
        lambda i: {"a": i} if i else {"b": i},
        r"out is a dict with keys \['b'\] in shard 0, .*\['a'\] in shard 1",
    ),
    "none": (lambda i: (i, [None if i else 1]), r"out\[1\]\[0\] is a leaf .*in shard 0, None in shard 1"),
    "type": (
        lambda i: {"a": [i]} if i else {"a": (i,)},
        r"out\['a'\] is a tuple of 1 in shard 0, a list of 1 in shard 1",
    ),
    "class": (lambda i: Batch(i) if i else Point(i, None), "out is a Point .*in shard 0, a Batch .*in shard 1"),
    "maxlen": (lambda i: deque([1], maxlen=i + 1), r"out is a deque.* in shard 0, .*maxlen.* in shard 1"),
    "factory": (
        lambda i: defaultdict(int if i else list, a=1),
        r"out is a defaultdict.*list.* in shard 0, .*int.* in shard 1",
    ),
}


@few()
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("out_dims", [0, None, "list"])
def test_outputs_of_different_structure(name: str, out_dims: Any):
    make, message = DIFFERENT[name]
    x = torch.arange(2)
    with unharmed(x), pytest.raises(ValueError, match=rf"^dp_apply: shards differ in structure: {message}"):
        fdp.dp_apply(lambda w, x: make(int(x)), W, x, SLOTS, out_dims=out_dims)


# ---- containers that contain themselves


def endless(x: Any) -> Any:
    tree: dict[str, Any] = {"a": [x]}
    tree["a"].append(tree)
    return tree


@dataclasses.dataclass
class Node:
    x: Any
    parent: Any = None


def ring(x: Any) -> Any:
    node = Node(x)
    node.parent = (Node(x, node),)
    return node


X2 = torch.arange(4.0)
LOOP: list[Any] = [X2]
LOOP.append(LOOP)
ENDLESS: dict[str, tuple[str, Callable[[], Any]]] = {
    "input": (
        r"dp_apply: inputs\[1\] has no end: a container in it contains itself, or containers are nested too deep",
        lambda: fdp.dp_apply(torch.add, None, (X2, endless(X2)), SLOTS),
    ),
    "list in itself": (r"scatter: tree has no end", lambda: fdp.scatter(LOOP, SLOTS)),
    "params": (
        r"dp_apply: params has no end",
        lambda: fdp.dp_apply(torch.add, endless(X2), X2, SLOTS),
    ),
    "dataclass": (
        r"scatter: tree has no end",
        lambda: fdp.scatter(ring(X2), SLOTS),
    ),
    "output": (
        r"dp_apply: out has no end",
        lambda: fdp.dp_apply(lambda w, x: endless(x), None, X2, SLOTS),
    ),
    "dims": (
        r"dp_apply: in_dims has no end",
        lambda: fdp.dp_apply(torch.add, None, {"a": X2}, SLOTS, in_dims=endless(0)),
    ),
    "collective": (
        r"tree has no end",
        lambda: fdp.dp_apply(lambda w, x: fdp.psum(endless(x)), None, X2, SLOTS),
    ),
    "aux": (
        r"(aux|tree) has no end",
        lambda: fdp.grad(lambda w, x: (w * x.mean(), endless(x)), has_aux=True, devices=SLOTS)(X2[0], X2),
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_container_that_contains_itself(name: str):
    message, fail = ENDLESS[name]
    with pytest.raises(ValueError, match=message):
        fail()


def test_the_same_list_twice_is_no_circle():
    part = [X2]
    out = fdp.dp_apply(lambda w, x: x, None, {"a": part, "b": [part, part]}, SLOTS)
    torch.testing.assert_close(out, {"a": part, "b": [part, part]})
