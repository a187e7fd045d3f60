"""Transforms around calls with collectives and inside of them, at once; modes and hooks of the caller; several axes."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fdp
from tests.collectives.cases import (
    CASES,
    Case,
    W,
    X,
    balanced,
    each_case,
    each_executor,
    leaves,
    local,
    mapped,
    plain,
)
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers

TWO, THREE = fdp.virtual_devices(2), fdp.virtual_devices(3)
Fn = Callable[[Tensor], Tensor]


# ---------------------------------------------------------------- outside and inside

SQUARES = 1.0 + torch.arange(2, dtype=torch.float64)


def by_fdp(loss: Fn) -> Fn:
    return fdp.grad(lambda w: loss(w), reduction="sum", axis_name="inner")


INSIDE: dict[str, Callable[[Fn], Fn]] = {
    "grad": torch.func.grad,
    "fdp.grad": by_fdp,
    "jacrev": torch.func.jacrev,
    "grad of grad": lambda loss: torch.func.grad(lambda w: torch.func.grad(loss)(w).square().sum()),
    "vmap of grad": lambda loss: lambda w: torch.func.vmap(lambda k: torch.func.grad(loss)(w * k))(SQUARES).sum(0),
    "grad of vmap": lambda loss: torch.func.grad(lambda w: torch.func.vmap(lambda k: loss(w * k))(SQUARES).sum()),
}
OUTSIDE: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).sin().sum())(W),
    "jacrev": lambda f: torch.func.jacrev(f)(W),
    "jacfwd": lambda f: torch.func.jacfwd(f)(W),
    "jvp": lambda f: torch.func.jvp(f, (W,), (W.cos(),)),
    "hessian": lambda f: torch.func.hessian(lambda w: f(w).sin().sum())(W),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([W, W + 1])),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda w: f(w).sin().sum()))(torch.stack([W, W + 1])),
    "fdp.grad": lambda f: fdp.grad(lambda w: f(w).sin().sum(), axis_name="outer")(W),
    "autograd": lambda f: by_autograd(f),
}


def by_autograd(f: Fn) -> Any:
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(w).sin().sum(), w, create_graph=True)
    return first, torch.autograd.grad(first.sin().sum(), w)


def parts_of(slots: int) -> list[Tensor]:
    return list(X.split(balanced(len(X), slots)))


@few(3)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
def test_outside_and_inside(inside: str, outside: str):
    """The gradient that a slot takes is that of the sum of all losses, in what is its own."""

    def loss(w: Tensor, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        y = (w * x).tanh()
        return (y * total(y.square().sum(0))).sin().sum()

    def on_slots(w: Tensor) -> Tensor:
        def fn(w: Tensor, x: Tensor) -> Tensor:
            return INSIDE[inside](lambda w: loss(w, x, fdp.psum))(w)[None] * x[:1].cos()

        return fdp.dp_apply(fn, w, X, TWO)

    def alone(w: Tensor) -> Tensor:
        """All slots' parameters in one tensor, of which the gradient is taken."""
        xs = parts_of(2)

        def of_all(ws: Tensor) -> Tensor:
            ys = [(own * x).tanh() for own, x in zip(ws, xs, strict=True)]
            total = torch.stack([y.square().sum(0) for y in ys]).sum(0)
            return torch.stack([(y * total).sin().sum() for y in ys]).sum()

        def stacked(ws: Tensor) -> Tensor:
            if inside == "grad of grad":
                return torch.func.grad(lambda ws: torch.func.grad(of_all)(ws).square().sum())(ws)
            if inside in ("vmap of grad", "grad of vmap"):
                found = [torch.func.grad(of_all)(ws * k) * (k if inside == "grad of vmap" else 1) for k in SQUARES]
                return torch.stack(found).sum(0)
            return torch.func.grad(of_all)(ws)

        return stacked(w.expand(2, *w.shape)) * torch.stack([x[0].cos() for x in xs])

    assert_close_tree(OUTSIDE[outside](on_slots), OUTSIDE[outside](alone))


