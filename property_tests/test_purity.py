"""Laws of purity and context: nothing that was passed changes, a write is an error, and the surroundings are seen."""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.comparing import assert_same
from property_tests.functions import real, row_wise
from property_tests.places import ACCELERATOR
from property_tests.strategies import DTYPES, Split, batches, parameters, splits
from tests.common.containers import leaves_of
from tests.common.settings import default_dtype

Call = Callable[..., Any]


def through_dp_apply(function: Call, params: Any, x: Any, tree: Any, split: Split, dims: Any) -> Any:
    return fdp.dp_apply(function, params, (x,), kwargs={"tree": tree}, kwarg_dims={"tree": dims}, **split.options)


def through_shard_map(function: Call, params: Any, x: Any, tree: Any, split: Split, dims: Any) -> Any:
    options = split.options | {"in_dims": (None, 0), "kwarg_dims": {"tree": dims}}
    return fdp.shard_map(function, **options)(params, x, tree=tree)


def through_value_and_grad(function: Call, params: Any, x: Any, tree: Any, split: Split, dims: Any) -> Any:
    options = split.options | {"in_dims": (None, 0), "kwarg_dims": {"tree": dims}, "reduction": "sum"}
    return fdp.value_and_grad(lambda *a, **k: function(*a, **k).sum(), **options)(params, x, tree=tree)


CALLS = (through_dp_apply, through_shard_map, through_value_and_grad)


def state_of(*trees: Any) -> list[Any]:
    """All that a call might change of its arguments."""
    return [
        (id(leaf), leaf._version, leaf.requires_grad, leaf.grad, leaf.detach().clone())
        if isinstance(leaf, torch.Tensor)
        else (id(leaf), leaf)
        for leaf in leaves_of(trees)
    ]


def same_state(ones: list[Any], others: list[Any]) -> bool:
    pairs = list(zip(ones, others, strict=True))
    values = [torch.equal(one[-1], other[-1]) for one, other in pairs if isinstance(one[-1], torch.Tensor)]
    return all(values) and [one[:-1] for one in ones] == [other[:-1] for other in others]


@given(st.data(), st.sampled_from(CALLS))
def test_l7_arguments_stay_as_they_are(data: st.DataObject, through: Call):
    split = data.draw(splits())
    batch = data.draw(batches(split.rows, items=False, states=["plain", "grad", "parameter"]))
    params = data.draw(parameters(states=["plain", "grad", "parameter"]))
    x = torch.ones(split.rows, 3, dtype=torch.float64)
    apply = row_wise(batch.tensor_dims)
    before = state_of(params, x, batch.tree)
    through(lambda params, x, *, tree: apply(params, x, tree), params, x, batch.tree, split, batch.dims)
    assert same_state(before, state_of(params, x, batch.tree))


# ---- writes


def directly(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def by_item(tensor: torch.Tensor) -> None:
    tensor[...] = 1


def through_a_view(tensor: torch.Tensor) -> None:
    tensor.view_as(tensor).unsqueeze(0).mul_(2)


def by_out(tensor: torch.Tensor) -> None:
    torch.add(tensor.clone(), 1, out=tensor)


def by_foreach(tensor: torch.Tensor) -> None:
    torch._foreach_add_([tensor], 1)  # pyright: ignore[reportPrivateImportUsage] (what optimizers use)


def by_copying(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.ones_like(tensor))


WRITES = (directly, by_item, through_a_view, by_out, by_foreach, by_copying)


def writing(write: Callable[[torch.Tensor], None], where: str) -> Call:
    """A function that writes to one of its arguments."""

    def function(params: Any, x: torch.Tensor, *, tree: Any) -> torch.Tensor:
        targets = {"params": params["w"], "x": x, "tree": tree[1]["t"]}
        with torch.no_grad():
            write(targets[where])
        return x * real(params["w"]).sum()

    return function


PATHS = {"params": "['w']", "x": "", "tree": "[1]['t']"}


@given(splits(at_least=1), st.sampled_from(CALLS), st.sampled_from(WRITES), st.data())
def test_l7_a_write_is_an_error_that_names_the_leaf(split: Split, through: Call, write: Any, data: st.DataObject):
    where = data.draw(st.sampled_from(list(PATHS)))
    dtype = data.draw(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]))
    whole = data.draw(st.booleans())
    params = {"b": torch.ones(2), "w": torch.ones(2, dtype=torch.float64)}
    x = torch.ones(split.rows, 3, dtype=torch.float64)
    tree = ["text", {"s": torch.ones(split.rows), "t": torch.ones(split.rows, 2, dtype=dtype)}]
    dims = [0, {"s": 0, "t": None if whole else 0}]
    name = {"params": "params", "x": "inputs[0]", "tree": "kwargs['tree']"}[where]
    if through is not through_dp_apply:
        name = {"params": "args[0]", "x": "args[1]"}.get(where, name)
    message = (
        f"{through.__name__.removeprefix('through_')}: the function wrote in place to {name}{PATHS[where]}. It must"
    )
    texts = [re.escape(message)]
    if split.executor == "threads" and through is not through_dp_apply:  # the backward of another shard may see it
        texts.append("modified by an inplace operation")
    with pytest.raises(RuntimeError, match="|".join(texts)):
        through(writing(write, where), params, x, tree, split, dims)


