"""Collectives differentiated from outside of the call: gradients are those of plain torch over all slots."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import (
    Case,
    W,
    X,
    cotangents,
    each_case,
    each_executor,
    filled,
    leaves,
    mapped,
    plain,
    product,
    some_counts,
)
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers


@few()
@each_executor
@some_counts
@each_case
def test_adjoint(case: Case, n: int, executor: Any):
    fn = mapped(case, n, executor if executor == "sequential" else "auto")
    point, along = (W, X), (numbers(3) + 1, numbers(7, 3).flip(0))
    outs, pushed, *_ = torch.func.jvp(lambda w, x: tuple(fn(w, x)), point, along)
    _, plainly, *_ = torch.func.jvp(lambda w, x: tuple(plain(case, n)(w, x)), point, along)
    assert_close_tree(pushed, plainly)
    back = tuple(cotangents(outs))
    vjp: Any = torch.func.vjp(lambda w, x: tuple(fn(w, x)), *point)[1]
    torch.testing.assert_close(product(pushed, back), product(vjp(back), along))
    found = leaves()
    product(fn(*found), back).backward()
    grads = filled(x.grad for x in found)
    torch.testing.assert_close(product(pushed, back), product(grads, along))


@few(2)
@each_executor
@some_counts
@each_case
def test_to_the_third_order(case: Case, n: int, executor: str):
    def twice(fn: Callable[..., Any]) -> Any:
        w, x = leaves()
        outs = fn(w, x)
        found, grads = [list(outs)], [product(outs, cotangents(outs))]
        for _ in range(3):
            total = product(grads, cotangents(grads)) + 0 * (w.sum() + x.sum()).square()
            grads = filled(torch.autograd.grad(total, (w, x), create_graph=True, allow_unused=True))
            found.append(grads)
        return found

    assert_close_tree(twice(mapped(case, n, executor)), twice(plain(case, n)))


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[[Tensor], Any]]] = {
    "grad": lambda fn: torch.func.grad(fn),
    "jacrev": lambda fn: torch.func.jacrev(fn),
    "jacfwd": lambda fn: torch.func.jacfwd(fn),
    "hessian": lambda fn: torch.func.hessian(fn),
    "grad-of-grad": lambda fn: torch.func.grad(lambda w: torch.func.grad(fn)(w).square().sum()),
    "vmap": lambda fn: lambda w: torch.func.vmap(fn)(torch.stack([w, w + 1])),
    "vmap-of-grad": lambda fn: lambda w: torch.func.vmap(torch.func.grad(fn))(torch.stack([w, w + 1])),
    "jacobian": lambda fn: lambda w: torch.autograd.functional.jacobian(fn, w),
}


@few(2)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@each_case
def test_transforms_outside(case: Case, transform: Callable[..., Any]):
    def loss(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda w: torch.stack([(out.square() * (i + 1)).sum() for i, out in enumerate(fn(w, X))]).sum()

    assert_close_tree(transform(loss(mapped(case, 3, "auto")))(W), transform(loss(plain(case, 3)))(W))


def test_forward_mode_past_what_has_no_tangent():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        found = fdp.psum({"none": x.sum(), "count": torch.tensor(len(x)), "loss": (w * x).sum()})
        return found["none"] * w * found["count"] + found["loss"] * fdp.pmax(x.detach()).sum()

    x, w = numbers(4, 2), torch.tensor(0.7, dtype=torch.float64)
    top = torch.maximum(x[:2], x[2:]).sum()
    out, pushed, *_ = torch.func.jvp(
        lambda w: fdp.dp_apply(fn, w, x, fdp.virtual_devices(2), out_dims="sum"), (w,), (w.cos(),)
    )
    torch.testing.assert_close(out, 2 * (x.sum() * w * 4 + (w * x).sum() * top))
    torch.testing.assert_close(pushed, 2 * (x.sum() * 4 + x.sum() * top) * w.cos())
