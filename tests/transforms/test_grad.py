"""Gradients: those of the whole batch on one device, for every way to split it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree, unharmed
from tests.common.containers import Batch, Output, Point, tensors_of, with_tensors
from tests.common.numbers import COUNTS, numbers

SLOTS = fdp.virtual_devices(3)
W = numbers(4)
X = numbers(7, 4)
Y = numbers(7) / 2
MASK = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.float64)
ROWS = (36, 13, 9, 3, 1)


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((torch.tanh(x * w).sum(1) - y) ** 2).mean()


def weighted_loss(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A mean over what the mask counts."""
    return ((torch.tanh(x * w).sum(1) - y) ** 2 * mask).sum() / mask.sum()


def mask_sum(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return mask.sum()


def tree_loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss(params["w"] + params["b"].x[0], x, y)


def oracle(fn: Any, *args: Any, argnums: Any = 0, has_aux: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """`(value, grads)` by torch.func on one device, which knows fewer trees: it gets a list of tensors."""
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    positions = [i % len(args) for i in numbers]

    def of_tensors(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        given = list(args)
        for i in positions:
            given[i] = with_tensors(args[i], rest)
        return fn(*given, **kwargs)

    tensors = [tensor for i in positions for tensor in tensors_of(args[i])]
    grads, value = torch.func.grad_and_value(of_tensors, tuple(range(len(tensors))), has_aux)(*tensors)
    rest = iter(grads)
    trees = tuple(with_tensors(args[i], rest) for i in positions)
    return value, trees if isinstance(argnums, tuple) else trees[0]


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("ran before everything was checked")


# ---- the law


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slots", COUNTS)
def test_equals_one_device(slots: int, rows: int):
    params = {"w": numbers(4), "b": Point([numbers()], None)}
    x, y = numbers(rows, 4), numbers(rows) / 2
    options: Any = {"devices": fdp.virtual_devices(slots)}
    want = oracle(tree_loss, params, x, y)
    with unharmed(params, x, y):
        assert_close_tree(fdp.value_and_grad(tree_loss, **options)(params, x, y), want)
        assert_close_tree(fdp.grad_and_value(tree_loss, **options)(params, x, y), want[::-1])
        assert_close_tree(fdp.grad(tree_loss, **options)(params, x, y), want[1])


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("weights", [None, "uneven"])
def test_weights_do_not_change_the_result(slots: int, weights: Any):
    weights = weights and [0, 5, 0, 1, 2, 0, 1][-slots:]
    got = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), weights=weights)(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))


@pytest.mark.parametrize("slots", [1, 3])
def test_aux_comes_with_the_value(slots: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return loss(w, x, y), {"m": x.mean()}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots)}
    (value, aux), grads = want = oracle(fn, W, X, Y, has_aux=True)
    assert_close_tree(fdp.value_and_grad(fn, **options)(W, X, Y), want)
    assert_close_tree(fdp.grad_and_value(fn, **options)(W, X, Y), (grads, (value, aux)))
    assert_close_tree(fdp.grad(fn, **options)(W, X, Y), (grads, aux))


def test_keyword_arguments_are_split():
    def fn(w: Tensor, x: Tensor, *, batch: Batch, scale: Tensor, names: list[str]) -> Tensor:
        assert len(names) == len(x)
        return loss(w * scale, x, batch.x)

    batch = Batch(Y, numbers(3))
    kwargs = {"batch": batch, "scale": torch.tensor(2.0, dtype=torch.float64), "names": list("abcdefg")}
    dims = {"batch": {"y": None}, "names": "items"}
    got = fdp.value_and_grad(fn, devices=SLOTS, kwarg_dims=dims)(W, X, **kwargs)
    assert_close_tree(got, oracle(fn, W, X, **kwargs))