@few(2)
@each_case
@pytest.mark.parametrize("outside", ["grad", "vmap", "jacrev", "vmap of grad", "autograd"])
def test_each_collective_in_a_gradient_in_a_transform(outside: str, case: Case):
    def on_slots(w: Tensor) -> Tensor:
        def fn(w: Tensor, x: Tensor) -> Tensor:
            return torch.func.grad(lambda w: (case.call(local(case, w, x)).sin() * w.sum()).sum())(w)

        return fdp.dp_apply(fn, w, X, THREE, out_dims="stack")

    def alone(w: Tensor) -> Tensor:
        def of_all(ws: Tensor) -> Tensor:
            rows = balanced(len(X), 3)
            args = [local(case, own, x) for own, x in zip(ws, X.split(rows), strict=True)]
            outs = case.oracle(args, rows)
            return torch.stack([(out.sin() * own.sum()).sum() for out, own in zip(outs, ws, strict=True)]).sum()

        return torch.func.grad(of_all)(w.expand(3, *w.shape))

    if case is CASES["ppermute-nothing"] and outside == "autograd":
        return  # what is sent to nobody depends on nothing
    assert_close_tree(OUTSIDE[outside](on_slots), OUTSIDE[outside](alone))


# ---------------------------------------------------------------- batched gradients


@few(2)
@each_executor
@each_case
def test_batched_gradients(case: Case, executor: Any):
    """All rows of a jacobian by one backward."""

    def run(call: Callable[..., Any]) -> Any:
        w, x = leaves()
        outs = call(w, x)
        grads = [torch.stack([out * k for k in (1.0, 0.0, 2.0)]) for out in map(torch.Tensor.detach, outs)]
        return torch.autograd.grad(
            list(outs), (w, x), grads, is_grads_batched=True, allow_unused=True, materialize_grads=True
        )

    assert_close_tree(run(mapped(case, 3, executor)), run(plain(case, 3)))


# ---------------------------------------------------------------- modes and hooks of the caller


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def tanh_and_psum(w: Tensor, x: Tensor) -> Tensor:
    y = (w * x).tanh()
    return y.erf() * fdp.psum(y.sum(0))


def tanh_and_sum(w: Tensor, x: Tensor) -> Tensor:
    y = (w * x).tanh()
    return y.erf() * y.sum(0)


@each_executor
@pytest.mark.parametrize("kind", [Functions, Dispatches])
def test_modes_of_the_caller(kind: Any, executor: Any):
    """They see what all slots do, before what they meet in and after."""
    w = W.clone().requires_grad_()
    with kind() as mode:
        out = fdp.dp_apply(tanh_and_psum, w, X, THREE, executor=executor)
    assert mode.seen["tanh"] == mode.seen["erf"] == 3
    assert_close_tree((out, torch.autograd.grad(out.sum(), w)), (tanh_and_sum(w, X), by_plain(w)))


def by_plain(w: Tensor) -> Any:
    return torch.autograd.grad(tanh_and_sum(w, X).sum(), w)


@each_executor
def test_hooks_of_the_caller_for_saved_tensors(executor: Any):
    """Each is packed once, and unpacked in the backward."""
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    def unpack(i: int) -> Tensor:
        unpacked.append(i)
        return packed[i]

    w = W.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = fdp.dp_apply(tanh_and_psum, w, X, THREE, executor=executor)
    count = len(packed)
    assert count
    assert_close_tree(torch.autograd.grad(out.sum(), w), by_plain(w))
    assert sorted(unpacked) == list(range(count))


# ---------------------------------------------------------------- several axes

