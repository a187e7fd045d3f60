"""The plan: how many rows each slot gets, and which slots there are."""

from typing import Any

import numpy as np
import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.functions import never
from tests.common.numbers import numbers

W = torch.tensor(2.0, dtype=torch.float64)


def sizes_of(rows: int, slots: int, **options: Any) -> tuple[int, ...] | None:
    # No memory: the rows are all the same element.
    return fdp.scatter(torch.zeros(()).expand(rows), fdp.virtual_devices(slots), **options).sizes


def mean_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w * x).mean()


# ---- balanced


@pytest.mark.parametrize(
    ("rows", "slots", "sizes"),
    [
        (7, 1, (7,)),
        (6, 3, (2, 2, 2)),
        (7, 3, (3, 2, 2)),
        (8, 3, (3, 3, 2)),
        (9, 7, (2, 2, 1, 1, 1, 1, 1)),
        (3, 3, (1, 1, 1)),
        (2, 3, (1, 1)),
        (1, 7, (1,)),
        (0, 1, (0,)),
        (0, 3, (0,)),
    ],
)
def test_balanced_larger_first_and_never_empty(rows: int, slots: int, sizes: tuple[int, ...]):
    assert sizes_of(rows, slots) == sizes
    assert sizes_of(rows, slots, weights=[3] * slots) == sizes


@pytest.mark.parametrize(
    ("rows", "slots", "sizes"), [(7, 3, (3, 2, 2)), (2, 3, (1, 1, 0)), (1, 2, (1, 0)), (0, 3, (0, 0, 0)), (0, 1, (0,))]
)
def test_keep_empty_gives_every_slot_a_shard(rows: int, slots: int, sizes: tuple[int, ...]):
    sharded = fdp.scatter(numbers(rows, 2), fdp.virtual_devices(slots), keep_empty=True)
    assert sharded.sizes == sizes
    assert [shard.shape for shard in sharded.shards] == [(size, 2) for size in sizes]
    assert_same_tree(fdp.gather(sharded), numbers(rows, 2))


# ---- weights


@pytest.mark.parametrize(
    ("rows", "weights", "sizes"),
    [
        (10, (1, 1, 1), (4, 3, 3)),
        (6, (1, 2), (2, 4)),
        (5, (3, 1), (4, 1)),
        (3, (2, 1, 1), (1, 1, 1)),  # quotas 1.5, 0.75, 0.75: the largest remainders get what is left
        (7, (2, 1), (5, 2)),  # 4.67, 2.33
        (3, (1, 1), (2, 1)),  # equal remainders: the first
        (10, (0.5, 0.25, 0.25), (5, 3, 2)),
        (4, (1e-300, 1e300), (4,)),
        (10**15 + 1, (1 / 3, 1 / 3, 1 / 3), (333333333333334, 333333333333334, 333333333333333)),
        (10**15, (0.1, 0.2, 0.7), (10**14, 2 * 10**14, 7 * 10**14)),
    ],
)
def test_weights_are_proportions(rows: int, weights: tuple[float, ...], sizes: tuple[int, ...]):
    assert sizes_of(rows, len(weights), weights=weights) == sizes


@pytest.mark.parametrize(
    "weights", [(0, 1, 0, 2), [0.0, 1.0, 0.0, 2.0], np.array([0, 1, 0, 2]), torch.tensor([0, 1, 0, 2])]
)
def test_slots_of_weight_0_are_left_out(weights: Any):
    assert sizes_of(6, 4, weights=weights) == (2, 4)
    assert sizes_of(6, 4, weights=weights, keep_empty=True) == (0, 2, 0, 4)


WRONG_WEIGHTS = {
    "too-few": ([1], "1 weights? for 2 slots; expected one per slot"),
    "too-many": ([1, 2, 3], "3 weights for 2 slots; expected one per slot"),
    "none": ([], "0 weights for 2 slots; expected one per slot"),
    "negative": ([1, -1], r"weights must be finite, not negative and not all zero, got \[1.0, -1.0\]"),
    "all-zero": ([0, 0.0], r"weights must be finite, not negative and not all zero, got \[0.0, 0.0\]"),
    "nan": ([float("nan"), 1], r"weights must be finite.*got \[nan, 1.0\]"),
    "infinite": ([1, float("inf")], r"weights must be finite.*got \[1.0, inf\]"),
}

