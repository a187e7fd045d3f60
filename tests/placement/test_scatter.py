"""Scatter and gather: a tree split over slots, and its inverse; all the ways to join."""

from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Point
from tests.common.numbers import COUNTS, numbers

W = torch.tensor(2.0, dtype=torch.float64)


def joined(fn: Any, x: Any, slots: int, out_dims: Any = fdp.AUTO, **options: Any) -> Any:
    """What `fn` returns on the slots, joined in the three ways there are to come by it."""
    devices = fdp.virtual_devices(slots)
    out = fdp.dp_apply(lambda _, x: fn(x), W, x, devices, out_dims=out_dims, **options)
    assert_same_tree(fdp.shard_map(fn, devices=devices, out_dims=out_dims, **options)(x), out)
    dims = 0 if out_dims is fdp.AUTO else out_dims
    sharded = fdp.scatter(x, devices, **options)
    assert_same_tree(fdp.gather(sharded.map(fn), dims, weights=sharded.sizes), out)
    return out


# ---- scatter


def test_shards_are_views_of_the_rows():
    x, y = numbers(5, 2).clone(), numbers(3, 5).clone()
    sharded = fdp.scatter({"x": x, "y": y}, fdp.virtual_devices(2), {"x": 0, "y": 1})
    assert_same_tree(sharded.shards, ({"x": x[:3], "y": y[:, :3]}, {"x": x[3:], "y": y[:, 3:]}))
    for shard in sharded.shards:
        assert shard["x"]._base is x
        assert shard["y"]._base is y


@pytest.mark.parametrize("keep_empty", [True, False])
def test_one_slot_gets_the_tensors_themselves(keep_empty: bool):
    x = numbers(5, 2)
    sharded = fdp.scatter([x], "cpu", keep_empty=keep_empty)
    assert sharded[0][0] is x
    assert fdp.gather(sharded)[0] is x


def test_shards_are_on_their_devices():
    sharded = fdp.scatter((numbers(5), W), ["cpu", "meta", "cpu"])
    assert [[t.device.type for t in shard] for shard in sharded.shards] == [["cpu"] * 2, ["meta"] * 2, ["cpu"] * 2]


def test_items_of_a_list():
    images = [numbers(i, 2) for i in range(5)]
    names = tuple("abcde")
    sharded = fdp.scatter((images, names), fdp.virtual_devices(2), ("items", "items"))
    assert sharded.sizes == (3, 2)
    assert_same_tree(sharded.shards, ((images[:3], names[:3]), (images[3:], names[3:])))
    assert_same_tree(fdp.gather(sharded), (images, names))


def test_items_may_be_trees():
    items = [{"image": numbers(i, 2), "boxes": [numbers(i)]} for i in range(3)]
    sharded = fdp.scatter({"items": items, "y": numbers(3)}, fdp.virtual_devices(2), {"items": "items", "y": 0})
    assert_same_tree(sharded[1], {"items": items[2:], "y": numbers(3)[2:]})
    assert_same_tree(fdp.gather(sharded), {"items": items, "y": numbers(3)})


def test_items_move_to_the_device_of_their_slot():
    sharded = fdp.scatter([numbers(2), {"a": numbers(1)}, 3], ["cpu", "meta"], "items", weights=(1, 2))
    assert sharded[0][0].device.type == "cpu"
    assert sharded[1][0]["a"].device.type == "meta"
    assert sharded[1][1] == 3


def test_the_same_list_may_be_split_here_and_whole_there():
    names = ["a", "b"]
    sharded = fdp.scatter({"mine": names, "all": names}, fdp.virtual_devices(2), {"mine": "items", "all": None})
    assert sharded[1] == {"mine": ["b"], "all": ["a", "b"]}


NAMED = {"x": torch.ones(3, 2), "name": ["a", "b", "c"]}


def of_a_mesh(**dims: Any) -> Any:
    with fdp.distributed.init(devices=fdp.virtual_devices(2)) as mesh:
        return mesh.local(NAMED, **dims)


CUTS: dict[str, Any] = {
    "scatter": lambda **dims: fdp.scatter(NAMED, fdp.virtual_devices(2), **dims),
    "dp_apply": lambda **dims: fdp.dp_apply(lambda _, d: d["x"], None, NAMED, fdp.virtual_devices(2), **dims),
    "mesh.local": of_a_mesh,
}