@given(splits(at_least=1), st.sampled_from(CALLS), st.sampled_from(WRITES), st.sampled_from(["params", "tree"]))
def test_l7_a_write_to_slots_is_an_error(split: Split, through: Call, write: Any, where: str):
    batch = [torch.ones(split.rows, 3, dtype=torch.float64), ["text", {"t": torch.ones(split.rows)}]]
    x, tree = (fdp.scatter(part, split.devices, weights=split.weights) for part in batch)
    split = split._replace(devices=x.devices, weights=None)
    params = fdp.replicate({"w": torch.ones(2, dtype=torch.float64)}, split.devices)
    name = {"params": "params" if through is through_dp_apply else r"args\[0\]", "tree": r"kwargs\['tree'\]"}[where]
    with pytest.raises(RuntimeError, match=f"the function wrote in place to {name}"):
        through(writing(write, where), params, x, tree, split, 0)


@given(splits(at_least=1), st.sampled_from(CALLS[:2]), st.sampled_from(WRITES), st.sampled_from(["params", "tree"]))
def test_l7_a_write_to_copies_is_an_error(split: Split, through: Call, write: Any, where: str):
    """On another device the function has copies of the arguments, which others may have as well."""
    params, x = {"w": torch.ones(2, dtype=torch.float64)}, torch.ones(split.rows, 3, dtype=torch.float64)
    tree = ["text", {"t": torch.ones(split.rows)}]
    before = state_of(params, x, tree)
    name = {"params": "params" if through is through_dp_apply else "args[0]", "tree": "kwargs['tree']"}[where]
    with pytest.raises(RuntimeError, match=re.escape(f"the function wrote in place to {name}{PATHS[where]}. It must")):
        through(writing(write, where), params, x, tree, split._replace(devices=["meta"] * split.slots), 0)
    assert same_state(before, state_of(params, x, tree))


@given(splits(at_least=1), st.sampled_from(WRITES))
def test_l7_state_may_be_written(split: Split, write: Any):
    """`parallel_apply` runs on state of the caller's own, which is on the slots."""
    kept = {"w": torch.ones(2, dtype=torch.float64)}
    state = fdp.replicate(kept, split.devices)
    plain = torch.ones(2, dtype=torch.float64)

    def function(state: Any, plain: torch.Tensor) -> torch.Tensor:
        write(state["w"])
        write(plain)
        return plain

    written = fdp.parallel_apply(function, state, plain, executor=split.executor)
    assert isinstance(written, fdp.Sharded)
    want = torch.ones(2, dtype=torch.float64)
    write(want)
    assert_same([shard["w"] for shard in state.shards], [want] * len(state))
    assert_same(list(written.shards), [want] * len(written))
    assert torch.equal(kept["w"], torch.ones(2, dtype=torch.float64))
    assert torch.equal(plain, torch.ones(2, dtype=torch.float64))


# ---- L11

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def surroundings() -> list[Any]:
    """What a function sees of its caller."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        str(torch.empty(0).device),
        torch.are_deterministic_algorithms_enabled(),
        VARIABLE.get(),
    ]


@contextlib.contextmanager
def variable() -> Iterator[None]:
    token = VARIABLE.set(7)
    try:
        yield
    finally:
        VARIABLE.reset(token)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "dtype": lambda: default_dtype(torch.float64),
    "variable": variable,
}


@given(splits(), st.lists(st.sampled_from(list(MODES)), unique=True), st.sampled_from(CALLS))
def test_l11_the_function_sees_its_surroundings(split: Split, modes: list[str], through: Call):
    params, x = {"w": torch.ones((), dtype=torch.float64)}, torch.ones(split.rows, 3, dtype=torch.float64)
    seen: list[Any] = []

    def function(params: Any, x: torch.Tensor, *, tree: Any) -> torch.Tensor:
        seen.append(surroundings())
        VARIABLE.set(-1)
        return x * params["w"]

    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(MODES[mode]())
        here = surroundings()
        through(function, params, x, None, split, 0)
        assert surroundings() == here
    if through is through_value_and_grad:
        here[:2] = [True, False]  # as in torch.func: gradients need it so
    assert seen
    assert all(one == here for one in seen)


# Autocast is set for one type of device, and of these slots some are on the CPU.
@given(splits(at_least=1), st.sampled_from(["no_grad", "inference", "dtype"] + ["autocast"] * (not ACCELERATOR)))
def test_l11_outputs_are_those_of_the_surroundings(split: Split, mode: str):
    x = torch.ones(split.rows, 3)
    w = torch.ones(3, 2, requires_grad=True)
    with MODES[mode]():
        got, want = fdp.dp_apply(lambda w, x: x @ w, w, x, **split.options), x @ w
    assert (got.dtype, got.requires_grad, got.is_inference()) == (want.dtype, want.requires_grad, want.is_inference())
    assert_same(got, want)
