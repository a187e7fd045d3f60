"""Running a function on every slot: dp_apply, shard_map, parallel_apply."""

import contextlib
import gc
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Point
from tests.common.numbers import COUNTS, numbers

W = numbers(4)
ROWS = (36, 13, 9, 3, 1, 0)
SLOTS = fdp.virtual_devices(3)


def scores(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Treats every row by itself, and rounds the same however many there are."""
    return torch.tanh(x * w).sum(1)  # (rows, 4) -> (rows,)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("ran before everything was checked")


def recorder() -> tuple[list[Any], Callable[..., None]]:
    seen: list[Any] = []
    return seen, lambda *args, **kwargs: seen.append((args, kwargs))


# ---- the law


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
def test_equals_one_device(slots: int, rows: int, executor: Any):
    x = numbers(rows, 4)
    devices = fdp.virtual_devices(slots)
    with unharmed(W, x):
        out = fdp.dp_apply(scores, W, x, devices, executor=executor)
        mapped = fdp.shard_map(scores, devices=devices, in_dims=(None, 0), executor=executor)(W, x)
    assert_same_tree(out, scores(W, x))
    assert_same_tree(mapped, scores(W, x))


@pytest.mark.parametrize("slots", COUNTS)
def test_gradients_of_outputs_equal_one_device(slots: int):
    def second_order(apply: Any) -> Any:
        w, x = numbers(4).requires_grad_(), numbers(9, 4).requires_grad_()
        first = torch.autograd.grad((apply(w, x) ** 2).sum(), (w, x), create_graph=True)
        torch.stack([(grad**2).sum() for grad in first]).sum().backward()
        return first, w.grad, x.grad

    assert_close_tree(
        second_order(lambda w, x: fdp.dp_apply(scores, w, x, fdp.virtual_devices(slots))), second_order(scores)
    )


def test_gradgradcheck():
    def apply(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(scores, w, x, SLOTS)

    assert torch.autograd.gradgradcheck(apply, (numbers(2).requires_grad_(), numbers(4, 2).requires_grad_()))


def test_one_slot_returns_what_the_function_returned():
    tensor, other = numbers(3), numbers(2, 3)

    def fn(w: Any, x: Any) -> Any:
        return {"a": tensor, "b": [other, x], "w": w, "m": tensor}

    x = numbers(3)
    dims = {"a": 0, "b": 1, "w": "sum", "m": "mean"}
    out = fdp.dp_apply(fn, W, (x,), "cpu", out_dims=dims | {"b": [1, 0]})
    assert out["a"] is tensor
    assert out["b"][0] is other
    assert out["b"][1] is x
    assert out["w"] is W
    assert out["m"] is tensor


def test_ten_runs_are_the_same():
    x = numbers(13, 4)
    outs = [fdp.dp_apply(lambda w, x: (x @ w).logsumexp(0), W, x, SLOTS, out_dims="mean") for _ in range(10)]
    for out in outs:
        assert_same_tree(out, outs[0])


# ---- arguments


def test_a_tuple_is_several_arguments():
    seen, fn = recorder()
    x = numbers(1, 2)
    fdp.dp_apply(fn, W, (x, {"y": x}, "text"), "cpu")
    fdp.dp_apply(fn, W, (), "cpu")
    fdp.dp_apply(fn, W, (x,), "cpu", kwargs={"mask": x})
    assert_same_tree(seen, [((W, x, {"y": x}, "text"), {}), ((W,), {}), ((W, x), {"mask": x})])


@pytest.mark.parametrize("inputs", [numbers(2), [numbers(2), 3], {"x": numbers(2)}, Point(numbers(2), 1), None])
def test_anything_else_is_the_one_argument(inputs: Any):
    seen, fn = recorder()
    fdp.dp_apply(fn, W, inputs, "cpu")
    assert_same_tree(seen, [((W, inputs), {})])


def test_in_dims_of_several_arguments():
    def fn(_: Any, a: Any, b: Any, c: Any) -> Any:
        return a, b["x"].sum(1), b["y"], torch.full((len(a),), len(c))

    a, b, c = numbers(5), {"x": numbers(2, 5), "y": numbers(5)}, numbers(7)
    x = b["x"].T.sum(1)
    for in_dims in ((0, {"x": 1, "y": 0}, None), (lambda t: 0, {"x": -1, "y": -1}, None)):
        out = fdp.dp_apply(
            lambda w, a, b, c: fn(w, a, {"x": b["x"].T, "y": b["y"]}, c), W, (a, b, c), SLOTS, in_dims=in_dims
        )
        assert_same_tree(out, (a, x, b["y"], torch.full((5,), 7)))


def test_one_spec_holds_for_all_arguments():
    seen, fn = recorder()
    fdp.dp_apply(fn, W, (numbers(2, 5), [numbers(1, 5)]), SLOTS, in_dims=1)
    assert [(x.shape, y[0].shape) for (_, x, y), _ in seen] == [((2, 2), (1, 2))] * 2 + [((2, 1), (1, 1))]
    seen.clear()
    fdp.shard_map(fn, devices=SLOTS, in_dims=None)(numbers(2), numbers(5))
    assert [(len(x), len(y)) for (x, y), _ in seen] == [(2, 5)]


def test_kwarg_dims():
    seen, fn = recorder()
    kwargs = {"a": numbers(2, 5), "b": numbers(5), "c": Batch(numbers(5), numbers(9))}
    fdp.dp_apply(fn, W, numbers(5), SLOTS, kwargs=kwargs, kwarg_dims={"a": 1, "c": {"y": None}})
    fdp.shard_map(fn, devices=SLOTS, kwarg_dims={"a": -1, "c": {"y": None}})(numbers(5), **kwargs)
    want = {"a": numbers(2, 5)[:, 4:], "b": numbers(5)[4:], "c": Batch(numbers(5)[4:], numbers(9))}
    assert_same_tree([seen[2][1], seen[5][1]], [want, want])
    seen.clear()
    fdp.dp_apply(fn, W, numbers(5), SLOTS, kwargs={"m": numbers(9), "n": "text"}, kwarg_dims=None)
    assert_same_tree([kwargs for _, kwargs in seen], [{"m": numbers(9), "n": "text"}] * 3)


def test_out_dims_of_the_function():
    def total(w: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    fn: Any = total
    fn.out_dims = "sum"
    x = numbers(5)
    assert_close_tree(fdp.dp_apply(fn, W, x, SLOTS), x.sum())
    assert_close_tree(fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0))(W, x), x.sum())
    assert_close_tree(fdp.dp_apply(fn, W, x, SLOTS, out_dims="stack").sum(), x.sum())
    mapped = fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0))
    assert_close_tree(fdp.dp_apply(lambda w, x: mapped(w, x)[None], W, x, SLOTS).sum(), x.sum())
    assert not hasattr(mapped, "out_dims")  # they are about one shard, and not about what is joined already
    assert not hasattr(fdp.value_and_grad(fn), "out_dims")
    fn.out_dims = "sun"
    with pytest.raises(ValueError, match="the out_dim for out is 'sun'; expected"):
        fdp.dp_apply(fn, W, x, SLOTS)


def test_shard_map_looks_like_the_function():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return w * x

    mapped = fdp.shard_map(fn, devices=SLOTS)
    assert (mapped.__name__, mapped.__doc__) == ("fn", "Multiply.")
    assert list(inspect.signature(mapped).parameters) == ["w", "x"]


def test_calls_nest():
    inner = fdp.shard_map(scores, devices=fdp.virtual_devices(2), in_dims=(None, 0))
    x = numbers(9, 4)
    assert_same_tree(fdp.dp_apply(inner, W, x, SLOTS), scores(W, x))


# ---- wrong arguments


WRONG_IN_DIMS = {
    "short": ((0,), "in_dims has 1 (entry|entries) for 2 positional arguments"),
    "long": ((0, 0, 0), "in_dims has 3 entries for 2 positional arguments"),
    "empty": ((), "in_dims has 0 entries for 2 positional arguments"),
    "list": ([0, 0], "in_dims is a list; expected one spec for all of the 2 positional arguments, or a tuple"),
    "dict": ({"x": 0}, "in_dims is a dict; expected one spec for all of the 2 positional arguments, or a tuple"),
    "deeper": (
        (0, [0]),
        r"(inputs|args)\[1\] is a leaf \(Tensor\), but in_dims has a list of 1 there: not a prefix of it",
    ),
}


@pytest.mark.parametrize("name", WRONG_IN_DIMS)
def test_wrong_in_dims_of_several_arguments(name: str):
    dims, message = WRONG_IN_DIMS[name]
    x = numbers(3)
    with unharmed(x):
        with pytest.raises(ValueError, match=rf"^dp_apply: {message}"):
            fdp.dp_apply(never, W, (x, x), SLOTS, in_dims=dims)
        with pytest.raises(ValueError, match=rf"^shard_map: {message}"):
            fdp.shard_map(never, devices=SLOTS, in_dims=dims)(x, x)
        with pytest.raises(ValueError, match=rf"^value_and_grad: {message}"):
            fdp.value_and_grad(never, devices=SLOTS, in_dims=dims)(x, x)


def test_wrong_kwarg_dims():
    x = numbers(3)
    with pytest.raises(ValueError, match=r"dp_apply: kwarg_dims names \['z'\], but the keyword arguments are \['y'\]"):
        fdp.dp_apply(never, W, x, SLOTS, kwargs={"y": x}, kwarg_dims={"z": 0})
    with pytest.raises(ValueError, match=r"shard_map: kwarg_dims names \['z'\], but the keyword arguments are \[\]"):
        fdp.shard_map(never, devices=SLOTS, kwarg_dims={"z": 0})(x)
    with pytest.raises(ValueError, match=r"dp_apply: kwargs\['y'\] is a leaf .*, but kwarg_dims has a list of 1 there"):
        fdp.dp_apply(never, W, x, SLOTS, kwargs={"y": x}, kwarg_dims={"y": [0]})


@pytest.mark.parametrize("kwargs", [[1], numbers(2)])
def test_kwargs_are_a_mapping(kwargs: Any):
    with pytest.raises(TypeError, match=r"^dp_apply: kwargs .*(mapping|dict)"):
        fdp.dp_apply(never, W, numbers(3), SLOTS, kwargs=kwargs)
    with pytest.raises(TypeError, match=r"^parallel_apply: kwargs .*(mapping|dict)"):
        fdp.parallel_apply(never, W, devices=SLOTS, kwargs=kwargs)


def test_names_of_keyword_arguments_are_strings():
    with pytest.raises(TypeError, match=r"dp_apply: names of keyword arguments are strings, got \[1\]"):
        fdp.dp_apply(never, W, numbers(3), SLOTS, kwargs={"y": 2, 1: 2})  # pyright: ignore[reportArgumentType]


TAKES_FUNCTIONS = {
    "dp_apply": lambda fn: fdp.dp_apply(fn, W, numbers(3), SLOTS),
    "shard_map": lambda fn: fdp.shard_map(fn, devices=SLOTS),
    "parallel_apply": lambda fn: fdp.parallel_apply(fn, W, devices=SLOTS),
    "grad": lambda fn: fdp.grad(fn),
    "value_and_grad": lambda fn: fdp.value_and_grad(fn),
    "grad_and_value": lambda fn: fdp.grad_and_value(fn),
}


@pytest.mark.parametrize("where", TAKES_FUNCTIONS)
def test_a_module_is_no_function(where: str):
    message = f"^{where}: expected a function of .*, got the nn.Module Linear. Write .*fdp.functional.module"
    with pytest.raises(TypeError, match=message):
        TAKES_FUNCTIONS[where](nn.Linear(2, 2))
    with pytest.raises(TypeError, match=rf"^{where}: expected a function, got str"):
        TAKES_FUNCTIONS[where]("text")


TAKES_EXECUTORS: dict[str, Callable[[Any], Any]] = {
    "dp_apply": lambda name: fdp.dp_apply(never, W, numbers(3), SLOTS, executor=name),
    "shard_map": lambda name: fdp.shard_map(never, devices=SLOTS, executor=name)(numbers(3)),
    "parallel_apply": lambda name: fdp.parallel_apply(never, W, devices=SLOTS, executor=name),
    "grad": lambda name: fdp.grad(never, devices=SLOTS, executor=name)(W, numbers(3)),
}


@pytest.mark.parametrize("where", TAKES_EXECUTORS)
@pytest.mark.parametrize("name", ["parallel", "thread", None, True])
def test_unknown_executor(where: str, name: Any):
    with pytest.raises(
        ValueError, match=rf"^{where}: there is no executor {name!r}; expected 'auto', 'sequential' or 'threads'"
    ):
        TAKES_EXECUTORS[where](name)


# ---- Sharded and Replicated arguments


def test_a_replicated_is_used_as_it_is():
    replicated = fdp.replicate({"w": W}, SLOTS)
    seen, fn = recorder()
    fdp.dp_apply(fn, replicated, numbers(5))
    assert [args[0]["w"] for args, _ in seen] == [shard["w"] for shard in replicated.shards]
    assert all(args[0]["w"] is shard["w"] for (args, _), shard in zip(seen, replicated.shards, strict=True))
    assert_same_tree(fdp.dp_apply(lambda p, x: scores(p["w"], x), replicated, numbers(5, 4)), scores(W, numbers(5, 4)))


def test_a_replicated_may_be_a_part_of_the_parameters():
    params = {"w": fdp.replicate(W, SLOTS), "b": W}
    out = fdp.dp_apply(lambda p, x: scores(p["w"], x) + p["b"].sum(), params, numbers(5, 4), SLOTS)
    assert_same_tree(out, scores(W, numbers(5, 4)) + W.sum())


@pytest.mark.parametrize(("rows", "used"), [(2, 2), (7, 3), (0, 1)])
def test_a_replicated_lends_its_first_slots(rows: int, used: int):
    replicated = fdp.replicate(W, fdp.virtual_devices(5))
    seen, fn = recorder()
    fdp.dp_apply(fn, replicated, numbers(rows), SLOTS)
    assert [any(args[0] is shard for shard in replicated.shards[:used]) for args, _ in seen] == [True] * used


def test_a_replicated_on_too_few_or_other_slots():
    with pytest.raises(
        ValueError, match=r"dp_apply: params\['w'\] is on 2 slots \(cpu, cpu\), but devices has 3 \(cpu, cpu, cpu\)"
    ):
        fdp.dp_apply(never, {"w": fdp.replicate(W, ["cpu"] * 2)}, numbers(5), SLOTS)
    with pytest.raises(ValueError, match=r"dp_apply: params is on 3 slots \(cpu, meta, cpu\), but devices has 3"):
        fdp.dp_apply(never, fdp.replicate(W, ["cpu", "meta", "cpu"]), numbers(5), SLOTS)


def test_a_sharded_is_used_as_it_is():
    x = numbers(7, 4)
    sharded = fdp.scatter(x, SLOTS, weights=(0, 5, 2))
    seen, fn = recorder()
    fdp.dp_apply(fn, W, (sharded, x, [sharded]))
    assert [len(args[2]) for args, _ in seen] == [5, 2]  # what is not scattered yet follows
    assert all(args[1] is shard and args[3][0] is shard for (args, _), shard in zip(seen, sharded.shards, strict=True))
    assert_same_tree(fdp.dp_apply(scores, W, sharded), scores(W, x))
    assert_same_tree(fdp.dp_apply(scores, W, sharded, sharded.devices), scores(W, x))


def test_a_sharded_of_a_short_batch_on_all_slots():
    x = numbers(2, 4)
    assert_same_tree(fdp.dp_apply(scores, fdp.replicate(W, SLOTS), fdp.scatter(x, SLOTS), SLOTS), scores(W, x))


def test_slots_without_rows_are_left_out_of_a_sharded():
    x = numbers(2, 4)
    seen, fn = recorder()
    fdp.dp_apply(fn, W, fdp.scatter(x, SLOTS, keep_empty=True))
    assert [len(args[1]) for args, _ in seen] == [1, 1]
    seen.clear()
    fdp.dp_apply(fn, W, fdp.scatter(x[:0], SLOTS, keep_empty=True))
    assert [len(args[1]) for args, _ in seen] == [0]


def test_results_of_parallel_apply_are_measured():
    sharded = fdp.parallel_apply(lambda x: x * 2, fdp.scatter(numbers(7, 4), SLOTS))
    assert_same_tree(fdp.dp_apply(scores, W, sharded), scores(W, numbers(7, 4) * 2))
    assert_same_tree(fdp.dp_apply(scores, W, (sharded,), in_dims=(0,)), scores(W, numbers(7, 4) * 2))


def test_a_sharded_that_was_split_elsewhere_along_its_own_dim():
    x = numbers(4, 7)
    out = fdp.dp_apply(lambda w, x: scores(w, x.T), W, fdp.scatter(x, SLOTS, 1))
    assert_same_tree(out, scores(W, x.T))


@pytest.mark.parametrize("dims", [0, -1, {"a": 0, "b": [1]}, lambda tensor: 0])
def test_a_sharded_takes_the_dims_of_what_it_was(dims: Any):
    """The call need not be changed when its batch comes scattered."""
    tree, y = {"a": numbers(7), "b": [numbers(2, 7)]}, numbers(7)
    sharded = fdp.scatter(tree, SLOTS, {"a": 0, "b": [1]}, weights=(1, 5, 1))
    out = fdp.dp_apply(lambda w, b, y: (b, y), W, (sharded, y), in_dims=(dims, 0), out_dims=({"a": 0, "b": [1]}, 0))
    assert_same_tree(out, (tree, y))
    seen, fn = recorder()
    fdp.dp_apply(fn, W, (sharded, y), in_dims=(dims, 0))
    assert [len(args[2]) for args, _ in seen] == [1, 5, 1]


WRONG_SHARDED: dict[str, tuple[Callable[[], Any], str]] = {
    "devices": (
        lambda: fdp.dp_apply(never, W, fdp.scatter(numbers(4), SLOTS), "cpu"),
        r"inputs is on 3 slots \(cpu, cpu, cpu\), but devices has 1 \(cpu\)",
    ),
    "other-devices": (
        lambda: fdp.dp_apply(never, W, fdp.scatter(numbers(4), SLOTS), ["cpu", "cpu", "meta"]),
        r"inputs is on 3 slots \(cpu, cpu, cpu\), but devices has 3 \(cpu, cpu, meta\)",
    ),
    "slots": (
        lambda: fdp.dp_apply(never, W, (fdp.scatter(numbers(4), SLOTS), fdp.scatter(numbers(4), ["cpu"] * 2))),
        r"inputs\[1\] is on 2 slots \(cpu, cpu\), but inputs\[0\] has 3 \(cpu, cpu, cpu\)",
    ),
    "sizes": (
        lambda: fdp.dp_apply(
            never, W, (fdp.scatter(numbers(4), SLOTS), {"y": fdp.scatter(numbers(4), SLOTS, weights=(1, 2, 1))})
        ),
        r"rows of the slots differ: inputs\[0\] has 2\+1\+1, inputs\[1\]\['y'\] has 1\+2\+1",
    ),
    "rows": (
        lambda: fdp.dp_apply(never, W, (fdp.scatter(numbers(4), SLOTS), numbers(5))),
        r"rows differ: inputs\[0\] has 4, inputs\[1\] has 5 along dim 0",
    ),
    "weights": (
        lambda: fdp.dp_apply(never, W, fdp.scatter(numbers(4), SLOTS), weights=(1, 1, 1)),
        "inputs is a Sharded, which fixes the rows of each slot; drop weights",
    ),
    "weights-measured": (
        lambda: fdp.dp_apply(
            never, W, fdp.parallel_apply(lambda x: x, fdp.scatter(numbers(4), SLOTS)), weights=(1, 1, 1)
        ),
        "inputs is a Sharded, which fixes the rows of each slot; drop weights",
    ),
    "shards-differ": (
        lambda: fdp.dp_apply(never, W, fdp.Sharded(((W, W[:2]), (W, W)), fdp.virtual_devices(2))),
        r"rows differ: inputs\[0\]\[0\] has 4 along dim 0, inputs\[0\]\[1\] has 2 along dim 0",
    ),
}


@pytest.mark.parametrize("name", WRONG_SHARDED)
def test_wrong_sharded_arguments(name: str):
    call, message = WRONG_SHARDED[name]
    with pytest.raises(ValueError, match=rf"^dp_apply: {message}"):
        call()


def test_a_sharded_says_what_it_has():
    """Its `sizes` are believed for weights and means, so shards with other rows cannot pass unnoticed."""
    x = torch.tensor([-1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    positive = fdp.scatter(x, fdp.virtual_devices(2)).map(lambda shard: shard[shard > 0])  # 1 and 3 rows
    try:
        out = fdp.dp_apply(lambda w, x: x.mean(), W, positive, out_dims="mean")
    except ValueError as error:
        assert "rows" in str(error)  # noqa: PT017
    else:
        assert out == x[x > 0].mean()


# ---- purity


def in_place(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.add_(1)
    return x


def through_a_view(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.view(-1)[:1].zero_()
    return x


def by_out(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.mul(w, 2, out=w)
    return x


def by_foreach(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([w], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    return x


def without_grad(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w.zero_()
    return x


def by_index(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w[0] = x.sum()
    return x


def wrote(where: str, path: str) -> str:
    path = re.escape(path)
    return (
        rf"^{where}: the function wrote in place to {path}\. It must be pure: work on x\.clone\(\), or return the new"
    )


WRITES = [in_place, through_a_view, by_out, by_foreach, without_grad, by_index]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("slots", [1, 3])
def test_writes_in_place_are_found(write: Any, slots: int):
    devices = fdp.virtual_devices(slots)
    x = numbers(5)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "params['b'][1]")):
        fdp.dp_apply(lambda p, x: write(p["b"][1], x), {"a": W, "b": [W, numbers(4)]}, x, devices)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs['y']")):
        fdp.dp_apply(lambda w, i: write(i["y"], i["x"]), W, {"x": x, "y": numbers(5, 3)}, devices)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "kwargs['y']")):
        fdp.dp_apply(lambda p, x, y: write(y, x), W, x, devices, kwargs={"y": numbers(5, 3)})
    with pytest.raises(RuntimeError, match=wrote("shard_map", "args[0].x")):
        fdp.shard_map(lambda b: write(b.x, b.x), devices=devices)(Batch(numbers(5, 3)))


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_shards_of_state_are_found(write: Any):
    x = numbers(5)
    with pytest.raises(RuntimeError, match="dp_apply: the function wrote in place to params"):
        fdp.dp_apply(lambda p, x: write(p["w"], x), fdp.replicate({"w": W, "v": W}, SLOTS), x)
    with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to inputs\[1\]"):
        fdp.dp_apply(lambda p, x, y: write(y, x), W, (x, fdp.scatter(numbers(5, 2), SLOTS)))


def test_writes_to_shards_of_state_are_named_by_leaf():
    with pytest.raises(RuntimeError, match=r"wrote in place to params.*\['w'\]"):
        fdp.dp_apply(lambda p, x: in_place(p["w"], x), fdp.replicate({"w": W, "v": W}, SLOTS), numbers(5))


def test_writes_to_items_are_found():
    with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to inputs"):
        fdp.dp_apply(
            lambda p, items: in_place(items[0]["a"], p),
            W,
            [{"a": numbers(2)} for _ in range(4)],
            SLOTS,
            in_dims="items",
        )


def test_all_leaves_that_were_written_are_named():
    def fn(p: Any, x: torch.Tensor) -> None:
        p["a"].zero_()
        p["c"].zero_()

    params = {"a": numbers(2), "b": numbers(2), "c": numbers(2)}
    with pytest.raises(RuntimeError, match=r"wrote in place to params\['a'\], params\['c'\]\. "):
        fdp.dp_apply(fn, params, numbers(3), SLOTS)


def test_writes_to_a_copy_on_another_device_are_found():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return in_place(w, x) if w.device.type == "meta" else x

    with unharmed(W), pytest.raises(RuntimeError, match=wrote("dp_apply", "params['w']")):
        fdp.dp_apply(lambda p, x: fn(p["w"], x), {"w": W}, numbers(4), ["cpu", "meta"], out_dims=None)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs")):
        fdp.dp_apply(lambda w, x: fn(x, x), W, numbers(4), ["cpu", "meta"], out_dims=None)


def test_writes_under_vmap_are_found():
    xs = numbers(2, 5)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs")):
        torch.func.vmap(lambda x: fdp.dp_apply(lambda w, x: x.add_(1), W, x, SLOTS))(xs)


def test_writes_to_what_the_function_made_are_its_own():
    def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1).mul_(p.sum())

    with unharmed(W):
        assert_same_tree(fdp.dp_apply(fn, W, numbers(5), SLOTS), (numbers(5) + 1) * W.sum())


@pytest.mark.parametrize("slots", [1, 3])
def test_containers_of_the_caller_are_not_those_of_the_function(slots: int):
    def fn(p: dict[str, Any], x: list[Any]) -> torch.Tensor:
        p["new"] = p.pop("w")
        x.append(1)
        return x[0]

    params, x = {"w": W}, [numbers(5)]
    fdp.dp_apply(fn, params, x, fdp.virtual_devices(slots))
    assert list(params) == ["w"]
    assert len(x) == 1


def test_slots_on_one_device_share_the_parameters():
    seen, fn = recorder()
    fdp.dp_apply(fn, {"w": W}, numbers(5), SLOTS)
    assert all(args[0]["w"] is W for args, _ in seen)


def test_inference_tensors_are_no_obstacle():
    with torch.inference_mode():
        x = numbers(5, 4)
    assert_same_tree(fdp.dp_apply(scores, W, x, SLOTS), scores(W, x))


# ---- failures


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def failing(*slots: int, error: BaseException | None = None) -> Callable[..., Any]:
    """A function of rows `0, 1, 2, …`, one a slot, that fails for some."""

    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) in slots:
            raise error or ValueError(f"bad row {int(x[0])}")
        return x

    return fn


RUNS: dict[str, Callable[..., Any]] = {
    "dp_apply": lambda fn: fdp.dp_apply(fn, W, torch.arange(3), SLOTS),
    "shard_map": lambda fn: fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0))(W, torch.arange(3)),
    "parallel_apply": lambda fn: fdp.parallel_apply(fn, W, fdp.scatter(torch.arange(3), SLOTS)),
    "grad": lambda fn: fdp.grad(lambda w, x: (w.sum() * fn(w, x)).mean(), devices=SLOTS)(W, torch.arange(3)),
    "grad-transformed": lambda fn: torch.func.vmap(
        lambda w: fdp.grad(lambda w, x: (w.sum() * fn(w, x)).mean(), devices=SLOTS)(w, torch.arange(3))
    )(numbers(2, 4)),
}


@pytest.mark.parametrize("run", RUNS)
def test_an_exception_arrives_as_it_is(run: str):
    error = TwoArguments(7, "text")
    with pytest.raises(TwoArguments, match="7: text") as info:
        RUNS[run](failing(2, error=error))
    assert info.value is error
    assert info.value.code == 7
    assert info.value.__notes__ == ["in shard 2 of 3, rows 2:3, on cpu"]
    assert info.value.__cause__ is None


@pytest.mark.parametrize("run", RUNS)
def test_all_exceptions_are_named(run: str):
    with pytest.raises(ValueError, match="bad row 0") as info:
        RUNS[run](failing(0, 2))
    assert info.value.__notes__ == [
        "in shard 0 of 3, rows 0:1, on cpu",
        "also in shard 2 of 3, rows 2:3, on cpu: ValueError: bad row 2",
    ]


def test_an_exception_that_is_raised_again_has_its_notes_once():
    error = ValueError("bad")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            fdp.dp_apply(failing(0, 2, error=error), W, torch.arange(3), SLOTS)
    assert error.__notes__ == [
        "in shard 0 of 3, rows 0:1, on cpu",
        "also in shard 2 of 3, rows 2:3, on cpu: the same",
    ]


def test_an_exception_on_one_slot_has_a_note_too():
    with pytest.raises(ValueError, match="bad row 0") as info:
        fdp.dp_apply(failing(0), W, torch.arange(3), "cpu")
    assert info.value.__notes__ == ["in shard 0 of 1, rows 0:3, on cpu"]


def test_microbatches_are_named():
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w.sum() * failing(3)(w, x)).mean()

    with pytest.raises(ValueError, match="bad row 3") as info:
        fdp.grad(loss, devices=["cpu"] * 2, microbatches=2)(W, torch.arange(4))
    assert info.value.__notes__ == ["in shard 1 of 2, microbatch 1, rows 3:4, on cpu"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_as_they_are(run: str, kind: type[BaseException]):
    error = kind("stop")
    with pytest.raises(kind, match="stop") as info:
        RUNS[run](failing(1, error=error))
    assert info.value is error
    assert not hasattr(error, "__notes__")
    assert_same_tree(fdp.dp_apply(failing(), W, torch.arange(3), SLOTS), torch.arange(3))  # the next call works


def test_an_interrupt_comes_before_failures():
    def fn(_: Any, x: torch.Tensor) -> None:
        raise ValueError("failed") if int(x) == 0 else KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        fdp.dp_apply(fn, W, torch.arange(3), SLOTS)


FAILURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: fdp.dp_apply(scores, W, x, SLOTS),
    "grad": lambda x: fdp.value_and_grad(lambda w, x: scores(w, x).mean(), devices=SLOTS)(W, x),
    "shard": lambda x: fdp.dp_apply(failing(0), W, x, SLOTS),
    "interrupt": lambda x: fdp.dp_apply(failing(0, error=KeyboardInterrupt()), W, x, SLOTS),
    "loss": lambda x: fdp.grad(failing(0), devices=SLOTS)(W, x),
    "rows": lambda x: fdp.dp_apply(never, W, (x, x[:1]), SLOTS),
    "write": lambda x: fdp.dp_apply(lambda w, x: x.add_(1), W, x, SLOTS),
    "join": lambda x: fdp.dp_apply(lambda w, x: (x, len(x)), W, x, SLOTS),
    "structure": lambda x: fdp.dp_apply(lambda w, x: list(x), W, x, SLOTS),
    "parallel": lambda x: fdp.parallel_apply(failing(0), W, fdp.scatter(x, SLOTS)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_no_reference_to_the_inputs_is_left(name: str):
    gc.collect()
    gc.disable()
    try:
        x = torch.zeros(5, 4, dtype=torch.float64)
        alive = weakref.ref(x)
        with contextlib.suppress(Exception, KeyboardInterrupt):
            FAILURES[name](x)
        del x
        assert alive() is None
    finally:
        gc.enable()


# ---- parallel_apply


def test_results_stay_where_they_are():
    x = numbers(5, 4)
    out = fdp.parallel_apply(scores, W, fdp.scatter(x, SLOTS))
    assert isinstance(out, fdp.Sharded)
    assert (out.devices, out.sizes, out.dims) == (SLOTS, None, fdp.AUTO)
    assert_same_tree(out.shards, tuple(scores(W, part) for part in x.split([2, 2, 1])))
    assert_same_tree(fdp.gather(out, 0), scores(W, x))


def test_plain_arguments_are_replicated():
    def fn(w: torch.Tensor, x: torch.Tensor, *, tag: str, bias: list[torch.Tensor]) -> torch.Tensor:
        assert tag == "tag"
        w.add_(len(x))
        bias[0].mul_(2)
        return w.sum() + bias[0]

    w, bias = W.clone(), torch.tensor(3.0)
    with unharmed(w, bias):
        out = fdp.parallel_apply(fn, w, fdp.scatter(numbers(5), SLOTS), kwargs={"tag": "tag", "bias": [bias]})
    assert isinstance(out, fdp.Sharded)
    assert_same_tree(out.shards, tuple((W + n).sum() + 6 for n in (2, 2, 1)))


def test_writes_are_allowed_in_state_of_ones_own():
    state = fdp.replicate({"w": W}, SLOTS)
    fdp.parallel_apply(lambda s, x: s["w"].add_(len(x)), state, fdp.scatter(numbers(5), SLOTS))
    assert_same_tree([shard["w"] for shard in state.shards], [W + 2, W + 2, W + 1])


def test_tuples_come_apart():
    replicated = fdp.replicate(W, SLOTS)
    w, rest = fdp.parallel_apply(lambda w, x: (w, {"n": len(x)}), replicated, fdp.scatter(numbers(4), SLOTS))
    assert w.shards == replicated.shards
    assert rest.shards == ({"n": 2}, {"n": 1}, {"n": 1})
    one = fdp.parallel_apply(lambda w: Point(w, 1), replicated)  # a namedtuple is one result
    assert isinstance(one, fdp.Sharded)
    some = fdp.parallel_apply(lambda x: (x, x) if len(x) > 1 else x, fdp.scatter(numbers(4), SLOTS))
    assert isinstance(some, fdp.Sharded)


def test_a_training_loop_keeps_its_state_on_its_devices():
    def step(w: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> Any:
        momentum = momentum * 0.9 + x.sum(0)
        return w - 0.1 * momentum, momentum, (w * x).sum()

    batches = [numbers(rows, 4) * i for i, rows in enumerate((7, 6, 2), 1)]
    w, momentum = fdp.replicate(W, SLOTS), fdp.replicate(torch.zeros_like(W), SLOTS)
    loss: Any = None
    for batch in batches:
        w, momentum, loss = fdp.parallel_apply(step, w, momentum, fdp.scatter(batch, SLOTS, keep_empty=True))
    for slot in range(3):
        state = W, torch.zeros_like(W), None
        for batch in batches:
            rows = fdp.scatter(batch, SLOTS, keep_empty=True)[slot]
            state = step(state[0], state[1], rows)
        assert_same_tree((w[slot], momentum[slot], loss[slot]), state)


def test_devices_are_those_of_the_arguments():
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, fdp.replicate(W, SLOTS)))) == 3
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, W, devices=SLOTS))) == 3
    assert as_sharded(fdp.parallel_apply(lambda: 3, devices=SLOTS)).shards == (3, 3, 3)
    assert len(as_sharded(fdp.parallel_apply(lambda w: w, fdp.replicate(W, SLOTS), devices=SLOTS))) == 3


def as_sharded(value: Any) -> fdp.Sharded:
    assert isinstance(value, fdp.Sharded)
    return value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, SLOTS), fdp.scatter(numbers(2), SLOTS)),
            r"args\[0\] has 3 \(cpu, cpu, cpu\), args\[1\] has 2 \(cpu, cpu\)\. .*keep_empty=True",
        ),
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, SLOTS), devices=["cpu"] * 2),
            r"devices has 2 \(cpu, cpu\), args\[0\] has 3 \(cpu, cpu, cpu\)",
        ),
        (
            lambda: fdp.parallel_apply(never, kwargs={"a": fdp.replicate(W, SLOTS), "b": fdp.replicate(W, "cpu")}),
            r"kwargs\['a'\] has 3 \(cpu, cpu, cpu\), kwargs\['b'\] has 1 \(cpu\)",
        ),
        (
            lambda: fdp.parallel_apply(never, fdp.replicate(W, ["cpu", "meta"]), fdp.replicate(W, ["cpu"] * 2)),
            r"args\[0\] has 2 \(cpu, meta\), args\[1\] has 2 \(cpu, cpu\)",
        ),
    ],
)
def test_arguments_on_different_slots(call: Any, message: str):
    with pytest.raises(ValueError, match=rf"^parallel_apply: arguments are on different slots: {message}"):
        call()


def test_tuples_of_different_length():
    with pytest.raises(TypeError, match=r"parallel_apply: .*tuple.*\['tuple of 2', 'tuple of 1', 'tuple of 1'\]"):
        fdp.parallel_apply(lambda x: (x,) * len(x), fdp.scatter(numbers(4), SLOTS))


# ---- the same options, everywhere


def test_options_are_the_same_everywhere():
    functions = {name: getattr(fdp, name) for name in TAKES_FUNCTIONS if name not in ("grad", "grad_and_value")}
    defaults: dict[str, set[Any]] = {}
    for function in functions.values():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty and name not in ("devices", "argnums", "has_aux"):
                assert parameter.kind is parameter.KEYWORD_ONLY, (function, name)
                defaults.setdefault(name, set()).add(parameter.default)
    assert defaults.pop("in_dims") == {0, fdp.AUTO}  # AUTO where some arguments are differentiated
    assert all(len(values) == 1 for values in defaults.values()), defaults


def test_dict_outputs_of_dataclasses():
    x = numbers(5)
    out = fdp.dp_apply(lambda w, x: Output(logits=x), W, x, SLOTS)
    assert_same_tree(out, Output(logits=x))


def test_equal_failures_of_many_slots_are_said_once():
    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad" if x[0] < 6 else "worse")

    with pytest.raises(ValueError, match="bad") as caught:
        fdp.dp_apply(fn, None, torch.arange(8), fdp.virtual_devices(8))
    assert caught.value.__notes__ == [
        "in shard 0 of 8, rows 0:1, on cpu",
        "also in shard 1 of 8, rows 1:2, on cpu: the same",
        "also in shard 2 of 8, rows 2:3, on cpu: the same",
        "also in shard 3 of 8, rows 3:4, on cpu: the same",
        "also in shard 4 of 8, rows 4:5, on cpu: the same",
        "also in shard 5 of 8, rows 5:6, on cpu: the same",
        "also in shard 6 of 8, rows 6:7, on cpu: ValueError: worse",
        "also in shard 7 of 8, rows 7:8, on cpu: the same",
    ]


def test_devices_in_the_place_of_inputs():
    with pytest.raises(TypeError, match=r"inputs are devices; the order is dp_apply\(fn, params, inputs, devices\)"):
        fdp.dp_apply(lambda x: x, torch.ones(3), fdp.virtual_devices(2))