def test_sum():
    def total(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss(w, x, y) * len(x)

    for slots in COUNTS:
        got = fdp.value_and_grad(total, devices=fdp.virtual_devices(slots), reduction="sum")(W, X, Y)
        assert_close_tree(got, oracle(total, W, X, Y))
    got = fdp.value_and_grad(lambda w, x: (w * x).sum(), devices=SLOTS, reduction="sum")(W, X[:0])
    assert_close_tree(got, (torch.zeros_like(W).sum(), torch.zeros_like(W)))


def test_without_anything_to_split():
    assert_close_tree(fdp.value_and_grad(lambda w: (w**3).sum(), devices=SLOTS)(W), oracle(lambda w: (w**3).sum(), W))


def test_weights_go_in_before_the_backward():
    seeds: list[float] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        out = (x @ w).mean()
        out.register_hook(lambda grad: seeds.append(float(grad)))
        return out

    fdp.grad(fn, devices=SLOTS)(W, X)
    assert seeds == [3 / 7, 2 / 7, 2 / 7]
    seeds.clear()
    fdp.grad(fn, devices=SLOTS, reduction="sum")(W, X)
    assert seeds == [1, 1, 1]
    seeds.clear()
    fdp.grad(fn, devices=SLOTS, count=lambda w, x: 2 * x.shape[0] ** 2, microbatches=2)(W, X)
    assert seeds == [4 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9]


def test_ten_runs_are_the_same():
    runs = [fdp.value_and_grad(loss, devices=SLOTS)(W, X, Y) for _ in range(10)]
    for run in runs:
        assert_same_tree(run, runs[0])


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


def test_gradients_of_a_sharded_are_sharded():
    sharded = fdp.scatter({"x": X}, SLOTS, weights=(1, 2, 4))
    grads = fdp.grad(lambda w, b, y: loss(w, b["x"], y), 1, in_dims=(None, 0, 0))(W, sharded, Y)
    assert type(grads) is fdp.Sharded
    assert (grads.devices, grads.sizes) == (sharded.devices, (1, 2, 4))
    assert [len(shard["x"]) for shard in grads.shards] == [1, 2, 4]
    assert_close_tree(fdp.gather(grads)["x"], oracle(loss, W, X, Y, argnums=1)[1])


def test_idle_slots_of_a_sharded_have_empty_gradients():
    sharded = fdp.scatter(X[:2], SLOTS, keep_empty=True)
    grads = fdp.grad(loss, 1, in_dims=(None, 0, 0))(W, sharded, Y[:2])
    assert grads.sizes == (1, 1, 0)
    assert_close_tree(fdp.gather(grads), oracle(loss, W, X[:2], Y[:2], argnums=1)[1])


def test_a_sharded_is_differentiated_in_what_was_split():
    """Each slot would hold a part of the gradient of anything else, which no `gather` could tell."""
    sharded = fdp.scatter({"x": X, "scale": W[0]}, SLOTS)
    with pytest.raises(ValueError, match=r"^grad: args\[1\]\['scale'\] was not split, .* in an argument of its own"):
        fdp.grad(never, 1, in_dims=(None, 0, 0))(W, sharded, Y)


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


def test_a_sharded_cannot_be_differentiated_in_microbatches():
    sharded = fdp.scatter(X, SLOTS)
    with pytest.raises(
        ValueError, match=r"grad: args\[1\] is a Sharded, which cannot be differentiated in microbatches"
    ):
        fdp.grad(never, 1, in_dims=(None, 0, 0), microbatches=2)(W, sharded, Y)


def test_a_sharded_is_no_parameter():
    with pytest.raises(
        ValueError, match=r"grad: args\[0\] is a Sharded\. .*fdp\.Replicated\(x\.shards, x\.devices\).*in_dims"
    ):
        fdp.grad(never)(fdp.scatter(X, SLOTS), X)
    shards = fdp.parallel_apply(lambda w: w, W, devices=SLOTS)
    assert isinstance(shards, fdp.Sharded)
    grads = fdp.grad(loss)(fdp.Replicated(shards.shards, shards.devices), X, Y)  # what the message says
    assert_close_tree(grads[0], oracle(loss, W, X, Y)[1])


# ---- count


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("kind", ["int", "float", "tensor", "bool-sum"])
def test_count_is_what_the_mean_is_over(slots: int, kind: str):
    counts: dict[str, Callable[..., Any]] = {
        "int": lambda w, x, y, mask: int(mask.sum()),
        "float": lambda w, x, y, mask: float(mask.sum()),
        "tensor": mask_sum,
        "bool-sum": lambda w, x, y, mask: (mask > 0).sum(),
    }
    got = fdp.value_and_grad(weighted_loss, devices=fdp.virtual_devices(slots), count=counts[kind])(W, X, Y, MASK)
    assert_close_tree(got, oracle(weighted_loss, W, X, Y, MASK))


def test_count_is_called_as_the_loss_is():
    seen: list[Any] = []

    def count(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs))
        return len(args[1])

    fdp.grad(lambda w, x, *, y: loss(w, x, y), devices=SLOTS, count=count)(W, X, y=Y)
    want = [((W, X[a:b]), {"y": Y[a:b]}) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert_same_tree(seen, want)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_shard_of_weight_0_is_left_out(slots: int, transformed: bool):
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0], dtype=torch.float64)  # without the mask the last shard divides 0 by 0

    def fn(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        value = weighted_loss(w, x, y, mask)
        return value, {"value": value * 2, "w": w * value}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "count": mask_sum, "aux_weight": "count"}
    with torch.inference_mode(transformed):
        (value, aux), grads = fdp.value_and_grad(fn, **options)(W, X, Y, mask)
    want = oracle(weighted_loss, W, X[:4], Y[:4], mask[:4])
    assert_close_tree((value, grads), want)
    assert_close_tree(aux, {"value": 2 * value, "w": W * value})


WRONG_COUNTS: dict[str, tuple[Callable[..., Any], str]] = {
    "zero": (lambda w, x: 0, "count is zero on all shards, and the mean over nothing is not defined"),
    "zero-tensor": (lambda w, x: x.new_zeros(()), "count is zero on all shards"),
    "negative": (lambda w, x: -1, r"count must return a finite number that is not negative, got \[-1.0"),
    "nan": (lambda w, x: float("nan"), r"count must return a finite number that is not negative, got \[nan"),
    "infinite": (lambda w, x: float("inf"), r"count must return a finite number that is not negative, got \[inf"),
    "rows": (lambda w, x: x, "count must return a .*number"),
    "none": (lambda w, x: None, "count must return a .*number"),
    "text": (lambda w, x: "seven", "count must return a .*number"),
}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_wrong_counts(name: str, slots: int):
    count, message = WRONG_COUNTS[name]
    with unharmed(W, X), pytest.raises((TypeError, ValueError), match=rf"^value_and_grad: {message}"):
        fdp.value_and_grad(lambda w, x: (w * x).mean(), devices=fdp.virtual_devices(slots), count=count)(W, X)


