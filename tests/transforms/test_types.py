# pyright: strict
"""What a type checker knows of a user's code: `make check-types` reads this file, and the tests run it."""

from typing import assert_type

import torch
from torch import Tensor, nn

import fdp
from tests.common.numbers import numbers

Params = dict[str, Tensor]
SLOTS = fdp.virtual_devices(2)
PARAMS, X, Y = {"w": numbers(3)}, numbers(5, 3), numbers(5)


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (x @ params["w"] - y).square().mean()


def loss_with_aux(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    return loss(params, x, y), 1.0


def rows(params: Params, x: Tensor, y: Tensor) -> int:
    return len(x)


def step(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    return params, (x @ params["w"]).sum()


def test_gradients_keep_the_arguments():
    value, grads = assert_type(fdp.value_and_grad(loss, devices=SLOTS)(PARAMS, X, y=Y), tuple[Tensor, Params])
    assert_type(fdp.grad_and_value(loss, devices=SLOTS)(PARAMS, X, Y), tuple[Params, Tensor])
    assert_type(fdp.grad(loss)(PARAMS, X, Y), Params)
    with_aux = fdp.value_and_grad(loss_with_aux, has_aux=True, devices=SLOTS, count=rows)
    assert_type(with_aux(PARAMS, X, Y), tuple[tuple[Tensor, float], Params])
    assert_type(fdp.grad_and_value(loss_with_aux, has_aux=True)(PARAMS, X, Y), tuple[Params, tuple[Tensor, float]])
    assert_type(fdp.grad(loss_with_aux, has_aux=True)(PARAMS, X, Y), tuple[Params, float])
    both = fdp.value_and_grad(loss, argnums=(0, 1), in_dims=(None, 0, 0), devices=SLOTS)(PARAMS, X, Y)
    assert value.ndim == 0
    assert grads.keys() == both[1][0].keys()


def wrong_arguments() -> None:
    """Never called: each line is an error."""
    fdp.value_and_grad(loss)(PARAMS, X)  # pyright: ignore[reportCallIssue, reportArgumentType]
    fdp.value_and_grad(loss)(PARAMS, X, Y, Y)  # pyright: ignore[reportCallIssue, reportArgumentType]
    fdp.value_and_grad(loss)(PARAMS, "x", Y)  # pyright: ignore[reportCallIssue, reportArgumentType]
    fdp.value_and_grad(loss, device="cpu")  # pyright: ignore[reportCallIssue]
    fdp.value_and_grad(loss, SLOTS)  # pyright: ignore[reportCallIssue, reportArgumentType]
    fdp.shard_map(loss, in_dims=(None, 0, 0))(PARAMS, X)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_batches_that_are_on_their_slots():
    on_slots = fdp.value_and_grad(loss)
    x, y = fdp.scatter((X, Y), SLOTS).unzip()
    assert_type(on_slots(PARAMS, x, y), tuple[Tensor, Params])
    for batch in fdp.prefetch([(X, Y)], SLOTS):
        assert_type(on_slots(PARAMS, *batch.unzip()), tuple[Tensor, Params])
    everywhere = fdp.replicate(PARAMS, SLOTS)
    value, grads = on_slots(everywhere, x, y)
    assert value.ndim == 0
    assert isinstance(grads, fdp.Replicated)


def test_functions_of_shards_keep_their_types():
    out = assert_type(fdp.shard_map(torch.mul, devices=SLOTS)(X, X), Tensor)
    each = fdp.shard_map(torch.mul, devices=SLOTS, out_dims="list")(X, X)
    assert isinstance(each, list)
    assert out.shape == X.shape


def test_state_that_stays():
    params, x = fdp.replicate(PARAMS, SLOTS), fdp.scatter(X, SLOTS)
    new, sums = assert_type(fdp.parallel_apply(step, params, x), tuple[fdp.Sharded, ...])
    total = assert_type(fdp.parallel_apply(torch.sum, x), fdp.Sharded)
    assert len(new) == len(sums) == len(total) == len(SLOTS)


def test_modules():
    apply, (params, buffers) = fdp.functional(nn.Linear(3, 1).double())
    assert_type(params, Params)

    def of_module(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        out, new = apply((params, buffers), x)
        return (out[:, 0] - y).square().mean(), new

    (value, new), grads = fdp.value_and_grad(of_module, has_aux=True, devices=SLOTS)(params, X, Y)
    assert_type(new, Params)
    assert value.ndim == 0
    assert grads.keys() == params.keys()
