"""What is differentiated: arguments, trees, dtypes, and what is on slots already."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.containers import Batch, Output, Point, tensors_of
from tests.common.functions import never
from tests.common.numbers import numbers
from tests.transforms.losses import W, X, Y, loss, oracle, tree_loss

SLOTS = fdp.virtual_devices(3)


# ---- which arguments


@pytest.mark.parametrize("argnums", [0, 1, -1, -3, (0,), (0, 1), (1, 0), (2, -3), (-2, -1, 0)])
def test_argnums(argnums: Any):
    got = fdp.value_and_grad(loss, argnums, devices=SLOTS, in_dims=(None, 0, 0))(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y, argnums=argnums))


def test_auto_splits_what_is_not_differentiated():
    seen: list[Any] = []

    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        seen.append((len(x), len(w), len(y)))
        return loss(w, x, y)

    fdp.grad(fn, -2, devices=SLOTS)(X, W, Y)
    assert seen == [(3, 4, 3), (2, 4, 2), (2, 4, 2)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_items_differentiated(kind: Callable[..., Any]):
    def fn(w: Tensor, images: Any) -> Tensor:
        return torch.stack([torch.tanh(image["a"] * w).sum() for image in images]).mean()

    images = kind({"a": numbers(i, 4)} for i in range(1, 6))
    got = fdp.value_and_grad(fn, (0, 1), devices=SLOTS, in_dims=(None, "items"))(W, images)
    assert_close_tree(got, oracle(fn, W, images, argnums=(0, 1)))


def test_containers_of_the_gradients_are_those_of_the_argument():
    params = {"b": Batch(numbers(4), [numbers(4)], tag=numbers(4)), "a": Output(loss=numbers(4)), "n": None, "e": ()}

    def fn(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(p["b"].x * p["b"].y[0] + p["b"].tag + p["a"].loss, x, y)

    assert_close_tree(fdp.grad(fn, devices=SLOTS)(params, X, Y), oracle(fn, params, X, Y)[1])


def test_tied_tensors_are_arguments_of_their_own():
    w = numbers(4)
    params = {"a": w, "b": [w]}

    def fn(p: Any, x: Tensor, w: Tensor) -> Tensor:
        return ((x * p["a"]).sum(1) * (x * p["b"][0] ** 2 * w).sum(1)).mean()

    want = oracle(fn, params, X, w)[1]
    for state in (params, fdp.replicate(params, SLOTS)):
        grads = fdp.grad(fn, devices=SLOTS, in_dims=(None, 0, None))(state, X, w)
        assert_close_tree(grads[1] if isinstance(grads, fdp.Replicated) else grads, want)
    w.requires_grad_()
    assert_close_tree(fdp.grad(fn, devices=SLOTS, in_dims=(None, 0, None))(params, X, w), want)


def test_unused_parameters_get_zeros():
    params = {"w": W, "unused": numbers(2, 3), "float": numbers(2, dtype=torch.float32)}
    for slots in (1, 3):
        devices = fdp.virtual_devices(slots)
        grads = fdp.grad(lambda p, x, y: loss(p["w"], x, y), devices=devices)(params, X, Y)
        assert_close_tree(grads, oracle(lambda p, x, y: loss(p["w"], x, y), params, X, Y)[1])
        grads = fdp.grad(lambda p, x: x.mean(), devices=devices)(params, X)
        assert_same_tree(grads, {name: torch.zeros_like(value) for name, value in params.items()})


def test_parameters_that_only_some_shards_use():
    def fn(p: Any, x: Tensor) -> Tensor:
        return (x * (p["a"] if x[0, 0] == X[0, 0] else p["b"])).mean()

    grads = fdp.grad(fn, devices=SLOTS)({"a": W, "b": W.clone()}, X)
    assert_close_tree(grads["a"] + grads["b"], X.mean(0) / 4)
    assert_close_tree(grads["a"], X[:3].sum(0) / 28)


def test_complex_parameters():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return ((x * w).sum(1).abs() ** 2).mean()

    w = numbers(4, dtype=torch.complex128)
    assert_close_tree(fdp.value_and_grad(fn, devices=SLOTS)(w, X), oracle(fn, w, X))
    x = numbers(7, 4, dtype=torch.complex128)
    got = fdp.value_and_grad(fn, (0, 1), devices=SLOTS, in_dims=(None, 0))(w, x)
    assert_close_tree(got, oracle(fn, w, x, argnums=(0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(dtype: torch.dtype):
    w, x, y = W.to(dtype), X.to(dtype), Y.to(dtype)
    assert_close_tree(fdp.value_and_grad(loss, devices=SLOTS)(w, x, y), oracle(loss, w, x, y), rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("replicated", [False, True])
def test_many_small_parts_add_up_in_low_precision(dtype: torch.dtype, replicated: bool):
    w, x = torch.ones(2, dtype=dtype), torch.ones(1000, 2, dtype=dtype)
    state = fdp.replicate(w, "cpu") if replicated else w
    value, grad = fdp.value_and_grad(lambda w, x: (x * w).mean(), devices="cpu", microbatches=1000)(state, x)
    grad = grad[0] if isinstance(grad, fdp.Replicated) else grad
    assert_close_tree((value, grad), (w[0], w / 2), rtol=1e-2)


def test_sparse_and_dense_gradients_add_up():
    def fn(table: Tensor, index: Tensor) -> Tensor:
        return (F.embedding(index, table, sparse=True) if index[0] in (0, 3) else table[index]).sum(1).mean()

    table, index = numbers(5, 3), torch.arange(5)
    for parts in (index, index.flip(0)):
        grad = fdp.grad(fn, devices=SLOTS)(table, parts)
        assert_close_tree(grad.to_dense(), torch.full_like(table, 1 / 5))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("slots", [1, 3])
def test_sparse_gradients_stay_sparse(slots: int, microbatches: int):
    def fn(table: Tensor, index: Tensor, *, sparse: bool = False) -> Tensor:
        return F.embedding(index, table, sparse=sparse).pow(3).sum(1).mean()

    table, index = numbers(50, 3), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    want = oracle(fn, table, index)[1]
    options: Any = {"devices": fdp.virtual_devices(slots), "microbatches": microbatches}
    grad = fdp.grad(fn, **options)(table, index, sparse=True)
    assert grad.layout is torch.sparse_coo
    assert_close_tree(grad.to_dense(), want)
    replicated = fdp.grad(fn, **options)(fdp.replicate(table, fdp.virtual_devices(slots)), index, sparse=True)
    assert replicated[0].layout is torch.sparse_coo
    assert_close_tree(replicated[0].to_dense(), want)


# ---- Sharded and Replicated


@pytest.mark.parametrize("slots", [3, 5])
@pytest.mark.parametrize("rows", [7, 2])
def test_gradients_of_a_replicated_are_replicated(slots: int, rows: int):
    params = {"w": W, "b": Point([numbers()], None)}
    replicated = fdp.replicate(params, fdp.virtual_devices(slots))
    x, y = X[:rows], Y[:rows]
    value, grads = fdp.value_and_grad(tree_loss, devices=SLOTS)(replicated, x, y)
    want = oracle(tree_loss, params, x, y)
    assert type(grads) is fdp.Replicated
    assert grads.devices == replicated.devices
    for shard in grads.shards:
        assert_close_tree((value, shard), want)
    assert len({tensor.data_ptr() for shard in grads.shards for tensor in tensors_of(shard)}) == 2 * slots


def test_gradients_of_a_part_that_is_replicated():
    params = {"w": fdp.replicate(W, SLOTS), "b": Point([numbers()], None)}
    grads = fdp.grad(tree_loss, devices=SLOTS)(params, X, Y)
    want = oracle(tree_loss, {"w": W, "b": Point([numbers()], None)}, X, Y)[1]
    assert_close_tree(fdp.unreplicate(grads["w"], slot=2), want["w"])
    assert_close_tree(grads["b"], want["b"])


def test_unused_parts_of_a_replicated_get_zeros():
    replicated = fdp.replicate({"w": W, "unused": numbers(2)}, SLOTS)
    grads = fdp.grad(lambda p, x, y: loss(p["w"], x, y))(replicated, X, Y)
    assert_same_tree([shard["unused"] for shard in grads.shards], [torch.zeros(2, dtype=torch.float64)] * 3)


def test_a_sharded_batch_fixes_the_plan():
    x, y = fdp.scatter((X, Y), SLOTS, weights=(1, 5, 1)).unzip()
    assert_close_tree(fdp.value_and_grad(loss)(W, x, y), oracle(loss, W, X, Y))
    assert_close_tree(fdp.value_and_grad(loss)(fdp.replicate(W, SLOTS), x, y)[0], oracle(loss, W, X, Y)[0])
    with pytest.raises(
        ValueError, match=r"value_and_grad: args\[1\] is a Sharded, which fixes the rows .*drop weights"
    ):
        fdp.value_and_grad(never, weights=(1, 1, 1))(W, x, y)


@pytest.mark.parametrize("microbatches", [2, 5])
@pytest.mark.parametrize("kind", ["scattered", "other-dim", "mapped"])
def test_a_sharded_batch_in_microbatches(kind: str, microbatches: int):
    seen: list[int] = []

    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = x.T if kind == "other-dim" else x
        seen.append(len(x))
        assert len(x) == len(y)
        return loss(w, x, y)

    x = fdp.scatter(X.T, SLOTS, 1) if kind == "other-dim" else fdp.scatter(X, SLOTS)
    x = x.map(lambda shard: shard) if kind == "mapped" else x
    got = fdp.value_and_grad(fn, microbatches=microbatches)(W, x, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))
    assert max(seen) == {2: 2, 5: 1}[microbatches]


def test_a_sharded_is_not_differentiated_in():
    sharded = fdp.scatter(X, SLOTS)
    with pytest.raises(
        ValueError, match=r"grad: args\[0\] is a Sharded, .*fdp\.Replicated\(x\.shards, x\.devices\).*fdp\.gather"
    ):
        fdp.grad(never)(sharded, X)
    with pytest.raises(ValueError, match=r"grad: args\[1\]\['x'\] is a Sharded, .*fdp\.gather\(x\)"):
        fdp.grad(never, 1, in_dims=(None, {"x": 0}, 0))(W, {"x": sharded}, Y)
    got = fdp.grad(loss, 1, in_dims=(None, 0, 0), devices=SLOTS)(W, fdp.gather(sharded), Y)  # what the message says
    assert_close_tree(got, oracle(loss, W, X, Y, argnums=1)[1])
    shards = fdp.parallel_apply(lambda w: w, W, devices=SLOTS)
    assert isinstance(shards, fdp.Sharded)
    grads = fdp.grad(loss)(fdp.Replicated(shards.shards, shards.devices), X, Y)  # what the message says
    assert_close_tree(grads[0], oracle(loss, W, X, Y)[1])