def test_negative_count_on_one_shard():
    with pytest.raises(ValueError, match=r"count must return .* not negative, got \[3.0, -2.0, 2.0\]"):
        fdp.grad(never, devices=SLOTS, count=lambda w, x: -2 if x[0, 0] == X[3, 0] else len(x))(W, X)


@pytest.mark.parametrize("count", [3, "tokens", MASK])
def test_count_that_is_no_function(count: Any):
    with pytest.raises(TypeError, match=r"^grad: .*count.*function"):
        fdp.grad(never, devices=SLOTS, count=count)(W, X)


def test_an_exception_in_count_says_where():
    def count(w: Tensor, x: Tensor) -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError, match="division by zero") as info:
        fdp.grad(never, devices=SLOTS, count=count)(W, X)
    assert "in shard 0 of 3" in "".join(info.value.__notes__)


def count_given_mask(mask: Tensor) -> Tensor:
    options: Any = {"in_dims": (None, 0, 0, 0), "devices": SLOTS, "count": mask_sum}
    return fdp.value_and_grad(weighted_loss, **options)(W, X, Y, mask)[0]


COUNT_OPTIONS: Any = {"devices": SLOTS, "count": mask_sum}
DIFFERENTIATED: dict[str, Callable[[Tensor], Any]] = {
    "argnums": lambda mask: fdp.grad(weighted_loss, 3, in_dims=(None, 0, 0, 0), **COUNT_OPTIONS)(W, X, Y, mask),
    "requires-grad": lambda mask: count_given_mask(mask.requires_grad_()),
    "grad": lambda mask: torch.func.grad(count_given_mask)(mask),
    "jvp": lambda mask: torch.func.jvp(count_given_mask, (mask,), (mask,)),
    "dual": lambda mask: dual(count_given_mask, mask, mask),
    "vmap-grad": lambda mask: torch.func.grad(lambda m: torch.func.vmap(lambda w: count_given_mask(m))(W).sum())(mask),
    "params": lambda mask: fdp.grad(loss, devices=SLOTS, count=lambda w, x, y: w.sum() * len(x))(W, X, Y),
}


@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_count_that_is_differentiated_is_refused(way: str):
    """The weights of the shards depend on it too, and the gradient would miss that part."""
    with pytest.raises(
        ValueError, match=r"what count returned depends on something that is differentiated.*count\.item"
    ):
        DIFFERENTIATED[way](MASK + 0.5)


def test_a_count_that_is_taken_for_a_constant():
    got = fdp.value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: w.sum().item() * len(x))(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))
    got = fdp.value_and_grad(loss, devices=SLOTS, count=lambda w, x, y: (w > -9).sum() * len(x))(W, X, Y)
    assert_close_tree(got, oracle(loss, W, X, Y))


# ---- zero rows, and other losses that are none


@pytest.mark.parametrize("slots", COUNTS)
def test_mean_over_zero_rows(slots: int):
    devices = fdp.virtual_devices(slots)
    with unharmed(W):
        options: Any
        for options in ({}, {"microbatches": 3}, {"weights": [1] * slots}):
            with pytest.raises(
                ValueError, match=r"^value_and_grad: there are no rows, and the mean over zero rows is not"
            ):
                fdp.value_and_grad(loss, devices=devices, **options)(W, X[:0], Y[:0])
        with pytest.raises(ValueError, match=r"^grad: there are no rows"):
            fdp.grad(loss)(W, fdp.scatter(X[:0], devices, keep_empty=True), Y[:0])


WRONG_LOSSES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "rows": (
        lambda w, x: x @ w,
        ValueError,
        r"the loss must be a 0-dim tensor, got shape \(\d,\); reduce it with .mean\(\)",
    ),
    "one": (lambda w, x: (x @ w).mean().reshape(1), ValueError, r"the loss must be a 0-dim tensor, got shape \(1,\)"),
    "integer": (
        lambda w, x: (x @ w).sum().long(),
        TypeError,
        "the loss must be a real floating-point tensor, got a tensor of torch.int64",
    ),
    "complex": (
        lambda w, x: (x @ w).sum() + 1j,
        TypeError,
        "the loss must be a real .*got a tensor of torch.complex128",
    ),
    "float": (lambda w, x: 3.0, TypeError, "the loss must be a real floating-point tensor, got a float"),
    "none": (lambda w, x: None, TypeError, "the loss must be a real floating-point tensor, got a NoneType"),
    "tuple": (
        lambda w, x: ((x @ w).mean(), x),
        TypeError,
        "the loss must be .*got a tuple. To return more .*has_aux=True",
    ),
    "dict": (
        lambda w, x: {"loss": (x @ w).mean()},
        TypeError,
        "the loss must be a real floating-point tensor, got a dict",
    ),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_wrong_losses(name: str, slots: int, transformed: bool):
    fn, error, message = WRONG_LOSSES[name]
    with unharmed(W, X), torch.inference_mode(transformed), pytest.raises(error, match=rf"^grad: {message}"):
        fdp.grad(fn, devices=fdp.virtual_devices(slots))(W, X)


