"""Arguments of dp_apply and shard_map: their dims, what is on slots already, and mistakes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Point
from tests.common.functions import never, scores
from tests.common.numbers import numbers

W = numbers(4)

SLOTS = fdp.virtual_devices(3)


def recorder() -> tuple[list[Any], Callable[..., None]]:
    seen: list[Any] = []
    return seen, lambda *args, **kwargs: seen.append((args, kwargs))


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
    with pytest.raises(ValueError, match="out has the out_dim 'sun'; expected"):
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


def test_devices_in_the_place_of_inputs():
    with pytest.raises(TypeError, match=r"inputs are devices; the order is dp_apply\(fn, params, inputs, devices\)"):
        fdp.dp_apply(lambda x: x, torch.ones(3), fdp.virtual_devices(2))
