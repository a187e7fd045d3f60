"""Gradient functions inside and outside of torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.transforms.losses import MASK, W, X, Y, dual, loss, one, oracle, weighted_loss

SLOTS = fdp.virtual_devices(3)


# ---- torch.func outside

W2 = numbers(3, 4)


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


@few(2)
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