@pytest.mark.parametrize("out", [X.mean(), (X.mean(),), (X.mean(), 1, 2), [X.mean(), 1], {"loss": X.mean()}])
def test_has_aux_means_a_pair(out: Any):
    with pytest.raises(TypeError, match=r"grad: with has_aux=True the function must return \(loss, aux\), got a"):
        fdp.grad(lambda w, x: out, has_aux=True, devices=SLOTS)(W, X)


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [
        (torch.tensor(3), r"torch.int64"),
        (torch.tensor([True]), "torch.bool"),
        (2.5, "a float"),
        (True, "a bool"),
        ("text", "a str"),
        (torch.float32, "a dtype"),
    ],
)
@pytest.mark.parametrize("replicated", [False, True])
def test_leaves_that_cannot_be_differentiated(leaf: Any, shown: str, replicated: bool):
    params = {"w": W, "b": [W, leaf]}
    with unharmed(params):
        state = fdp.replicate(params, SLOTS) if replicated else params
        message = r"only floating-point and complex tensors can be differentiated in, not args\[0\].*"
        with pytest.raises(TypeError, match=rf"^grad: {message}\({shown}\).*an argument that argnums does not name"):
            fdp.grad(never, devices=SLOTS)(state, X)


@pytest.mark.parametrize("replicated", [False, True])
def test_leaves_that_cannot_be_differentiated_are_named(replicated: bool):
    params = {"w": W, "b": [W, torch.tensor(3)], "c": 2.5}
    state = fdp.replicate(params, SLOTS) if replicated else params
    with pytest.raises(TypeError, match=r"args\[0\].*\['b'\]\[1\] \(torch.int64\), args\[0\].*\['c'\] \(a float\)\. "):
        fdp.grad(never, devices=SLOTS)(state, X)


def test_split_leaves_that_cannot_be_differentiated():
    with pytest.raises(TypeError, match=r"not args\[1\]\['i'\] \(torch.int64\)\."):
        fdp.grad(never, 1, devices=SLOTS, in_dims=(None, 0))(W, {"x": X, "i": torch.arange(7)})
    with pytest.raises(TypeError, match=r"not args\[1\].* \(a str\)"):
        fdp.grad(never, 1, devices=SLOTS, in_dims=(None, "items"))(W, ["a", "b", "c"])


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "reduction": ({"reduction": "max"}, ValueError, "reduction must be 'mean' or 'sum', got 'max'"),
    "sum-and-count": (
        {"reduction": "sum", "count": len},
        ValueError,
        "count says what a mean is over; reduction='sum' has no use",
    ),
    "argnums-none": ({"argnums": ()}, TypeError, r"argnums must be an int or a tuple of ints, got \(\)"),
    "argnums-list": ({"argnums": [0]}, TypeError, r"argnums must be an int or a tuple of ints, got \[0\]"),
    "argnums-name": ({"argnums": "w"}, TypeError, "argnums must be an int or a tuple of ints, got 'w'"),
    "argnums-bool": ({"argnums": True}, TypeError, "argnums must be an int or a tuple of ints, got True"),
    "argnums-range": ({"argnums": 2}, ValueError, "argnums is 2, but there are 2 positional arguments"),
    "argnums-negative": (
        {"argnums": (0, -3)},
        ValueError,
        r"argnums is \(0, -3\), but there are 2 positional arguments",
    ),
    "argnums-twice": ({"argnums": (0, -2)}, ValueError, r"argnums \(0, -2\) names an argument twice"),
    "create-graph": ({"create_graph": "yes"}, (TypeError, ValueError), "create_graph must be .*'yes'"),
    "aux-dims": ({"aux_dims": "avg", "has_aux": True}, ValueError, "the out_dim for aux is 'avg'; expected an int"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name: str):
    options, error, message = WRONG_OPTIONS[name]
    with pytest.raises(error, match=rf"^value_and_grad: {message}"):
        fdp.value_and_grad(lambda w, x: ((x @ w).mean(), W), devices=SLOTS, **options)(W, X)


def test_no_positional_arguments():
    with pytest.raises(ValueError, match="grad: argnums is 0, but there are 0 positional arguments"):
        fdp.grad(never, devices=SLOTS)(w=W)


