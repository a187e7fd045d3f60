"""Every kind of call under every transform of torch.func, and in forward mode without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.transforms.test_transforms import (
    INSIDE,
    MAPPED,
    OUTSIDE,
    PLAIN,
    REFUSED,
    SLOTS,
    Fn,
    V,
    W,
    X,
    each_executor,
    loss_of,
    row,
    rows,
    total,
)

pytestmark = pytest.mark.usefixtures("switching")


def counted(w: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return (rows(w, x) * mask).sum() / mask.sum()


def with_aux(w: Tensor, x: Tensor) -> Any:
    return loss_of(rows)(w, x), loss_of(rows)(w * 2, x)


MASK = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
CALLS: dict[str, tuple[Callable[..., Any], Fn]] = {
    "parameters": (lambda w, **options: fdp.dp_apply(rows, w, X, SLOTS, **options), lambda w: rows(w, X)),
    "batch": (lambda w, **options: fdp.dp_apply(rows, W, X * w, SLOTS, **options), lambda w: rows(W, X * w)),
    "captured": (
        lambda w, **options: fdp.dp_apply(lambda v, x: rows(v * w, x), W, X, SLOTS, **options),
        lambda w: rows(W * w, X),
    ),
    "replicated": (
        lambda w, **options: fdp.dp_apply(rows, fdp.replicate(w, SLOTS), X, **options),
        lambda w: rows(w, X),
    ),
    "shard_map": (
        lambda w, **options: fdp.shard_map(loss_of(rows), devices=SLOTS, in_dims=(None, 0), out_dims="mean", **options)(
            w, X
        )[None],
        lambda w: loss_of(rows)(w, X)[None],
    ),
    "value": (
        lambda w, **options: fdp.value_and_grad(loss_of(rows), devices=SLOTS, **options)(w, X)[0][None],
        lambda w: loss_of(rows)(w, X)[None],
    ),
    "scattered": (
        lambda w, **options: fdp.value_and_grad(loss_of(rows), **options)(w, fdp.scatter(X, SLOTS))[0][None],
        lambda w: loss_of(rows)(w, X)[None],
    ),
    "gradient": (
        lambda w, **options: fdp.grad(loss_of(rows), devices=SLOTS, **options)(w, X),
        lambda w: grad(loss_of(rows))(w, X),
    ),
    "gradient, captured": (
        lambda w, **options: fdp.grad(loss_of(lambda v, x: rows(v * w, x)), devices=SLOTS, **options)(W, X),
        lambda w: grad(loss_of(lambda v, x: rows(v * w, x)))(W, X),
    ),
    "gradient, microbatches": (
        lambda w, **options: fdp.grad(loss_of(rows), devices=SLOTS, microbatches=2, **options)(w, X),
        lambda w: grad(loss_of(rows))(w, X),
    ),
    "gradient, replicated": (
        lambda w, **options: fdp.grad(loss_of(rows), **options)(fdp.replicate(w, SLOTS), X)[2],
        lambda w: grad(loss_of(rows))(w, X),
    ),
    "gradient, batch": (
        lambda w, **options: fdp.grad(loss_of(rows), 1, devices=SLOTS, in_dims=(None, 0), **options)(w, X),
        lambda w: grad(loss_of(rows), 1)(w, X),
    ),
    "aux": (
        lambda w, **options: fdp.grad(with_aux, has_aux=True, devices=SLOTS, **options)(w, X)[1][None],
        lambda w: with_aux(w, X)[1][None],
    ),
    "count": (
        lambda w, **options: fdp.value_and_grad(
            counted, devices=SLOTS, count=lambda w, x, mask: (mask > 0).sum(), **options
        )(w, X, MASK)[1],
        lambda w: grad(counted)(w, X, MASK),
    ),
}
AROUND: dict[str, Callable[[Fn], Any]] = {
    **{name: transform for name, transform in OUTSIDE.items() if name != "none"},
    "vmap in chunks": lambda fn: vmap(fn, chunk_size=2)(torch.stack([W, V, W - V])),
    "hessian and vector": lambda fn: jvp(grad(total(fn)), (W,), (V,)),
    "grad of vmap": lambda fn: grad(lambda w: vmap(fn)(w).sum())(torch.stack([W, V])),
    "grad of grad": lambda fn: grad(lambda w: (grad(total(fn))(w) ** 2).sum())(W),
    "autograd hessian": lambda fn: torch.autograd.functional.hessian(total(fn), W),
}


@few(2)
@each_executor
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_under_every_transform(name: str, around: str, executor: Any):
    call, plain = CALLS[name]
    for _ in range(2):
        assert_close_tree(AROUND[around](lambda w: call(w, executor=executor)), AROUND[around](plain))


def test_vmap_over_a_dim_of_the_batch():
    xs = torch.stack([X, X * 2])
    want = torch.stack([rows(W, x) for x in xs])
    for dim, stacked in enumerate((xs, xs.movedim(0, 1))):  # (2, rows, 2) and (rows, 2, 2): the function sees (rows, 2)
        assert_close_tree(vmap(lambda x: fdp.dp_apply(rows, W, x, SLOTS), in_dims=dim)(stacked), want)
    got = vmap(fdp.grad_and_value(loss_of(rows), devices=SLOTS), in_dims=(None, 0))(W, xs)
    assert_close_tree(got, vmap(torch.func.grad_and_value(loss_of(rows)), in_dims=(None, 0))(W, xs))


def test_a_gradient_penalty_and_gradients_in_a_loss():
    def penalised(w: Tensor, x: Tensor) -> Tensor:
        inner = vmap(grad(row, argnums=1), in_dims=(None, 0))(w, x)
        return loss_of(rows)(w, x) + ((inner.norm(dim=1) - 1) ** 2).mean()

    def nested(w: Tensor, x: Tensor) -> Tensor:
        return fdp.value_and_grad(loss_of(rows))(w, x)[0] + fdp.grad(lambda w, x: (w * x).mean())(w, x).sum()

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return loss_of(rows)(w, x) + grad(lambda w, x: (w * x).mean())(w, x).sum()

    for mapped, alone in ((penalised, penalised), (nested, plain)):
        got = fdp.grad_and_value(mapped, devices=SLOTS)(W, X)
        assert_close_tree(got, torch.func.grad_and_value(alone)(W, X))


def test_plain_autograd_in_a_loss():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        inner = w.detach().requires_grad_()
        first = torch.autograd.grad(loss_of(rows)(inner, x) * len(x), inner, create_graph=True)[0]
        return first.detach().sum() / len(x) + loss_of(rows)(w, x)

    w = W.clone().requires_grad_()
    want = fn(w, X)
    assert_close_tree(fdp.value_and_grad(fn, devices=SLOTS)(W, X), (want.detach(), torch.autograd.grad(want, w)[0]))


# ---- forward mode without torch.func


def tangent_of(fn: Fn, w: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(fn(forward_ad.make_dual(w, tangent))).tangent
    assert out is not None
    return out


@few(2)
@each_executor
@pytest.mark.parametrize("name", CALLS)
def test_dual_level_around(name: str, executor: Any):
    call, plain = CALLS[name]
    want = jvp(plain, (W,), (V,))[1]  # torch.func cannot be the oracle inside of a dual level
    assert want.abs().max() > 1e-4
    for _ in range(3):
        assert_close_tree(tangent_of(lambda w: call(w, executor=executor), W, V), want)


@few()
@each_executor
@pytest.mark.parametrize("outside", ["none", "backward", "grad", "jacrev"])  # torch has no vmap of it
def test_dual_level_inside(outside: str, executor: Any):
    def inside(w: Tensor, x: Tensor) -> Tensor:
        return tangent_of(lambda w: rows(w, x), w, V)

    mapped = MAPPED["dp_apply"](inside, executor)
    if executor == "threads":
        with pytest.raises(RuntimeError, match=REFUSED):
            OUTSIDE[outside](mapped)
        return
    assert_close_tree(OUTSIDE[outside](mapped), OUTSIDE[outside](PLAIN["dp_apply"](INSIDE["jvp"])))


@few()
@each_executor
@pytest.mark.parametrize("call", MAPPED)
def test_dual_level_in_a_dual_level_is_refused_as_on_one_device(call: str, executor: Any):
    def inside(w: Tensor, x: Tensor) -> Tensor:
        return tangent_of(lambda w: rows(w, x), w, V)

    with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported"):
        tangent_of(lambda w: inside(w, X), W, V)
    with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported") as caught:
        tangent_of(MAPPED[call](inside, executor), W, V)
    assert caught.value.__notes__[1] == "in shard 0 of 3, rows 0:2, on cpu"
    assert_close_tree(tangent_of(MAPPED[call](rows, executor), W, V), jvp(PLAIN[call](rows), (W,), (V,))[1])