TAKES_WEIGHTS = {
    "scatter": lambda weights: fdp.scatter(numbers(4), ["cpu"] * 2, weights=weights),
    "dp_apply": lambda weights: fdp.dp_apply(mean_loss, W, numbers(4), ["cpu"] * 2, weights=weights),
    "shard_map": lambda weights: fdp.shard_map(mean_loss, devices=["cpu"] * 2, weights=weights, in_dims=(None, 0))(
        W, numbers(4)
    ),
    "grad": lambda weights: fdp.grad(mean_loss, devices=["cpu"] * 2, weights=weights)(W, numbers(4)),
    "gather": lambda weights: fdp.gather(fdp.scatter(numbers(4), ["cpu"] * 2).map(torch.mean), "mean", weights=weights),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
@pytest.mark.parametrize("where", TAKES_WEIGHTS)
def test_wrong_weights(where: str, name: str):
    weights, message = WRONG_WEIGHTS[name]
    if (where, name) == ("gather", "all-zero"):  # those of no rows, which may be concatenated
        message = "shard has out_dim 'mean', but there are no rows"
    with pytest.raises(ValueError, match=rf"^{where}: {message}"):
        TAKES_WEIGHTS[where](weights)


@pytest.mark.parametrize("weights", [[1, "a"], 5, {0: 1, 1: 2}, [None, 1]])
def test_weights_that_are_no_numbers(weights: Any):
    with pytest.raises((TypeError, ValueError), match=r"^scatter: .*weights"):
        fdp.scatter(numbers(4), ["cpu"] * 2, weights=weights)


# ---- which slots


def names_of_slots(slots: int) -> fdp.Replicated:
    """A parameter that says on which slot it is."""
    return fdp.Replicated(tuple(torch.tensor([float(i)]) for i in range(slots)), fdp.virtual_devices(slots))


def slot_of_row(name: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return name.expand(len(x))


@pytest.mark.parametrize(
    ("rows", "weights", "slots"),
    [
        (7, None, [0, 0, 0, 1, 1, 2, 2]),
        (2, None, [0, 1]),
        (3, (0, 2, 1), [1, 1, 2]),
        (3, (0, 0, 1), [2, 2, 2]),
        (0, None, []),
        (0, (0, 1, 1), []),
    ],
)
def test_rows_go_to_slots_in_order(rows: int, weights: Any, slots: list[int]):
    out = fdp.dp_apply(slot_of_row, names_of_slots(3), numbers(rows), weights=weights)
    assert out.tolist() == slots


def test_active_slots_are_numbered_anew():
    def fail(_: Any, x: torch.Tensor) -> None:
        if x[0] == numbers(4)[2]:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here") as info:
        fdp.dp_apply(fail, W, numbers(4), fdp.virtual_devices(4), weights=(0, 1, 0, 1))
    assert info.value.__notes__ == ["in shard 1 of 2, rows 2:4, on cpu"]


def test_one_plan_for_all_leaves():
    def fn(_: Any, a: Any, b: Any, *, c: Any) -> torch.Tensor:
        sizes = len(a["x"]), a["y"].shape[1], len(b), c.shape[2]
        assert len(set(sizes)) == 1
        return torch.tensor(sizes[:1])

    inputs = ({"x": numbers(5), "y": numbers(2, 5)}, list("abcde"))
    sizes = fdp.dp_apply(
        fn,
        *(W, inputs, fdp.virtual_devices(3)),
        in_dims=({"x": 0, "y": 1}, "items"),
        kwargs={"c": numbers(1, 1, 5)},
        kwarg_dims=-1,
    )
    assert sizes.tolist() == [2, 2, 1]


@pytest.mark.parametrize("inputs", [torch.tensor(3.0), "text", None, (), {"a": [], "b": {"c": 1}}])
@pytest.mark.parametrize("weights", [None, (0, 1, 1)])
def test_without_anything_to_split_the_function_runs_once_on_slot_0(inputs: Any, weights: Any):
    seen: list[float] = []
    fdp.dp_apply(lambda name, *_: seen.append(float(name)), names_of_slots(3), inputs, weights=weights)
    assert seen == [0.0]


# ---- microbatches


@pytest.mark.parametrize(
    ("rows", "weights", "pieces", "rounds"),
    [
        (7, (1, 1), 1, ["0123", "456"]),
        (7, (1, 1), 2, ["01", "45", "23", "6"]),
        (7, (1, 1), 3, ["01", "4", "2", "5", "3", "6"]),
        (7, (1, 1), 9, ["0", "4", "1", "5", "2", "6", "3"]),
        (5, (1, 1, 1), 2, ["0", "2", "4", "1", "3"]),
        (1, (1, 1, 1), 4, ["0"]),
        (8, (3, 0, 1), 2, ["012", "6", "345", "7"]),
    ],
)
def test_each_shard_is_cut_into_pieces(rows: int, weights: tuple[int, ...], pieces: int, rounds: list[str]):
    """They run in rounds: the first piece of every slot, then the second of each that has one, and so on."""
    x = numbers(rows)
    parts: list[torch.Tensor] = []

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts.append(x)
        return (w * x).mean()

    grad = fdp.grad(loss, devices=fdp.virtual_devices(len(weights)), weights=weights, microbatches=pieces)(W, x)
    assert [part.tolist() for part in parts] == [x[[int(row) for row in part]].tolist() for part in rounds]
    torch.testing.assert_close(grad, x.mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, True, "2", None])
def test_microbatches_is_a_positive_int(microbatches: Any):
    with pytest.raises(ValueError, match=rf"grad: microbatches must be a positive int, got {microbatches!r}"):
        fdp.grad(mean_loss, microbatches=microbatches)


# ---- rows that disagree


def test_rows_that_differ_are_all_named():
    tree = {"a": numbers(8), "b": [numbers(2, 6), numbers(8)], "names": ["x"] * 7, "s": W}
    dims = {"a": 0, "b": [1, 0], "names": "items", "s": 0}
    with unharmed(tree), pytest.raises(ValueError, match="scatter: rows differ: ") as info:
        fdp.scatter(tree, ["cpu"] * 2, dims)
    sizes = [
        "tree['a'] has 8 along dim 0",
        "tree['b'][0] has 6 along dim 1",
        "tree['b'][1] has 8 along dim 0",
        "tree['names'] has 7 along its items",
    ]
    assert f"rows differ: {', '.join(sizes)}. Pass None in in_dims for what should not be split" in str(info.value)


@pytest.mark.parametrize("slots", [1, 3])
def test_rows_differ_between_arguments(slots: int):
    devices = fdp.virtual_devices(slots)
    with pytest.raises(
        ValueError, match=r"dp_apply: rows differ: inputs\[0\] has 8 .*inputs\[1\] has 6 .*kwargs\['y'\] has 0 "
    ):
        fdp.dp_apply(never, W, (numbers(8), numbers(6)), devices, kwargs={"y": numbers(0)})
    with pytest.raises(ValueError, match=r"shard_map: rows differ: args\[0\] has 8 .*args\[1\]\['b'\] has 6 "):
        fdp.shard_map(never, devices=devices)(numbers(8), {"b": numbers(6)})
    with pytest.raises(ValueError, match=r"value_and_grad: rows differ: args\[1\] has 8 .*args\[2\] has 6 "):
        fdp.value_and_grad(never, devices=devices)(W, numbers(8), numbers(6))


# ---- dims that are none


WRONG_DIMS = {
    "name": ("mean", ValueError, "the dim for tree is 'mean'; expected an int .split., None .whole., 'items'"),
    "float": (0.5, ValueError, "the dim for tree is 0.5; expected an int"),
    "bool": (True, ValueError, "the dim for tree is True; expected an int"),
    "range": (2, ValueError, r"dim 2 is out of range for tree of shape \(4, 2\)"),
    "range-negative": (-3, ValueError, r"dim -3 is out of range for tree of shape \(4, 2\)"),
    "items": ("items", TypeError, "tree is a Tensor; 'items' splits lists and tuples"),
    "function-name": (lambda tensor: "row", ValueError, "the dim for tree is 'row'; expected an int"),
    "function-range": (lambda tensor: 7, ValueError, r"dim 7 is out of range for tree of shape \(4, 2\)"),
    "function-items": (lambda tensor: "items", TypeError, "tree is a Tensor; 'items' splits lists and tuples"),
    "function-function": (lambda tensor: len, ValueError, "the dim for tree is <.*len>; expected an int"),
}


@pytest.mark.parametrize("name", WRONG_DIMS)
def test_wrong_dims(name: str):
    dims, error, message = WRONG_DIMS[name]
    x = numbers(4, 2)
    with unharmed(x):
        with pytest.raises(error, match=rf"^scatter: {message}"):
            fdp.scatter(x, ["cpu"] * 2, dims)
        with pytest.raises(error, match=rf"^dp_apply: {message.replace('tree', 'inputs')}"):
            fdp.dp_apply(never, W, x, ["cpu"] * 2, in_dims=dims)


@pytest.mark.parametrize("value", [W, "text", 3, None])
def test_what_is_never_split_takes_any_dim(value: Any):
    sharded = fdp.scatter({"v": value, "x": numbers(3)}, ["cpu"] * 2, {"v": 5, "x": 0})
    assert all(shard["v"] is value for shard in sharded.shards)


@pytest.mark.parametrize("value", [{"a": 1}, "text", 3, None])
def test_items_are_those_of_lists_and_tuples(value: Any):
    with pytest.raises(TypeError, match=rf"tree\['v'\] is a {type(value).__name__}; 'items' splits lists and tuples"):
        fdp.scatter({"v": value, "x": numbers(3)}, ["cpu"] * 2, {"v": "items", "x": 0})


def test_functions_are_asked_about_each_whole_tensor():
    seen: list[tuple[int, ...]] = []

    def dim(tensor: torch.Tensor) -> int | None:
        seen.append(tuple(tensor.shape))
        return 0 if tensor.shape[0] == 4 else None

    tree = {"a": numbers(4, 2), "b": [W, "text", numbers(5)], "c": None}
    sharded = fdp.scatter(tree, ["cpu"] * 2, dim)
    assert seen == [(4, 2), (5,)]
    assert_same_tree(sharded[1], {"a": numbers(4, 2)[2:], "b": [W, "text", numbers(5)], "c": None})