@pytest.mark.parametrize("slots", [1, 3])
def test_writes_in_place_are_found(slots: int):
    def writes_params(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            w.add_(1)
        return (w * x).mean()

    def writes_batch(w: Tensor, x: Tensor) -> Tensor:
        return (w * x.mul_(2)).mean()

    devices = fdp.virtual_devices(slots)
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[0\]\['w'\]\. "):
        fdp.grad(lambda p, x: writes_params(p["w"], x), devices=devices)({"w": numbers(4)}, X)
    with pytest.raises(RuntimeError, match=r"^value_and_grad: the function wrote in place to args\[1\]\[0\]\. "):
        fdp.value_and_grad(lambda w, x: writes_batch(w, x[0]), devices=devices)(W, [numbers(7, 4)])
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[0\]"):
        fdp.grad(writes_params, devices=devices)(fdp.replicate(numbers(4), devices), X)
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[1\]"):
        fdp.grad(writes_batch)(W, fdp.scatter(numbers(7, 4), devices))
    with unharmed(W), pytest.raises(RuntimeError, match=r"in-place|in place"):  # torch's own error comes first
        fdp.grad(lambda w, x: (w.add_(1) * x).mean(), devices=devices)(W, X)


def test_writes_by_count_are_found():
    with pytest.raises(RuntimeError, match=r"^grad: the function wrote in place to args\[1\]"):
        fdp.grad(lambda w, x: (x @ w).mean(), devices=SLOTS, count=lambda w, x: len(x.mul_(2)))(W, numbers(7, 4))


# ---- aux


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_dims(slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        scores = x @ w
        aux = {
            "scores": scores,
            "mean": scores.mean(),
            "sum": Point(scores.sum(), torch.tensor(len(x))),
            "max": scores.max(),
            "list": len(x),
            "first": None,
            "tag": "tag",
            "items": [f"{score:.3f}" for score in scores.tolist()],
        }
        return loss(w, x, y), aux

    dims = {"scores": 0, "mean": "mean", "sum": "sum", "max": "max", "list": "list", "first": None, "tag": "mean"}
    dims["items"] = "items"
    options: Any = {"has_aux": True, "aux_dims": dims, "microbatches": microbatches}
    (value, aux), grads = fdp.value_and_grad(fn, devices=fdp.virtual_devices(slots), **options)(W, X, Y)
    want_loss, want = fn(W, X, Y)
    assert sum(aux.pop("list")) == want.pop("list") == 7
    assert_close_tree(aux, want)
    assert_close_tree((value, grads), (want_loss, oracle(loss, W, X, Y)[1]))


@pytest.mark.parametrize(
    ("aux", "dims", "message"),
    [
        (lambda x: {"x": x}, "mean", r"aux\['x'\] has shapes \(3, 4\), \(2, 4\), \(2, 4\), which have no 'mean'"),
        (lambda x: {"n": len(x)}, "mean", r"aux\['n'\] differs between shards: 3 in shard 0, 2 in shard 1"),
        (lambda x: torch.tensor(len(x)), "mean", "aux is torch.int64, which has no 'mean', and differs"),
        (lambda x: x.sum(), 0, "aux is a 0-dim tensor.*'mean', 'sum', 'max', 'min', 'stack', 'list' or None"),
        (
            lambda x: [x] * len(x),
            0,
            "shards differ in structure: aux is a list of 3 in shard 0, a list of 2 in shard 1",
        ),
        (lambda x: {"a": x}, {"b": 0}, r"aux is a dict with keys \['a'\], but aux_dims has a dict with keys \['b'\]"),
    ],
)
def test_aux_that_cannot_be_joined(aux: Any, dims: Any, message: str):
    with unharmed(W, X), pytest.raises(ValueError, match=rf"^grad: {message}"):
        fdp.grad(lambda w, x: ((x @ w).mean(), aux(x)), has_aux=True, aux_dims=dims, devices=SLOTS)(W, X)


# ---- microbatches


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("slots", COUNTS)
def test_microbatches_with_aux_and_count(slots: int, microbatches: int):
    def fn(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        return weighted_loss(w, x, y, mask), {"tokens": mask.sum(), "scores": x @ w}

    options: Any = {
        "has_aux": True,
        "count": mask_sum,
        "aux_dims": {"tokens": "sum", "scores": 0},
        "devices": fdp.virtual_devices(slots),
        "microbatches": microbatches,
    }
    assert_close_tree(fdp.value_and_grad(fn, **options)(W, X, Y, MASK), oracle(fn, W, X, Y, MASK, has_aux=True))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_all_kinds_of_arguments(microbatches: int):
    def fn(w: Tensor, x: Tensor, items: Any, bias: Tensor, *, y: Tensor) -> Tensor:
        return (((x * w).sum(1) + torch.stack(items) * bias - y) ** 2).mean()

    items = list(numbers(7) * 3)
    args = W, X, items, numbers(1)
    in_dims = None, 0, "items", None
    got = fdp.value_and_grad(fn, (0, 1, 2, 3), devices=SLOTS, in_dims=in_dims, microbatches=microbatches)(*args, y=Y)
    assert_close_tree(got, oracle(fn, *args, argnums=(0, 1, 2, 3), y=Y))
    replicated = fdp.grad(fn, in_dims=in_dims, microbatches=microbatches)(fdp.replicate(W, SLOTS), *args[1:], y=Y)
    assert_close_tree(replicated[2], oracle(fn, *args, y=Y)[1])


def test_microbatches_keep_one_graph_at_a_time():
    alive = itertools.count()
    most: list[int] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            most.append(next(alive))
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            most.append(-1)
            return grads[0]

    fdp.grad(lambda w, x: Counted.apply((x @ w).mean()), devices="cpu", microbatches=3)(W, X)
    assert [step >= 0 for step in most] == [True, False] * 3


# ---- create_graph


def second_order(value_and_grad: Callable[..., Any], w: Tensor) -> Any:
    """Backward through the gradient of `loss`."""
    value, grad = value_and_grad(w, X, Y)
    return value.detach(), grad.detach(), torch.autograd.grad(value + (grad**2).sum(), w)[0]


@pytest.mark.parametrize("slots", COUNTS)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("create_graph", [None, True])
def test_results_are_differentiable(slots: int, microbatches: int, create_graph: Any):
    options: Any = {"devices": fdp.virtual_devices(slots), "microbatches": microbatches, "create_graph": create_graph}
    w = torch.nn.Parameter(W.clone())
    got = second_order(fdp.value_and_grad(loss, **options), w)
    assert_close_tree(got, second_order(lambda *args: oracle(loss, *args), w))


def test_backward_of_the_value():
    w = torch.nn.Parameter(W.clone())
    fdp.value_and_grad(loss, devices=SLOTS)(w, X, Y)[0].backward()
    assert w.grad is not None
    assert_close_tree(w.grad, oracle(loss, W, X, Y)[1])


def test_gradgradcheck_of_the_gradient():
    grad = fdp.grad(loss, (0, 1), devices=["cpu"] * 2, in_dims=(None, 0, 0))
    inputs = numbers(2).requires_grad_(), numbers(3, 2).requires_grad_(), numbers(3)
    assert torch.autograd.gradcheck(grad, inputs)
    assert torch.autograd.gradgradcheck(grad, inputs)


def test_none_is_detached_if_nothing_requires_grad():
    value, grad = fdp.value_and_grad(loss, devices=SLOTS)(W, X, Y)
    assert not value.requires_grad
    assert not grad.requires_grad
    assert grad.grad_fn is None


def test_none_follows_an_input_that_is_not_differentiated():
    def through(value_and_grad: Callable[..., Any]) -> Any:
        y = Y.clone().requires_grad_()
        value, grad = value_and_grad(W, X, y)
        return torch.autograd.grad(value + (grad**2).sum(), y)[0]

    assert_close_tree(through(fdp.value_and_grad(loss, devices=SLOTS)), through(lambda *args: oracle(loss, *args)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_none_follows_a_captured_tensor(microbatches: int):
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss(w * scale, x, y)

    def through(value_and_grad: Callable[..., Any]) -> Any:
        value, grad = value_and_grad(W, X, Y)
        return torch.autograd.grad(value + (grad**2).sum(), scale)[0]

    got = through(fdp.value_and_grad(fn, devices=SLOTS, microbatches=microbatches))
    assert_close_tree(got, through(lambda *args: oracle(fn, *args)))


def test_none_follows_a_captured_tensor_in_aux():
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(w, x, y), (x.mean() * scale)

    aux = fdp.grad(fn, has_aux=True, devices=SLOTS)(W, X, Y)[1]
    assert_close_tree(torch.autograd.grad(aux, scale)[0], X.mean())


def test_aux_is_differentiable_as_the_value_is():
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss(w, x, y), torch.tanh(x * w).sum(1).mean()

    w = W.clone().requires_grad_()
    aux = fdp.grad(fn, has_aux=True, devices=SLOTS)(w, X, Y)[1]
    want = torch.tanh(X * w).sum(1).mean()
    assert_close_tree(torch.autograd.grad(aux, w)[0], torch.autograd.grad(want, w)[0])
    assert not fdp.grad(fn, has_aux=True, devices=SLOTS, create_graph=False)(w, X, Y)[1].requires_grad
    assert not fdp.grad(fn, has_aux=True, devices=SLOTS)(W, X, Y)[1].requires_grad


@pytest.mark.parametrize("slots", [1, 3])
def test_false_is_detached(slots: int):
    w = torch.nn.Parameter(W.clone())
    value, grad = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), create_graph=False)(w, X, Y)
    assert_close_tree((value, grad), oracle(loss, W, X, Y))
    for result in (value, grad.sum()):
        with pytest.raises(RuntimeError, match="does not require grad"):
            result.backward()


@pytest.mark.parametrize("slots", [1, 3])
def test_false_is_detached_under_transforms_too(slots: int):
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return loss(w, x, y), {"m": w.mean(), "tag": "tag"}

    options: Any = {"has_aux": True, "devices": fdp.virtual_devices(slots), "create_graph": False}
    value, grad = oracle(loss, W, X, Y)
    with torch.inference_mode():
        got = fdp.value_and_grad(fn, **options)(W, X, Y)
    assert_close_tree(got, ((value, {"m": W.mean(), "tag": "tag"}), grad))
    w = W.clone().requires_grad_()
    results: list[Tensor] = []

    def inside(x: Tensor) -> Tensor:
        (value, aux), grad = fdp.value_and_grad(fn, **options)(w, x, Y)
        results.extend((value, aux["m"], grad))
        return value

    assert_close_tree(torch.func.vmap(inside)(X[None]), value[None])
    assert not any(result.requires_grad for result in results)


def test_true_keeps_the_graph_of_inputs_that_do_not_require_grad():
    value, grad = fdp.value_and_grad(loss, devices=SLOTS, create_graph=True)(W, X, Y)
    assert value.requires_grad
    assert grad.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_true_needs_grad_mode(mode: Any):
    with mode(), pytest.raises(ValueError, match=r"^grad: create_graph=True needs grad mode, which is off here"):
        fdp.grad(never, devices=SLOTS, create_graph=True)(W, X, Y)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_without_grad_mode_results_are_detached(mode: Any, slots: int, requires_grad: bool):
    w = W.clone().requires_grad_(requires_grad)
    with mode():
        value, grad = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots))(w, X, Y)
    assert not value.requires_grad
    assert not grad.requires_grad
    assert_close_tree((value, grad), oracle(loss, W, X, Y))


def test_inference_tensors():
    """As torch.func does, which differentiates in them."""
    with torch.inference_mode():
        w, x, y = W.clone(), X.clone(), Y.clone()
    assert_close_tree(fdp.value_and_grad(loss, devices=SLOTS)(w, x, y), oracle(loss, w, x, y))


def test_accumulated_gradients_are_left_alone():
    w = torch.nn.Parameter(W.clone())
    w.grad = torch.ones_like(w)
    fdp.value_and_grad(loss, devices=SLOTS)(w, X, Y)
    assert_same_tree(w.grad, torch.ones_like(W))


# ---- torch.func outside


W2 = numbers(3, 4)


def one(w: Tensor) -> Tensor:
    return oracle(loss, w, X, Y)[1]


def value_one(w: Tensor) -> Tensor:
    return loss(w, X, Y)


MAPPED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "dp_apply": (lambda w: fdp.dp_apply(loss, w, (X, Y), SLOTS, out_dims="mean"), value_one),
    "shard_map": (
        lambda w: fdp.shard_map(loss, devices=SLOTS, in_dims=(None, 0, 0), out_dims="mean")(w, X, Y),
        value_one,
    ),
    "value": (lambda w: fdp.value_and_grad(loss, devices=SLOTS)(w, X, Y)[0], value_one),
    "grad": (lambda w: (fdp.grad(loss, devices=SLOTS)(w, X, Y) ** 2).sum(), lambda w: (one(w) ** 2).sum()),
    "grad-microbatches": (
        lambda w: (fdp.grad(loss, devices=SLOTS, microbatches=2)(w, X, Y) ** 2).sum(),
        lambda w: (one(w) ** 2).sum(),
    ),
    "aux": (
        lambda w: fdp.grad(lambda w, x, y: (loss(w, x, y), loss(w, x, y)), has_aux=True, devices=SLOTS)(w, X, Y)[1],
        value_one,
    ),
    "replicated": (lambda w: fdp.grad(loss)(fdp.replicate(w, SLOTS), X, Y)[2].sum(), lambda w: one(w).sum()),
    "scattered": (
        lambda w: fdp.value_and_grad(lambda w, x, y: loss(w, x, y))(w, fdp.scatter(X, SLOTS), Y)[0],
        value_one,
    ),
    "count": (
        lambda w: fdp.value_and_grad(weighted_loss, devices=SLOTS, count=lambda w, x, y, mask: (mask > 0).sum())(
            w, X, Y, MASK
        )[0],
        lambda w: weighted_loss(w, X, Y, MASK),
    ),
    "batch": (
        lambda w: fdp.grad(loss, 1, devices=SLOTS, in_dims=(None, 0, 0))(w, X, Y).pow(2).sum(),
        lambda w: oracle(loss, w, X, Y, argnums=1)[1].pow(2).sum(),
    ),
}

TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda fn: torch.func.grad(fn)(W),
    "vjp": lambda fn: torch.func.vjp(fn, W)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda fn: torch.func.jvp(fn, (W,), (numbers(4) ** 2,)),
    "vmap": lambda fn: torch.func.vmap(fn)(W2),
    "vmap-chunked": lambda fn: torch.func.vmap(fn, chunk_size=2)(W2),
    "jacrev": lambda fn: torch.func.jacrev(fn)(W),
    "jacfwd": lambda fn: torch.func.jacfwd(fn)(W),
    "hessian": lambda fn: torch.func.hessian(fn)(W),
    "hessian-vector": lambda fn: torch.func.jvp(torch.func.grad(fn), (W,), (numbers(4) ** 2,)),
    "vmap-grad": lambda fn: torch.func.vmap(torch.func.grad(fn))(W2),
    "grad-vmap": lambda fn: torch.func.grad(lambda w: torch.func.vmap(fn)(w).sum())(W2),
    "grad-grad": lambda fn: torch.func.grad(lambda w: (torch.func.grad(fn)(w) ** 2).sum())(W),
    "backward": lambda fn: torch.autograd.grad(fn(v := W.clone().requires_grad_()), v)[0],
    "autograd-hessian": lambda fn: torch.autograd.functional.hessian(fn, W),
    "dual": lambda fn: dual(fn, W, numbers(4) ** 2),
}