REDUCTIONS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[Tensor], Tensor]]] = {
    "psum": (fdp.psum, lambda x: x.sum((0, 1), keepdim=True)),
    "pmean": (fdp.pmean, lambda x: x.mean((0, 1), keepdim=True)),
    "pmax": (lambda x, axes: fdp.pmax(x.detach(), axes) + x, lambda x: x.detach().amax((0, 1), keepdim=True) + x),
    "pmin": (lambda x, axes: fdp.pmin(x.detach(), axes) + x, lambda x: x.detach().amin((0, 1), keepdim=True) + x),
    "pmean-rows": (lambda x, axes: fdp.pmean(x, axes, weight="rows"), lambda x: x.mean((0, 1), keepdim=True)),
}


@pytest.mark.parametrize("axes", [("outer", "inner"), ["inner", "outer"]], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_over_several_axes(name: str, axes: Any):
    reduce, alone = REDUCTIONS[name]
    x = numbers(6, 4)

    def run(call: Callable[[Tensor], Tensor]) -> Any:
        w = W[:1].clone().requires_grad_()
        out = call(w)
        return out, torch.autograd.grad((out * numbers(6, 4)).sum(), w)

    def inner(w: Tensor, x: Tensor) -> Tensor:
        return (reduce((w * x).sin(), axes)).tanh() * x

    def outer(w: Tensor, x: Tensor) -> Tensor:
        return fdp.dp_apply(inner, w, x, TWO, in_dims=1, out_dims=1, axis_name="inner")

    def blocks(w: Tensor) -> Tensor:
        """Dimensions: outer, inner, rows, columns."""
        h = x.reshape(3, 2, 2, 2).transpose(1, 2)
        return (alone((w * h).sin()).tanh() * h).transpose(1, 2).reshape(6, 4)

    assert_close_tree(run(lambda w: fdp.dp_apply(outer, w, x, THREE, axis_name="outer")), run(blocks))


@each_executor
def test_over_one_axis_in_a_tuple_and_over_none(executor: Any):
    def fn(x: Tensor) -> Any:
        return fdp.psum(x.sum(), ("data",)), fdp.psum(x.sum(), ())

    both = fdp.shard_map(fn, devices=THREE, out_dims="stack", executor=executor)(torch.arange(3.0))
    assert [each.tolist() for each in both] == [[3, 3, 3], [0, 1, 2]]


# ---------------------------------------------------------------- effects


@each_executor
@pytest.mark.parametrize("how", ["dp_apply", "parallel_apply", "grad", "transform"])
def test_effects_happen_once(how: str, executor: Any):
    """In the first call as in the next."""
    done: list[tuple[str, int]] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        done.append(("before", fdp.axis_index()))
        total = fdp.psum((w * x).sum())
        done.append(("between", fdp.axis_index()))
        out = total * fdp.psum(x.sum())
        done.append(("after", fdp.axis_index()))
        return out

    def call() -> Any:
        if how == "parallel_apply":
            return fdp.parallel_apply(fn, W, fdp.scatter(X, THREE), executor=executor)
        if how == "grad":
            return fdp.grad(fn, devices=THREE, executor=executor)(W, X)
        mapped = fdp.shard_map(fn, devices=THREE, in_dims=(None, 0), out_dims="sum", executor=executor)
        return torch.func.grad(lambda w: mapped(w, X))(W) if how == "transform" else mapped(W, X)

    want = [(when, i) for when in ("after", "before", "between") for i in range(3)]
    for _ in range(2):
        done.clear()
        call()
        assert sorted(done) == want
    if executor == "sequential":  # slots go on in their order
        assert done == sorted(done, key=lambda each: ("before", "between", "after").index(each[0]))


@each_executor
def test_the_number_of_a_slot_in_a_hook_where_it_was_taken_before(executor: Any):
    seen: list[int] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        i = fdp.axis_index()
        h = w * x
        h.register_hook(lambda grad: seen.append(i))
        return h * fdp.psum(h.sum())

    found = fdp.grad(lambda w, x: fn(w, x).sum(), devices=THREE, reduction="sum", executor=executor)(W, X)
    assert sorted(seen) == [0, 1, 2]
    assert_close_tree(found, torch.func.grad(lambda w: ((w * X) * (w * X).sum()).sum())(W))
