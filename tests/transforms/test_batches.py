"""Batches of `(x, y)` as a loader makes them, which are lists: what to write, and what the messages say."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(2)
W, X, Y = numbers(3), numbers(7, 3), numbers(7)
ANY: Any = fdp  # a type checker finds these slips too
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ w - y) ** 2).mean()


def of_pair(w: Tensor, batch: Any) -> Tensor:
    x, y = batch
    return loss(w, x, y)


def residual(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x @ w - y


def test_a_loader_of_pairs():
    """Every way to pass them has the numbers of one device."""
    step, pair = fdp.value_and_grad(loss, devices=SLOTS), fdp.value_and_grad(of_pair, devices=SLOTS)
    with fdp.distributed.init(devices=SLOTS) as mesh:
        ahead = zip(LOADER, fdp.prefetch(LOADER, SLOTS), fdp.prefetch(map(mesh.local, LOADER), mesh), strict=True)
        for batch, sharded, on_mesh in ahead:
            assert type(batch) is list
            want = torch.func.grad_and_value(loss)(W, *batch)[::-1]
            assert_close_tree(step(W, *batch), want)
            assert_close_tree(step(W, *sharded.unzip()), want)
            assert_close_tree(fdp.value_and_grad(loss, devices=mesh)(W, *on_mesh.unzip()), want)
            assert_close_tree(fdp.value_and_grad(loss, devices=mesh)(W, *mesh.local(batch)), want)
            assert_close_tree(pair(W, batch), want)
            assert_close_tree(pair(W, sharded), want)
            for inputs in (tuple(batch), sharded.unzip()):
                assert_close_tree(fdp.dp_apply(residual, W, inputs, SLOTS), residual(W, *batch))


BATCH = [X, Y]
SHARDED = fdp.scatter(BATCH, SLOTS)
ONE_FOR_SEVERAL: dict[str, Callable[[], Any]] = {
    "dp_apply": lambda: fdp.dp_apply(residual, W, BATCH, SLOTS),
    "dp_apply-sharded": lambda: fdp.dp_apply(residual, W, SHARDED),
    "dp_apply-partial": lambda: fdp.dp_apply(functools.partial(residual), W, BATCH, SLOTS),
    "shard_map": lambda: ANY.shard_map(residual, devices=SLOTS, in_dims=(None, 0))(W, BATCH),
    "gradient": lambda: ANY.value_and_grad(loss, devices=SLOTS)(W, BATCH),
    "gradient-tuple": lambda: ANY.grad(loss, devices=SLOTS)(W, tuple(BATCH)),
    "gradient-sharded": lambda: ANY.grad(loss)(W, SHARDED),
    "parallel_apply": lambda: fdp.parallel_apply(residual, fdp.replicate(W, SLOTS), SHARDED),
}


@pytest.mark.parametrize("name", ONE_FOR_SEVERAL)
def test_one_list_for_several_arguments(name: str):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'") as caught:
        ONE_FOR_SEVERAL[name]()
    kind = "tuple" if name == "gradient-tuple" else "list"
    assert (
        f"argument 1 of the function is a {kind}, as it was passed. For its elements as arguments of their own pass "
        "tuple(batch) to dp_apply, *batch to others, and .unzip() of what is on slots"
    ) in caught.value.__notes__


class Pairwise(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y[:, None]


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_functions_of_any_arguments_fail_with_a_note(executor: Any):
    """What `functional` returns takes whatever the module does, so only the failure tells."""
    apply, state = fdp.functional(Pairwise())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'") as caught:
        fdp.dp_apply(apply, state, BATCH, SLOTS, executor=executor)
    assert any("argument 1 of apply is a list" in note for note in caught.value.__notes__)
    assert_close_tree(fdp.dp_apply(apply, state, tuple(BATCH), SLOTS, executor=executor)[0], X * Y[:, None])
    with pytest.raises(TypeError, match="'list' and 'Tensor'") as caught:
        fdp.grad(lambda w, *x: (x[0] @ w).mean(), devices=SLOTS, executor=executor)(W, [X])
    assert any("tuple(batch) to dp_apply, *batch to others" in note for note in caught.value.__notes__)


def test_a_check_of_one_list_for_several_arguments_fails_with_a_note():
    for check in (fdp.testing.assert_data_parallel, fdp.testing.find_nonfinite):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'") as caught:
            check(residual, W, BATCH)
        assert any("argument 1 of the function is a list" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("batch", "dims", "way_out"), [(BATCH, (0, 0), "[0, 0]"), (tuple(BATCH), [0, 0], "(0, 0)")])
def test_specs_of_a_list_are_a_list(batch: Any, dims: Any, way_out: str):
    with pytest.raises(ValueError, match=rf"not a prefix of it\. Write {re.escape(way_out)} there$"):
        fdp.scatter(batch, SLOTS, dims)
    with pytest.raises(ValueError, match=r"not a prefix of it$"):
        fdp.scatter(batch, SLOTS, type(dims)([0, 0, 0]))


def test_a_batch_on_slots_is_no_pair():
    with pytest.raises(TypeError, match=r"not iterable.*Use x\.unzip\(\) for a Sharded of tuples or lists"):
        for _x, _y in fdp.prefetch(LOADER, SLOTS):
            pass


def test_a_function_that_takes_a_list_fails_without_a_note():
    def fails(w: Tensor, batch: list[Tensor]) -> Tensor:
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else") as caught:
        fdp.dp_apply(fails, W, BATCH, SLOTS)
    assert not any("is a list" in note for note in caught.value.__notes__)


def test_a_wrapper_that_takes_other_arguments_is_called():
    @functools.wraps(loss)
    def wrapped(w: Tensor, batch: Any) -> Tensor:
        return loss(w, *batch)

    want = torch.func.grad_and_value(loss)(W, X, Y)[::-1]
    assert_close_tree(fdp.value_and_grad(wrapped, devices=SLOTS)(W, BATCH), want)