def dual(fn: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Any:
    with forward_ad.dual_level():
        out: Any = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent)))
        return out.primal.clone(), out.tangent.clone()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MAPPED)
def test_transforms_outside(name: str, transform: str):
    mapped, plain = MAPPED[name]
    if transform == "dual" and name not in ("dp_apply", "shard_map", "value", "scattered", "aux", "count"):
        # torch.func cannot be the oracle inside of a dual level.
        want = torch.func.jvp(plain, (W,), (numbers(4) ** 2,))
    else:
        want = TRANSFORMS[transform](plain)
    assert_close_tree(TRANSFORMS[transform](mapped), want)


def test_vmap_over_the_batch_outside():
    xs = torch.stack([X, X * 2])
    got = torch.func.vmap(fdp.value_and_grad(loss, devices=SLOTS), in_dims=(None, 0, None))(W, xs, Y)
    want = torch.func.vmap(lambda *args: oracle(loss, *args), in_dims=(None, 0, None))(W, xs, Y)
    assert_close_tree(got, want)


def test_vmap_over_a_dim_before_the_rows():
    xs = torch.stack([X, X * 2], 1)  # (rows, 2, 4): the function sees (rows, 4)
    got = torch.func.vmap(lambda x: fdp.dp_apply(loss, W, (x, Y), SLOTS, out_dims="mean"), in_dims=1)(xs)
    assert_close_tree(got, torch.stack([loss(W, X, Y), loss(W, X * 2, Y)]))