@pytest.mark.parametrize("where", CUTS)
def test_a_list_with_a_value_for_each_row_needs_a_spec(where: str):
    path = {"scatter": "tree", "dp_apply": "inputs", "mesh.local": "batch"}[where]
    text = rf"^{where}: {path}\['name'\] is a list of as many values as there are rows, 3, .* 'items' .* or None"
    with pytest.raises(ValueError, match=text):
        CUTS[where]()
    for spec in ("items", None):
        CUTS[where](in_dims={"x": 0, "name": spec})


def test_sparse_and_nested_tensors_go_whole_only():
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(TypeError, match=r"scatter: tree\['s'\] is a sparse tensor, which is not split.*to_dense.*None"):
        fdp.scatter({"s": sparse}, ["cpu"] * 2)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged)
    with pytest.raises(TypeError, match="scatter: tree is a nested tensor"):
        fdp.scatter(nested, ["cpu"] * 2)
    sharded = fdp.scatter({"s": sparse, "x": numbers(3)}, ["cpu"] * 2, {"s": None, "x": 0})
    assert all(shard["s"] is sparse for shard in sharded.shards)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_not_joined(layout: torch.layout):
    def nested(w: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor(list(x.split([1, len(x) - 1])), layout=layout)

    x = torch.arange(6.0)
    for dim in (0, 1, "stack", "mean", "sum", "max"):
        with pytest.raises(
            ValueError, match=r"^dp_apply: out is a nested tensor, .* return a padded one and its lengths"
        ):
            fdp.dp_apply(nested, None, x, ["cpu"] * 2, out_dims=dim)
    parts = fdp.dp_apply(nested, None, x, ["cpu"] * 2, out_dims="list")
    assert [[row.tolist() for row in part.unbind()] for part in parts] == [[[0.0], [1.0, 2.0]], [[3.0], [4.0, 5.0]]]


@pytest.mark.parametrize("slots", COUNTS)
def test_the_adjoint_of_scatter_is_a_concatenation(slots: int):
    x = numbers(5, 2).requires_grad_()
    sharded = fdp.scatter(x, fdp.virtual_devices(slots))
    torch.stack([((i + 1) * shard**2).sum() for i, shard in enumerate(sharded.shards)]).sum().backward()
    weights = torch.cat([torch.full_like(shard, 2 * (i + 1)) for i, shard in enumerate(sharded.shards)])
    assert_same_tree(x.grad, (weights * x).detach())


def test_gradgradcheck():
    def cubes(x: torch.Tensor) -> torch.Tensor:
        return fdp.gather(fdp.scatter(x, fdp.virtual_devices(2)).map(lambda shard: shard**3), 0)

    assert torch.autograd.gradgradcheck(cubes, numbers(3, 2).requires_grad_())


# ---- gather: what is joined how


@pytest.mark.parametrize("slots", COUNTS)
def test_concatenation(slots: int):
    x = numbers(9, 4)
    assert_same_tree(joined(lambda x: x * 2, x, slots), x * 2)
    assert_same_tree(joined(lambda x: x * 2, x, slots, -2), x * 2)
    assert_same_tree(joined(lambda x: x.T, x, slots, 1), x.T)
    assert_same_tree(
        joined(lambda x: (x, {"t": x.T.contiguous()}), x, slots, (0, {"t": -1})), (x, {"t": x.T.contiguous()})
    )


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_mean_is_weighted_by_rows(slots: int, dtype: torch.dtype):
    x = numbers(9, 4, dtype=dtype)
    assert_close_tree(joined(lambda x: x.mean(), x, slots, "mean"), x.mean())
    assert_close_tree(joined(lambda x: [x.mean(0)], x, slots, "mean"), [x.mean(0)])


def test_mean_by_other_weights():
    sharded = fdp.scatter(torch.tensor([1.0, 2.0, 4.0]).double(), fdp.virtual_devices(2)).map(torch.mean)
    assert fdp.gather(sharded, "mean", weights=[2, 1]).item() == pytest.approx((2 * 1.5 + 4) / 3, rel=1e-15)
    assert fdp.gather(sharded, "mean", weights=[1, 3]).item() == pytest.approx((1.5 + 3 * 4) / 4, rel=1e-15)
    assert fdp.gather(sharded, "mean", weights=[0, 0.5]).item() == 4


def test_mean_leaves_out_slots_of_weight_0():
    sharded = fdp.Sharded((torch.tensor(float("nan")), torch.tensor(3.0)), fdp.virtual_devices(2))
    assert fdp.gather(sharded, "mean", weights=[0, 2]).item() == 3
    empty = fdp.scatter(numbers(1), fdp.virtual_devices(3), keep_empty=True)  # the mean of no rows is NaN
    assert_same_tree(fdp.gather(empty.map(torch.mean), "mean", weights=empty.sizes), numbers(1).mean())


@pytest.mark.parametrize("slots", COUNTS)
def test_integers_and_bools_under_mean_must_agree(slots: int):
    out = joined(lambda x: (x.mean(), torch.tensor(3), torch.tensor([True, False])), numbers(8), slots, "mean")
    assert_close_tree(out, (numbers(8).mean(), torch.tensor(3), torch.tensor([True, False])))


@pytest.mark.parametrize("slots", COUNTS)
def test_sum(slots: int):
    x = numbers(9, 4)
    assert_close_tree(joined(lambda x: (x.sum(0), x.sum()), x, slots, "sum"), (x.sum(0), x.sum()))
    assert_same_tree(joined(lambda x: torch.tensor(len(x)), x, slots, "sum"), torch.tensor(9))


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_max_and_min(slots: int, dtype: torch.dtype):
    x = numbers(9, 4, dtype=dtype)
    assert_same_tree(joined(lambda x: x.amax(0), x, slots, "max"), x.amax(0))
    assert_same_tree(joined(lambda x: x.amin(), x, slots, "min"), x.amin())


def test_max_shares_its_gradient_among_equals():
    x = torch.ones(4, requires_grad=True)
    fdp.dp_apply(lambda w, x: x.amax(), W, x, fdp.virtual_devices(2), out_dims="max").backward()
    assert_same_tree(x.grad, torch.full((4,), 0.25))


@pytest.mark.parametrize("slots", COUNTS)
def test_stack_and_list(slots: int):
    x = numbers(8, 2)
    parts = fdp.scatter(x, fdp.virtual_devices(slots)).shards
    assert_same_tree(joined(lambda x: x.sum(0), x, slots, "stack"), torch.stack([part.sum(0) for part in parts]))
    assert_same_tree(joined(lambda x: {"a": x}, x, slots, "list"), {"a": list(parts)})
    one, other, texts = joined(lambda x: (len(x), len(x), "s"), x, slots, "list")
    assert (one, other, texts) == (*[[len(part) for part in parts]] * 2, ["s"] * slots)
    assert one is not other  # lists of their own


@pytest.mark.parametrize("slots", COUNTS)
def test_none_is_the_value_of_slot_0(slots: int):
    x = numbers(8, 2)
    first = fdp.scatter(x, fdp.virtual_devices(slots))[0]
    assert_same_tree(joined(lambda x: (x, len(x)), x, slots, None), (first, len(first)))


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_items_are_joined(slots: int, kind: type):
    x = numbers(8, 2)
    out = joined(
        lambda x: {"rows": kind(x), "names": kind("r" * len(x))}, x, slots, {"rows": "items", "names": "items"}
    )
    assert_same_tree(out, {"rows": kind(x), "names": kind("r" * 8)})


def test_a_prefix_tree_of_ways():
    def fn(x: torch.Tensor) -> Any:
        return Batch(Point(x, x.mean()), {"n": len(x), "total": x.sum(), "none": None}, "tag")

    x = numbers(6)
    dims = {"x": Point(0, "mean"), "y": {"n": "list", "total": "sum", "none": None}}
    want = Batch(Point(x, x.mean()), {"n": [3, 3], "total": x.sum(), "none": None}, "tag")
    assert_close_tree(joined(fn, x, 2, dims), want)
    out = joined(lambda x: Output(loss=x.mean(), logits=x), x, 2, {"loss": "mean"})
    assert_close_tree(out, Output(loss=x.mean(), logits=x))


# ---- values that are no tensors


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("dims", [0, "mean", "sum", "max", "stack"])
def test_equal_values_are_returned_once(slots: int, dims: Any):
    def fn(x: torch.Tensor) -> Any:
        return "tag", 3, None, float("nan"), torch.Size([1]), (), [1, {"a": True}]  # another NaN each time

    assert_same_tree(joined(fn, numbers(4), slots, dims), fn(numbers(4)))


def test_the_same_object_is_equal_whatever_it_says():
    class Never:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("asked")

        def __hash__(self) -> int:
            raise AssertionError("asked")

    value = Never()
    assert joined(lambda x: value, numbers(4), 2) is value


@pytest.mark.parametrize("dims", [0, "mean", "sum", "max", "min", "stack"])
def test_values_that_differ(dims: Any):
    x = numbers(3)
    message = (
        r"dp_apply: out\['n'\]\[1\] differs between shards: 2 in shard 0, 1 in shard 1\. .*"
        r"return a tensor, or choose 'list' \(all values\) or None \(slot 0's\)"
    )
    with unharmed(x), pytest.raises(ValueError, match=message):
        fdp.dp_apply(lambda w, x: {"n": ["tag", len(x)]}, W, x, fdp.virtual_devices(2), out_dims=dims)


def test_values_that_differ_are_shown_shortly():
    with pytest.raises(ValueError, match=r"out differs between shards: aaaa.*in shard 0.*3 more") as info:
        fdp.dp_apply(lambda w, x: "abcdefg"[int(x)] * 1000, W, torch.arange(7), fdp.virtual_devices(7))
    assert len(str(info.value)) < 800


# ---- what cannot be joined


@pytest.mark.parametrize("slots", [1, 3])
def test_0_dim_output_under_an_int(slots: int):
    message = r"^dp_apply: out\['loss'\] is a 0-dim tensor, .* 'mean', 'sum', 'max', 'min', 'stack', 'list' or None"
    x = numbers(5)
    with unharmed(x), pytest.raises(ValueError, match=message):
        fdp.dp_apply(lambda w, x: {"loss": x.mean(), "x": x}, W, x, fdp.virtual_devices(slots))


WRONG_OUT_DIMS = {
    "typo": (
        "men",
        "{} has the out_dim 'men'; expected an int .*, None .*'mean', 'sum', 'max', 'min', 'stack', 'list'",
    ),
    "case": ("Mean", "{} has the out_dim 'Mean'; expected an int"),
    "bool": (True, "{} has the out_dim True; expected an int"),
    "float": (0.0, "{} has the out_dim 0.0; expected an int"),
    "function": (lambda x: "men", "{} has the out_dim 'men'; expected an int"),
    "range": (1, r"{} has shape \(\d,\), for which out_dim 1 is out of range"),
    "range-negative": (-2, r"{} has shape \(\d,\), for which out_dim -2 is out of range"),
    "items": ("items", r"{} is .*Tensor.*'items' joins lists or tuples"),
    "deeper": ([0], r"{} is a leaf \(Tensor\), but out_dims has a list of 1 there: not a prefix of it"),
    "dict": (
        {"x": 0},
        r"{} is a leaf \(Tensor\), but out_dims has a dict with keys \['x'\] there: not a prefix of it",
    ),
}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", WRONG_OUT_DIMS)
def test_wrong_out_dims(name: str, slots: int):
    dims, message = WRONG_OUT_DIMS[name]
    x = numbers(4)
    with unharmed(x):
        with pytest.raises(ValueError, match=rf"^dp_apply: {message.format('out')}"):
            fdp.dp_apply(lambda w, x: x, W, x, fdp.virtual_devices(slots), out_dims=dims)
        with pytest.raises(ValueError, match=rf"^gather: {message.format('shard')}"):
            fdp.gather(fdp.scatter(x, fdp.virtual_devices(slots)), dims)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_out_dims_by_a_function_of_the_tensor(slots: int):
    x = numbers(6, 2)

    def join_scalars(tensor: torch.Tensor) -> object:
        return "sum" if tensor.ndim == 0 else tensor.ndim - 2

    out = fdp.dp_apply(
        lambda w, x: {"rows": x, "sum": x.sum(), "name": "a"}, W, x, fdp.virtual_devices(slots), out_dims=join_scalars
    )
    assert_close_tree(out, {"rows": x, "sum": x.sum(), "name": "a"})


WRONG_OUTPUTS = {
    "shapes": (
        lambda x: x.new_zeros(len(x), len(x)),
        0,
        r"out has shapes \(2, 2\), \(1, 1\), which cannot be concatenated along dim 0",
    ),
    "ndims": (
        lambda x: x if len(x) == 1 else x[None],
        0,
        r"out has shapes \(1, 2\), \(1,\), which cannot be concatenated",
    ),
    "shapes-sum": (lambda x: x, "sum", r"out has shapes \(2,\), \(1,\), which have no 'sum'"),
    "shapes-mean": (lambda x: x, "mean", r"out has shapes \(2,\), \(1,\), which have no 'mean'"),
    "shapes-stack": (lambda x: x, "stack", r"out has shapes \(2,\), \(1,\), which have no 'stack'"),
    "dtypes": (
        lambda x: x.float() if len(x) == 1 else x,
        0,
        "out has dtypes that differ, torch.float64 in shard 0, torch.float32 in shard 1",
    ),
    "dtypes-mean": (lambda x: x.mean().to(torch.float32 if len(x) == 1 else x.dtype), "mean", "out has dtypes"),
    "integers": (
        lambda x: torch.tensor(len(x)),
        "mean",
        r"out is torch.int64, which has no 'mean', and differs .*tensor\(2\) in shard 0, tensor\(1\) in shard 1",
    ),
    "bools": (lambda x: torch.tensor(len(x) == 1), "mean", "out is torch.bool, which has no 'mean', and differs"),
    "complex-max": (lambda x: x.sum() + 1j, "max", "out is complex, which has no 'max'"),
    "complex-min": (lambda x: x.sum() + 1j, "min", "out is complex, which has no 'min'"),
    "bools-sum": (lambda x: x.sum() > 0, "sum", "out is bool, .*: choose 'max' .any., 'min' .all."),
    "some-tensors": (lambda x: len(x) if len(x) == 1 else x, 0, "out is a tensor in some shards and none in others"),
    "some-lists": (
        lambda x: [1] if len(x) == 1 else (1,),
        None,
        "shards differ in structure: out is a tuple of 1 in shard 0",
    ),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_outputs_that_do_not_fit(name: str):
    fn, dims, message = WRONG_OUTPUTS[name]
    x = numbers(3)
    with unharmed(x), pytest.raises(ValueError, match=rf"^dp_apply: {message}"):
        fdp.dp_apply(lambda w, x: fn(x), W, x, fdp.virtual_devices(2), out_dims=dims)


@pytest.mark.parametrize("slots", [1, 3])
def test_zero_rows_have_no_mean(slots: int):
    with pytest.raises(
        ValueError, match="dp_apply: out has out_dim 'mean', but there are no rows: the mean over zero rows is not"
    ):
        fdp.dp_apply(lambda w, x: x.mean(), W, numbers(0), fdp.virtual_devices(slots), out_dims="mean")


def test_all_problems_in_one_message():
    def fn(_: Any, x: torch.Tensor) -> Any:
        return {"a": x.mean(), "b": len(x), "c": x, "d": x}

    with pytest.raises(
        ValueError, match=r"out\['a'\] is a 0-dim.*; out\['b'\] differs.*; out\['d'\] has the out_dim 'avg'"
    ):
        fdp.dp_apply(fn, W, numbers(3), fdp.virtual_devices(2), out_dims={"a": 0, "b": 0, "c": 0, "d": "avg"})


# ---- gather by itself


def test_gather_of_something_else():
    value: Any
    for value in ([numbers(2)], (numbers(2), numbers(2)), numbers(2)):
        with pytest.raises(TypeError, match=rf"gather: expected a Sharded, .*got {type(value).__name__}"):
            fdp.gather(value)


def test_gather_needs_rows_for_a_mean():
    results = fdp.parallel_apply(torch.mean, fdp.scatter(numbers(4), fdp.virtual_devices(2)))
    assert isinstance(results, fdp.Sharded)
    with pytest.raises(
        ValueError, match=r"gather: these shards carry no dims; pass out_dims, e.g. 0 to concatenate or 'mean'"
    ):
        fdp.gather(results)
    with pytest.raises(
        ValueError, match=r"gather: shard has out_dim 'mean', but the rows .* are not known: pass weights"
    ):
        fdp.gather(results, "mean")
    assert_close_tree(fdp.gather(results, "mean", weights=[1, 1]), numbers(4).mean())


def test_gather_takes_a_replicated_as_it_is_everywhere():
    value = fdp.replicate({"w": numbers(2), "s": "text"}, fdp.virtual_devices(3))
    assert fdp.gather(value)["w"] is value[0]["w"]
    assert_same_tree(fdp.gather(value, {"w": "stack", "s": None})["w"], torch.stack([numbers(2)] * 3))