def test_captured_tensors_of_a_transform_outside():
    def value(scale: Tensor) -> Tensor:
        return fdp.value_and_grad(lambda w, x, y: loss(w * scale, x, y), devices=SLOTS)(W, X, Y)[1].sum()

    def plain(scale: Tensor) -> Tensor:
        return oracle(lambda w, x, y: loss(w * scale, x, y), W, X, Y)[1].sum()

    scale = torch.tensor(1.5, dtype=torch.float64)
    assert_close_tree(torch.func.grad(value)(scale), torch.func.grad(plain)(scale))
    assert_close_tree(torch.func.jvp(value, (scale,), (scale,)), torch.func.jvp(plain, (scale,), (scale,)))


# ---- torch.func inside


INSIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grad": lambda w, x, y: torch.func.grad(loss)(w, x, y).pow(2).sum() * 0 + loss(w, x, y),
    "per-sample": lambda w, x, y: (
        torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0, 0))(w, x, y).pow(2).sum(1).mean()
    ),
    "jvp": lambda w, x, y: torch.func.jvp(lambda x: torch.tanh(x * w).sum(1), (x,), (x**2,))[1].mean(),
    "jacrev": lambda w, x, y: torch.func.vmap(torch.func.jacrev(row_loss), in_dims=(None, 0, 0))(w, x, y).abs().mean(),
    "hessian": lambda w, x, y: (
        torch.func.vmap(torch.func.hessian(row_loss), in_dims=(None, 0, 0))(w, x, y).pow(2).mean()
    ),
    "autograd": lambda w, x, y: (
        torch.autograd.grad(loss(v := w.detach().requires_grad_(), x, y) * len(x), v, create_graph=True)[0]
        .detach()
        .sum()
        / len(x)
        + loss(w, x, y)
    ),
}


def row_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x * w).sum() - y) ** 2


@pytest.mark.parametrize("name", INSIDE)
def test_transforms_inside(name: str):
    fn = INSIDE[name]
    if name == "autograd":  # plain autograd has nothing to say under torch.func, which would be the oracle
        w = W.clone().requires_grad_()
        want: Any = (value := fn(w, X, Y)).detach(), torch.autograd.grad(value, w)[0]
    else:
        want = oracle(fn, W, X, Y)
    assert_close_tree(fdp.value_and_grad(fn, devices=SLOTS)(W, X, Y), want)
    assert_close_tree(fdp.dp_apply(fn, W, (X, Y), SLOTS, out_dims="mean"), want[0])


def test_a_gradient_penalty():
    def penalised(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.func.vmap(torch.func.grad(row_loss, argnums=1), in_dims=(None, 0, 0))(w, x, y)
        return loss(w, x, y) + ((inner.norm(dim=1) - 1) ** 2).mean()

    assert_close_tree(fdp.value_and_grad(penalised, devices=SLOTS)(W, X, Y), oracle(penalised, W, X, Y))


def test_gradients_nest():
    def outer(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return fdp.value_and_grad(loss)(w, x, y)[0] + fdp.grad(lambda w, y: (w * y[:, None]).mean())(w, y).sum()

    def plain(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss(w, x, y) + torch.func.grad(lambda w, y: (w * y[:, None]).mean())(w, y).sum()

    assert_close_tree(fdp.value_and_grad(outer, devices=SLOTS)(W, X, Y), oracle(plain, W, X, Y))


# ---- modes


def test_autocast_is_that_of_one_device():
    w, x, y = W.float(), X.float(), Y.float()

    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        hidden = x @ torch.outer(w, w)
        assert hidden.dtype is torch.bfloat16
        return ((hidden.float().sum(1) - y) ** 2).mean()

    with torch.autocast("cpu", torch.bfloat16):
        got = fdp.value_and_grad(fn, devices=SLOTS)(w, x, y)
        want = oracle(fn, w, x, y)
    assert_close_tree(got, want, rtol=2e-2)


def test_output_device():
    value, grads = fdp.value_and_grad(loss, devices=SLOTS, output_device="meta")(W, X, Y)
    assert value.device.type == grads.device.type == "meta"
    grads = fdp.grad(loss, devices=SLOTS, output_device="cpu")(W, X, Y)
    assert_close_tree(grads, oracle(loss, W, X, Y)[1])
