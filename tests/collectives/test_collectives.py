"""Collectives: their values and gradients are those of plain torch over the arguments of all slots."""

import contextlib
import contextvars
import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.containers import Point, tensors_of, with_tensors
from tests.common.numbers import numbers
from tests.common.threads import side_by_side

COUNTS = (1, 2, 3, 4)
EXECUTORS = ("sequential", "threads")
each_count = pytest.mark.parametrize("n", COUNTS)
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
Columns = Sequence[Tensor]


# ---- the table: each collective, and plain torch over the arguments of all slots


def balanced(size: int, n: int) -> list[int]:
    return [size // n + (i < size % n) for i in range(n)]


def same(x: Tensor) -> Tensor:
    """Of a shard, what has the same shape on all."""
    return torch.stack([x.sin().sum(0), x.cos().sum(0), x.square().sum(0), x.sum(0), x.mean(0)])  # (5, 3)


def weighted(weights: Sequence[float], xs: Columns) -> list[Tensor]:
    mean = sum((weight * x for weight, x in zip(weights, xs, strict=True)), torch.zeros(())) / sum(weights)
    return [mean] * len(xs)


def total(xs: Columns) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def exchanged(xs: Columns, split: int, join: int) -> list[Tensor]:
    pieces = [x.split(balanced(x.shape[split], len(xs)), split) for x in xs]
    return [torch.cat(column, join) for column in zip(*pieces, strict=True)]


def permuted(xs: Columns, pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
    found = [torch.zeros_like(x) for x in xs]
    for source, target in pairs:
        found[target] = xs[source]
    return found


def partial_pairs(n: int) -> list[tuple[int, int]]:
    return [(i, n - 1 - i) for i in range(n) if i != 1]


def ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


class Case(NamedTuple):
    """A collective of `before(shard)`, and what becomes of the arguments of all slots and their numbers of rows."""

    call: Callable[[Tensor], Tensor]
    oracle: Callable[[Columns, Sequence[int]], Sequence[Tensor]]
    before: Callable[[Tensor], Tensor] = same


CASES: dict[str, Case] = {
    "psum": Case(fdp.psum, lambda xs, rows: [sum(xs[1:], xs[0])] * len(xs)),
    "pmean": Case(fdp.pmean, lambda xs, rows: weighted([1] * len(xs), xs)),
    "pmean-number": Case(
        lambda x: fdp.pmean(x, weight=fdp.axis_index() + 1.5),
        lambda xs, rows: weighted([i + 1.5 for i in range(len(xs))], xs),
    ),
    "pmean-tensor": Case(
        lambda x: fdp.pmean(x, weight=torch.tensor(fdp.axis_index() + 2)),
        lambda xs, rows: weighted([i + 2 for i in range(len(xs))], xs),
    ),
    "pmean-rows": Case(lambda x: fdp.pmean(x, weight="rows"), lambda xs, rows: weighted(rows, xs)),
    "all_gather": Case(fdp.all_gather, lambda xs, rows: [torch.cat(list(xs))] * len(xs), torch.sin),
    "all_gather-last": Case(
        lambda x: fdp.all_gather(x, dim=-1), lambda xs, rows: [torch.cat(list(xs), -1)] * len(xs), lambda x: x.sin().T
    ),
    "all_gather-stack": Case(
        lambda x: fdp.all_gather(x, stack=True), lambda xs, rows: [torch.stack(list(xs))] * len(xs)
    ),
    "all_gather-stack-last": Case(
        lambda x: fdp.all_gather(x, stack=True, dim=-1), lambda xs, rows: [torch.stack(list(xs), -1)] * len(xs)
    ),
    "all_gather-stack-1": Case(
        lambda x: fdp.all_gather(x, stack=True, dim=1), lambda xs, rows: [torch.stack(list(xs), 1)] * len(xs)
    ),
    "psum_scatter": Case(fdp.psum_scatter, lambda xs, rows: total(xs).split(balanced(xs[0].shape[0], len(xs)))),
    "psum_scatter-last": Case(
        lambda x: fdp.psum_scatter(x, dim=-1),
        lambda xs, rows: total(xs).split(balanced(xs[0].shape[-1], len(xs)), -1),
    ),
    "all_to_all": Case(
        lambda x: fdp.all_to_all(x, split_dim=1, concat_dim=0), lambda xs, rows: exchanged(xs, 1, 0), torch.sin
    ),
    "all_to_all-back": Case(
        lambda x: fdp.all_to_all(x, split_dim=0, concat_dim=-1),
        lambda xs, rows: exchanged(xs, 0, -1),
        lambda x: x.sin().T,
    ),
    "all_to_all-same": Case(
        lambda x: fdp.all_to_all(x, split_dim=0, concat_dim=0), lambda xs, rows: exchanged(xs, 0, 0)
    ),
    "ppermute-ring": Case(
        lambda x: fdp.ppermute(x, ring(fdp.axis_size())), lambda xs, rows: permuted(xs, ring(len(xs)))
    ),
    "ppermute-partial": Case(
        lambda x: fdp.ppermute(x, partial_pairs(fdp.axis_size())),
        lambda xs, rows: permuted(xs, partial_pairs(len(xs))),
    ),
    "ppermute-nothing": Case(lambda x: fdp.ppermute(x, []), lambda xs, rows: permuted(xs, [])),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EXTREMES: dict[str, Case] = {
    "pmax": Case(fdp.pmax, lambda xs, rows: [torch.stack(list(xs)).amax(0)] * len(xs)),
    "pmin": Case(fdp.pmin, lambda xs, rows: [torch.stack(list(xs)).amin(0)] * len(xs)),
}

W = numbers(3)
X = numbers(7, 3) + 0.3  # over 2, 3 and 4 slots it is uneven


def local(case: Case, w: Tensor, x: Tensor) -> Tensor:
    return case.before(w * x)


def mapped(case: Case, n: int, executor: Any) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return case.call(local(case, w, x)) * w.sum()

    return lambda w, x: fdp.dp_apply(fn, w, x, fdp.virtual_devices(n), executor=executor, out_dims="list")


def plain(case: Case, n: int) -> Callable[..., list[Tensor]]:
    """The same in one process; `w` may be a list with one for each slot."""

    def fn(w: Any, x: Tensor) -> list[Tensor]:
        ws = w if isinstance(w, list) else [w] * n
        rows = balanced(len(x), n)
        args = [local(case, each, part) for each, part in zip(ws, x.split(rows), strict=True)]
        return [out * each.sum() for out, each in zip(case.oracle(args, rows), ws, strict=True)]

    return fn


def cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    return [numbers(*out.shape) + i for i, out in enumerate(outs)]


def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def filled(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Zeros where plain torch has found that nothing depends on a leaf."""
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, (W, X), strict=False)]


def leaves() -> tuple[Tensor, Tensor]:
    return W.clone().requires_grad_(), X.clone().requires_grad_()


# ---------------------------------------------------------------- differentiated outside


@each_executor
@each_count
@pytest.mark.parametrize("case", (CASES | EXTREMES).values(), ids=CASES | EXTREMES)
def test_values(case: Case, n: int, executor: str):
    assert_close_tree(mapped(case, n, executor)(W, X), plain(case, n)(W, X))


@each_executor
@each_count
@each_case
def test_backward(case: Case, n: int, executor: str):
    found, wanted = leaves(), leaves()
    outs, expected = mapped(case, n, executor)(*found), plain(case, n)(*wanted)
    assert_close_tree(list(outs), list(expected))
    product(outs, cotangents(outs)).backward()
    product(expected, cotangents(outs)).backward()
    assert_close_tree(filled(x.grad for x in found), filled(x.grad for x in wanted))


@each_executor
@each_count
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


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@each_case
def test_second_order(case: Case, n: int, executor: str):
    def twice(fn: Callable[..., Any]) -> Any:
        w, x = leaves()
        outs = fn(w, x)
        grads = [product(outs, cotangents(outs))]
        for _ in range(3):
            total = product(grads, cotangents(grads)) + 0 * (w.sum() + x.sum()).square()
            grads = filled(torch.autograd.grad(total, (w, x), create_graph=True, allow_unused=True))
        return grads

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


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@each_case
def test_transforms_outside(case: Case, transform: Callable[..., Any]):
    def loss(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda w: torch.stack([(out.square() * (i + 1)).sum() for i, out in enumerate(fn(w, X))]).sum()

    assert_close_tree(transform(loss(mapped(case, 3, "auto")))(W), transform(loss(plain(case, 3)))(W))


# ---------------------------------------------------------------- differentiated inside


def inside_func(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    return torch.func.grad(loss)(w)


def inside_vjp(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    value, vjp, *_ = torch.func.vjp(loss, w)
    return vjp(torch.ones_like(value))[0]


def inside_jacrev(loss: Callable[[Tensor], Tensor], w: Tensor) -> Any:
    return torch.func.jacrev(loss)(w)


def inside_autograd(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    own = w.detach().requires_grad_()
    return torch.autograd.grad(loss(own), own)[0]


def inside_backward(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    own = w.detach().requires_grad_()
    loss(own).backward()
    assert own.grad is not None
    return own.grad


def inside_fdp(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    return fdp.grad(lambda w: loss(w), reduction="sum", axis_name="inner")(w)


INSIDE = (inside_func, inside_vjp, inside_jacrev, inside_autograd, inside_backward, inside_fdp)


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("inside", INSIDE)
@each_case
def test_inside(case: Case, inside: Callable[..., Tensor], n: int, executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            out = case.call(local(case, w, x)) * w.sum()
            return (out * (numbers(*out.shape) + fdp.axis_index())).sum()

        return inside(loss, w)

    found = fdp.dp_apply(fn, W, X, fdp.virtual_devices(n), executor=executor, out_dims="list")
    ws = [W.clone().requires_grad_() for _ in range(n)]
    outs = plain(case, n)(ws, X)
    assert_close_tree(list(found), list(torch.autograd.grad(product(outs, cotangents(outs)), ws)))


@each_executor
@each_count
@each_case
def test_value_and_grad(case: Case, n: int, executor: Any):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        out = case.call(local(case, w, x)) * w.sum()
        return (out * (numbers(*out.shape) + fdp.axis_index())).sum()

    devices = fdp.virtual_devices(n)
    found = fdp.value_and_grad(loss, devices=devices, reduction="sum", executor=executor)(W, X)
    w = W.clone().requires_grad_()
    outs = plain(case, n)(w, X)
    value = product(outs, cotangents(outs))
    assert_close_tree(found, (value, torch.autograd.grad(value, w)[0]))


@each_executor
@pytest.mark.parametrize("case", [CASES[name] for name in ("psum", "all_gather", "psum_scatter", "all_to_all")])
def test_inside_then_outside(case: Case, executor: Any):
    """A gradient taken inside, differentiated outside."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        own = w * 1

        def loss(w: Tensor) -> Tensor:
            out = case.call(local(case, w, x)) * w.sum()
            return (out.square() * (numbers(*out.shape) + fdp.axis_index())).sum()

        return torch.autograd.grad(loss(own), own, create_graph=True)[0]

    w, v = W.clone().requires_grad_(), W.clone().requires_grad_()
    found = fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor, out_dims="list")
    ws = [v * 1 for _ in range(3)]
    outs = plain(case, 3)(ws, X)
    total = product([out.square() for out in outs], cotangents(outs))
    expected = torch.autograd.grad(total, ws, create_graph=True)
    assert_close_tree(list(found), list(expected))
    product(found, cotangents(found)).backward()
    product(expected, cotangents(found)).backward()
    assert_close_tree(w.grad, v.grad)


def test_the_transpose_of_psum_is_psum():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: fdp.psum((w * x).sum()))(w)

    assert torch.equal(
        fdp.dp_apply(fn, torch.ones(()), torch.ones(3), fdp.virtual_devices(3), out_dims="stack"),
        torch.full((3,), 3.0),
    )


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extreme", [fdp.pmax, fdp.pmin])
def test_extremes_cannot_be_differentiated(extreme: Any, n: int, executor: Any):
    devices = fdp.virtual_devices(n)
    w = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        fdp.dp_apply(lambda w, x: extreme(w) * x, w, torch.ones(3), devices, executor=executor).sum().backward()
    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        fdp.grad(lambda w, x: extreme(w) * x.sum(), devices=devices, executor=executor)(w.detach(), torch.ones(3))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extreme", [fdp.pmax, fdp.pmin])
def test_extremes_cannot_be_transformed(extreme: Any, n: int):
    def loss(w: Tensor) -> Tensor:
        return fdp.dp_apply(lambda w, x: extreme(w) * x, w, torch.ones(3), fdp.virtual_devices(n)).sum()

    with pytest.raises(RuntimeError, match=f"{extreme.__name__} cannot be differentiated"):
        torch.func.grad(loss)(torch.ones(()))


@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extreme", [fdp.pmax, fdp.pmin])
def test_extremes_of_what_is_detached(extreme: Any, n: int, executor: Any):
    w = torch.ones((), requires_grad=True)
    out = fdp.dp_apply(
        lambda w, x: extreme(w.detach()) * w * x, w, torch.ones(3), fdp.virtual_devices(n), executor=executor
    )
    out.sum().backward()
    assert w.grad is not None
    assert w.grad.item() == 3.0


# ---------------------------------------------------------------- who needs a gradient


@each_executor
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("name", ["psum", "pmean-rows", "all_gather", "psum_scatter", "all_to_all", "ppermute-ring"])
def test_only_one_slot_gives_what_needs_a_gradient(name: str, slot: int, executor: Any):
    case = CASES[name]

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return case.call(local(case, w if fdp.axis_index() == slot else w.detach(), x))

    w, v = W.clone().requires_grad_(), W.clone().requires_grad_()
    outs = fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor, out_dims="list")
    rows = balanced(7, 3)
    args = [local(case, v if i == slot else v.detach(), x) for i, x in enumerate(X.split(rows))]
    expected = case.oracle(args, rows)
    product(outs, cotangents(outs)).backward()
    product(expected, cotangents(outs)).backward()
    assert_close_tree(filled([w.grad]), filled([v.grad]))


@each_executor
@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize("case", [CASES[name] for name in ("psum", "all_gather", "ppermute-ring")])
def test_only_one_slot_uses_the_result(case: Case, slot: int, executor: Any):
    """Right if all return it, an error that says so if the others let go of it."""

    def fn(w: Tensor, x: Tensor, keep: bool) -> Any:
        out = case.call(local(case, w, x))
        used = out.sum() if fdp.axis_index() == slot else w.sum()
        return (used, out) if keep else used

    w, v = W.clone().requires_grad_(), W.clone().requires_grad_()
    call: Any = fdp.shard_map(
        fn, devices=fdp.virtual_devices(3), in_dims=(None, 0, None), out_dims="list", executor=executor
    )
    rows = balanced(7, 3)
    results = case.oracle([local(case, v, x) for x in X.split(rows)], rows)
    expected = [out.sum() if i == slot else v.sum() for i, out in enumerate(results)]
    product(expected, cotangents(expected)).backward()
    outs, _ = call(w, X, True)
    product(outs, cotangents(outs)).backward()
    assert_close_tree(w.grad, v.grad)
    outs = call(w, X, False)
    with pytest.raises(RuntimeError, match=rf"goes through it in shard {slot}, but shard . has let go of the result"):
        product(outs, cotangents(outs)).backward()


@each_executor
@pytest.mark.parametrize("slot", range(3))
@each_case
def test_backward_from_one_entry(case: Case, slot: int, executor: Any):
    found, wanted = leaves(), leaves()
    outs, expected = mapped(case, 3, executor)(*found), plain(case, 3)(*wanted)
    weight = cotangents(outs)[slot]
    (outs[slot] * weight).sum().backward()
    (expected[slot] * weight).sum().backward()
    assert_close_tree(filled(x.grad for x in found), filled(x.grad for x in wanted))


@each_executor
@pytest.mark.parametrize("is_leaf", [True, False])
@each_case
def test_captured(case: Case, is_leaf: bool, executor: Any):
    def run(fn: Callable[[Tensor], list[Tensor]]) -> Any:
        w = W.clone().requires_grad_()
        captured = w if is_leaf else w.exp()
        outs = fn(captured)
        product(outs, cotangents(outs)).backward()
        return w.grad

    def found(captured: Tensor) -> list[Tensor]:
        def fn(_: Any, x: Tensor) -> Tensor:
            return case.call(local(case, captured, x)) * captured.sum()

        return fdp.dp_apply(fn, None, X, fdp.virtual_devices(3), executor=executor, out_dims="list")

    assert_close_tree(run(found), run(lambda captured: plain(case, 3)(captured, X)))


@each_executor
def test_captured_and_passed(executor: Any):
    def run(one: bool) -> Any:
        w = W.clone().requires_grad_()
        u = w * 2
        if one:
            out = (w * X * u).sum() * (u * X).sum() * X.sum(1)
        else:

            def fn(w: Tensor, x: Tensor) -> Tensor:
                return fdp.psum((w * x * u).sum()) * fdp.psum((u * x).sum()) * x.sum(1)

            out = fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor)
        (first,) = torch.autograd.grad((out * numbers(7)).sum(), w, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), w)

    assert_close_tree(run(one=False), run(one=True))


@each_executor
def test_a_tensor_made_of_the_same_graph(executor: Any):
    """What goes in and what comes out are used together outside."""
    w, v = W.clone().requires_grad_(), W.clone().requires_grad_()
    u, t = w.exp(), v.exp()
    out = fdp.dp_apply(
        lambda w, x: fdp.psum((w * x).sum()) * x, u, X, fdp.virtual_devices(2), executor=executor, out_dims=0
    )
    (out.sum() * u.sum()).backward()
    (((t * X).sum() * X).sum() * t.sum()).backward()
    assert_close_tree(w.grad, v.grad)


@each_executor
@each_case
def test_graph_kept_and_freed(case: Case, executor: Any):
    w, x = leaves()
    outs = mapped(case, 3, executor)(w, x)
    loss = product(outs, cotangents(outs))
    first = torch.autograd.grad(loss, (w, x), retain_graph=True, allow_unused=True)  # nothing is sent of some
    assert_close_tree(torch.autograd.grad(loss, (w, x), retain_graph=True, allow_unused=True), first)
    assert_close_tree(torch.autograd.grad(loss, (w, x), allow_unused=True), first)
    with pytest.raises(RuntimeError, match=r"backward through the graph.* a second time"):
        torch.autograd.grad(loss, (w, x))
    outs = mapped(case, 3, executor)(w, x)
    torch.autograd.grad(outs[0].sum(), w)
    with pytest.raises(RuntimeError, match=r"backward through the graph.* a second time"):
        torch.autograd.grad(outs[1].sum(), w)


@each_executor
@each_case
def test_without_gradients(case: Case, executor: Any):
    w, x = leaves()
    expected = plain(case, 3)(W, X)
    with torch.no_grad():
        outs = mapped(case, 3, executor)(w, x)
    assert not any(out.requires_grad for out in outs)
    assert_close_tree(list(outs), list(expected))
    with torch.inference_mode():
        outs = mapped(case, 3, executor)(w, x)
        assert all(out.is_inference() for out in outs)
        assert_close_tree([out.clone() for out in outs], list(expected))


# ---------------------------------------------------------------- trees and dtypes


def everywhere(fn: Callable[..., Any], *, n: int, executor: Any = "auto", **options: Any) -> list[Any]:
    """What a function of the number of the slot returns on each."""
    numbers = fdp.Sharded(tuple(range(n)), fdp.virtual_devices(n))
    out = fdp.parallel_apply(lambda i: [fn(i)], numbers, executor=executor, **options)
    assert isinstance(out, fdp.Sharded)
    return [shard[0] for shard in out.shards]


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


TREE_MAKERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda x: {"b": x, "a": (x + 1, x.reshape(1, -1))},
    "dataclass": lambda x: Pair(x, [x * 2]),
    "namedtuple": lambda x: Point(x, {"y": Point(x * 3, ())}),
    "dtypes": lambda x: {"f": x, "i": (10 * x).long(), "h": x.bfloat16(), "c": x + 1j, "f32": x.float()},
    "many": lambda x: [x + i for i in range(40)],
    "tied": lambda x: (x, x),
    "empty": lambda x: {"nothing": [], "none": None},
    "no-elements": lambda x: x[:0],
}


@each_executor
@each_count
@pytest.mark.parametrize("make", TREE_MAKERS.values(), ids=TREE_MAKERS)
def test_trees(make: Callable[[Any], Any], n: int, executor: Any):
    def value(i: int) -> Any:
        return make(numbers(4) * (i + 1))

    def summed(*xs: Tensor) -> Tensor:
        dtype = xs[0].dtype
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        return torch.stack([x.to(wide) for x in xs]).sum(0).to(dtype)

    def combine(fn: Callable[..., Any]) -> Any:
        columns = zip(*(tensors_of(value(i)) for i in range(n)), strict=True)
        return with_tensors(value(0), iter([fn(*column) for column in columns]))

    for got in everywhere(lambda i: fdp.psum(value(i)), n=n, executor=executor):
        assert_close_tree(got, combine(summed))
    for got in everywhere(lambda i: fdp.all_gather(value(i)), n=n, executor=executor):
        assert_close_tree(got, combine(lambda *xs: torch.cat(xs)))
    for i, got in enumerate(everywhere(lambda i: fdp.ppermute(value(i), ring(n)), n=n, executor=executor)):
        assert_close_tree(got, value((i - 1) % n))


@each_executor
@each_count
def test_numbers(n: int, executor: Any):
    def fn(i: int) -> Any:
        tree = {"x": i + 1, "y": [float(i), numbers(2) * i]}
        return fdp.psum(tree), fdp.pmax(tree), fdp.pmin(tree), fdp.pmean(tree), fdp.pmean(i, weight=i + 1)

    k = n - 1
    for total, most, least, mean, weighted in everywhere(fn, n=n, executor=executor):
        assert_close_tree(total, {"x": n * (n + 1) // 2, "y": [n * k / 2, numbers(2) * (n * k / 2)]})
        assert_close_tree(most["x"], n)
        assert_close_tree(least["y"][0], 0.0)
        assert_close_tree(mean, {"x": (n + 1) / 2, "y": [k / 2, numbers(2) * (k / 2)]})
        assert weighted == pytest.approx(sum(i * (i + 1) for i in range(n)) / (n * (n + 1) / 2))


@each_count
def test_half_precision_is_added_up_in_float32(n: int):
    def fn(i: int) -> Tensor:
        return fdp.psum(torch.tensor([256.0 if i == 0 else 1.0]).bfloat16())

    for got in everywhere(fn, n=n):
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, torch.tensor([255.0 + n]).bfloat16())


@each_count
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize(
    "weight",
    [None, 2, 0.5, "rows", torch.tensor(2), torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)],
    ids=str,
)
def test_pmean_keeps_the_dtype(weight: Any, shape: Any, dtype: Any, n: int):
    def fn(w: Any, x: Tensor) -> Tensor:
        return fdp.pmean(torch.ones(shape, dtype=dtype), weight=weight)

    found = fdp.dp_apply(fn, None, torch.ones(4), fdp.virtual_devices(n), out_dims=None)
    assert_close_tree(found, torch.ones(shape, dtype=dtype))


@each_count
def test_integers(n: int):
    big = 2**53 + 1

    def fn(i: int) -> Any:
        return fdp.psum(torch.tensor([big])), fdp.pmax(torch.tensor([i])), fdp.pmin(torch.tensor([i > 0]))

    for total, most, least in everywhere(fn, n=n):
        assert torch.equal(total, torch.tensor([n * big]))
        assert torch.equal(most, torch.tensor([n - 1]))
        assert torch.equal(least, torch.tensor([False]))
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=r"pmean: integers have no mean: tree\['a'\]"):
            everywhere(lambda i, dtype=dtype: fdp.pmean({"a": torch.ones(2, dtype=dtype)}), n=n)


@each_count
def test_a_sum_of_bools_is_no_logical_or(n: int):
    """It counts, or it is refused."""
    try:
        found = everywhere(lambda i: fdp.psum(torch.tensor([True])), n=n)
    except TypeError as error:
        assert "bool" in str(error)  # noqa: PT017
    else:
        for got in found:
            assert got.item() == n
            assert got.dtype is torch.int64


@each_executor
def test_gradients_beside_integers(executor: Any):
    w, v = W.clone().requires_grad_(), W.clone().requires_grad_()

    def fn(w: Tensor, x: Tensor) -> Tensor:
        tree = fdp.psum({"a": torch.tensor(len(x)), "b": (w * x).sum(0), "c": x.detach().sum(0), "d": 3})
        assert tree["a"].item() == 7
        return (tree["b"] * tree["a"] * tree["d"] * tree["c"]).sum() * x

    fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor).sum().backward()
    (((v * X).sum(0) * 7 * 9 * X.sum(0)).sum() * X).sum().backward()
    assert_close_tree(w.grad, v.grad)


@each_executor
def test_gradients_of_some_results(executor: Any):
    w, v = leaves(), leaves()

    def fn(w: Tensor, x: Tensor) -> Tensor:
        used, _ = fdp.psum(((w * x).sum(), (w * x).sum(0)))
        return used * x

    fdp.dp_apply(fn, w[0], w[1], fdp.virtual_devices(3), executor=executor).sum().backward()
    ((v[0] * v[1]).sum() * v[1]).sum().backward()
    assert_close_tree([x.grad for x in w], [x.grad for x in v])


@each_executor
def test_complex_gradients(executor: Any):
    x = numbers(5, dtype=torch.complex128)
    w, v = (torch.tensor(2 - 1j, dtype=torch.complex128).requires_grad_() for _ in range(2))

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (fdp.psum((w * x).sum()) * x).abs()

    fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor=executor).sum().backward()
    ((v * x).sum() * x).abs().sum().backward()
    assert_close_tree(w.grad, v.grad)


@each_executor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_keep_the_dtype(dtype: Any, executor: Any):
    w = torch.ones(3, dtype=dtype, requires_grad=True)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return fdp.psum(w) * x

    out = fdp.dp_apply(fn, w, torch.ones(2, 3, dtype=dtype), fdp.virtual_devices(2), executor=executor)
    out.sum().backward()
    assert_close_tree(w.grad, torch.full((3,), 4, dtype=dtype))


# ---------------------------------------------------------------- places


@each_executor
@each_count
def test_places(n: int, executor: Any):
    def fn(w: Any, x: Tensor) -> Any:
        return [fdp.axis_index(), fdp.axis_size(), fdp.axis_rows(), len(x)]

    found = fdp.dp_apply(fn, None, X, fdp.virtual_devices(n), out_dims="list", executor=executor)
    assert [list(each) for each in zip(*found, strict=True)] == [[i, n, r, r] for i, r in enumerate(balanced(7, n))]


def test_slots_without_rows_do_not_count():
    def fn(w: Any, x: Tensor) -> Tensor:
        return fdp.psum(x.sum()) * fdp.axis_size() + x * 0

    assert torch.equal(fdp.dp_apply(fn, None, torch.ones(3), fdp.virtual_devices(8)), torch.full((3,), 9.0))
    found = fdp.dp_apply(fn, None, torch.ones(3), fdp.virtual_devices(3), weights=[1, 0, 2])
    assert torch.equal(found, torch.full((3,), 6.0))


def test_no_rows_where_nothing_was_split():
    with pytest.raises(ValueError, match="axis_rows: nothing was split along 'data', so that slots have no rows"):
        fdp.parallel_apply(lambda: fdp.axis_rows(), devices=fdp.virtual_devices(2))
    with pytest.raises(ValueError, match="axis_rows: nothing was split along 'data'"):
        fdp.parallel_apply(lambda: fdp.pmean(torch.ones(2), weight="rows"), devices=fdp.virtual_devices(2))


@each_executor
def test_shard_map_and_names(executor: Any):
    fn = fdp.shard_map(
        lambda w, x: fdp.psum(w * x.sum(), "rows") * x + fdp.axis_index("rows"),
        devices=fdp.virtual_devices(2),
        in_dims=(None, 0),
        axis_name="rows",
        executor=executor,
    )
    assert torch.equal(fn(torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0])), torch.tensor([12.0, 24.0, 37.0]))


# ---------------------------------------------------------------- weights of a mean


@each_executor
@pytest.mark.parametrize("empty", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["number", "float", "tensor", "float-tensor", "bool-tensor"])
def test_a_slot_of_weight_0_contributes_nothing(kind: str, empty: float, executor: Any):
    def weight(i: int) -> Any:
        value = {"number": int, "float": float}.get(kind, torch.tensor)(int(i != 1))
        return value.float() if kind == "float-tensor" else value.bool() if kind == "bool-tensor" else value

    def fn(w: Tensor, i: Tensor) -> Tensor:
        index = fdp.axis_index()
        own = w * (empty if index == 1 else index + 1.0)
        return fdp.pmean({"x": own, "n": empty if index == 1 else 1.0}, weight=weight(index))["x"] + 0 * i

    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = fdp.dp_apply(fn, w, torch.zeros(3), fdp.virtual_devices(3), executor=executor)
    assert torch.equal(out.double(), torch.full((3,), 2.0, dtype=torch.float64))


@each_executor
@pytest.mark.parametrize("weights", [(1, 0, 3), (1.0, 0.0, 3.0), (torch.tensor(1), torch.tensor(0), torch.tensor(3))])
def test_the_gradient_of_a_mean_with_a_weight_of_0(weights: Any, executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return fdp.pmean((w * x).sum(), weight=weights[fdp.axis_index()]) * x

    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor=executor)
    assert_close_tree(out, 2 * 2.5 * x)
    out.sum().backward()
    assert_close_tree(w.grad, torch.tensor(15.0, dtype=torch.float64))


def test_the_gradient_of_a_weight():
    """Of one that is 0, beside a NaN, too."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return fdp.pmean(torch.log(x), weight=w.sum() * (x > 0).squeeze()) + 0 * w.sum()

    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    fdp.dp_apply(fn, w, x, fdp.virtual_devices(2)).sum().backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()


@each_count
@pytest.mark.parametrize(
    "zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=["int", "float", "tensor", "ftensor"]
)
def test_a_mean_over_nothing(zero: Any, n: int):
    with pytest.raises(ValueError, match="pmean: all weights are 0"):
        everywhere(lambda i: fdp.pmean(torch.ones(2), weight=zero), n=n)


# ---------------------------------------------------------------- memory


@each_executor
@each_count
@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "pmean", "all_gather", "all_gather-stack", "ppermute-ring"])
def test_slots_own_their_results(name: str, n: int, executor: Any):
    case = (CASES | EXTREMES)[name]

    def fn(i: int) -> Tensor:
        x = torch.ones(3, dtype=torch.float64)
        first = case.call(x)
        assert torch.equal(x, torch.ones(3, dtype=torch.float64))
        before = first.clone()
        first.add_(100 * (i + 1))
        fdp.psum(0)
        assert torch.equal(first, before + 100 * (i + 1))
        x.zero_()
        assert torch.equal(first, before + 100 * (i + 1))
        return first

    everywhere(fn, n=n, executor=executor)


@each_executor
@each_count
@each_case
def test_arguments_are_not_changed(case: Case, n: int, executor: Any):
    def fn(w: Any, x: Tensor) -> Tensor:
        case.call(case.before(x) if case.before is same else x if case.before is torch.sin else x.T).mul_(0)
        return x

    before = X.clone()
    with contextlib.suppress(RuntimeError):  # with one slot it may be the argument itself, and is refused
        fdp.dp_apply(fn, None, X, fdp.virtual_devices(n), executor=executor)
    assert torch.equal(X, before)


@each_executor
@pytest.mark.parametrize("attached", [True, False])
def test_nothing_is_kept(attached: bool, executor: Any):
    def call() -> list[weakref.ref[Any]]:
        seen: list[weakref.ref[Any]] = []

        def fn(w: Tensor, x: Tensor) -> Tensor:
            y = fdp.psum(w * x.sum())
            seen.append(weakref.ref(y))
            return fdp.all_gather(y.exp(), stack=True).sum() * x

        w, x = torch.ones((), requires_grad=attached), torch.ones(3)
        out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(3), executor=executor)
        if attached:
            torch.autograd.grad(out.sum(), w)
        return [weakref.ref(w), weakref.ref(x), weakref.ref(out), weakref.ref(fn), *seen]

    call()
    gc.collect()
    gc.disable()
    try:
        assert {reference() for reference in call()} == {None}
    finally:
        gc.enable()


@each_executor
def test_an_argument_is_let_go_of(executor: Any):
    def fn(i: int) -> None:
        x = torch.ones(3)
        reference = weakref.ref(x)
        fdp.psum(x)
        del x
        fdp.psum(0)
        assert reference() is None

    everywhere(fn, n=3, executor=executor)


# ---------------------------------------------------------------- nested calls


@each_executor
@pytest.mark.parametrize("inner_executor", EXECUTORS)
@pytest.mark.parametrize("inner", ["data", "inner"])
def test_nested_calls(inner: str, inner_executor: Any, executor: Any):
    """The collectives of each, where only it is meant."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        def part(w: Tensor, x: Tensor) -> Tensor:
            return fdp.psum((w * x).sum(), inner) * x

        once = fdp.dp_apply(part, w, x, fdp.virtual_devices(2), axis_name=inner, executor=inner_executor)
        return once * fdp.psum((w * x).sum())

    def one(w: Tensor, x: Tensor) -> Tensor:
        return torch.cat([(w * part).sum() * part for part in x.split([4, 3])]) * (w * x).sum()

    found, wanted = leaves(), leaves()
    out, expected = fdp.dp_apply(fn, *found, fdp.virtual_devices(2), executor=executor), one(*wanted)
    assert_close_tree(out, expected)
    (out * numbers(7, 3)).sum().backward()
    (expected * numbers(7, 3)).sum().backward()
    assert_close_tree([x.grad for x in found], [x.grad for x in wanted])


@each_executor
def test_the_outer_axis_in_an_inner_call(executor: Any):
    """Right, or an error."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        def part(w: Tensor, x: Tensor) -> Tensor:
            assert fdp.axis_size("outer") == 2
            return fdp.psum((w * x).sum(), "outer") * x

        return fdp.dp_apply(part, w, x, fdp.virtual_devices(2), axis_name="inner", executor=executor)

    x = torch.arange(8.0)
    try:
        out = fdp.dp_apply(fn, torch.ones(()), x, fdp.virtual_devices(2), axis_name="outer", executor=executor)
    except RuntimeError as error:
        assert "psum" in str(error)  # noqa: PT017
    else:
        sums = torch.tensor([0 + 1 + 4 + 5.0, 2 + 3 + 6 + 7.0])
        assert torch.equal(out, x * sums.repeat_interleave(2).repeat(2))


def test_three_calls_deep():
    def one(w: Tensor, x: Tensor) -> Tensor:
        return fdp.psum(x.sum(), "c") * x

    def two(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.psum(x.sum(), "b")
        return fdp.dp_apply(one, w, x, fdp.virtual_devices(2), axis_name="c") * y

    def three(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.dp_apply(two, w, x, fdp.virtual_devices(2), axis_name="b")
        return y * fdp.psum(x.sum(), "a")

    x = torch.arange(8.0)
    sums = [x.view(4, 2).sum(1).repeat_interleave(2) * 0 + x, x.view(2, 4).sum(1).repeat_interleave(4), x.sum()]
    found = fdp.dp_apply(three, None, x, fdp.virtual_devices(2), axis_name="a")
    assert_close_tree(found, x * sums[0].view(4, 2).sum(1).repeat_interleave(2) * sums[1] * sums[2])


# ---------------------------------------------------------------- gradient functions


def whole_loss(w: Tensor, x: Tensor, keep: Tensor) -> Tensor:
    return ((x @ w).square() * keep).sum() / keep.sum()


@each_executor
@each_count
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_a_loss_that_normalises_by_psum_is_that_of_one_device(rows: int, n: int, executor: Any):
    x, keep = numbers(rows, 3), (torch.arange(rows) % 3 != 1).double()

    def loss(w: Tensor, x: Tensor, keep: Tensor) -> Tensor:
        return ((x @ w).square() * keep).sum() / fdp.psum(keep.sum())

    options: Any = {"devices": fdp.virtual_devices(n), "reduction": "sum", "executor": executor}
    value, grad = fdp.value_and_grad(loss, **options)(W, x, keep)
    expected = torch.func.grad_and_value(whole_loss)(W, x, keep)
    assert_close_tree((grad, value), expected)


@each_executor
@each_count
def test_a_mean_loss_through_centred_data(n: int, executor: Any):
    """A statistic of the whole batch inside, and rows of shards that differ."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        return (y - fdp.pmean(y.mean(0), weight="rows")).square().mean()

    def whole(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        return (y - y.mean(0)).square().mean()

    found = fdp.value_and_grad(loss, devices=fdp.virtual_devices(n), executor=executor)(W, X)
    grad, value = torch.func.grad_and_value(whole)(W, X)
    assert_close_tree(found, (value, grad))
    attached = W.clone().requires_grad_()
    _, first = fdp.value_and_grad(loss, devices=fdp.virtual_devices(n), executor=executor)(attached, X)
    (second,) = torch.autograd.grad(first.square().sum(), attached)
    assert_close_tree(second, torch.func.grad(lambda w: torch.func.grad(whole)(w, X).square().sum())(W))
    under = torch.func.grad(lambda w: fdp.grad(loss, devices=fdp.virtual_devices(n))(w, X).square().sum())
    with contextlib.suppress(RuntimeError):  # not supported, and then said so
        assert_close_tree(under(W), second)


@each_executor
def test_reduced_gradients_of_a_local_loss(executor: Any):
    """A step as of pmap: each slot differentiates its own loss, then the mean is taken."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        grad = torch.func.grad(lambda w: (x * w).square().mean())(w)
        return w - 0.1 * fdp.pmean(grad, weight="rows")

    devices = fdp.virtual_devices(3)
    state = fdp.replicate(W, devices)
    for _ in range(3):
        batch: Any = fdp.scatter(X, devices)
        found = fdp.parallel_apply(step, state, batch, executor=executor)
        assert isinstance(found, fdp.Sharded)
        state = fdp.Replicated(found.shards, found.devices)
    w = W
    for _ in range(3):
        w = w - 0.1 * torch.func.grad(lambda w: (X * w).square().mean())(w)
    for shard in state.shards:
        assert_close_tree(shard, w)
        assert torch.equal(shard, state.shards[0])


@each_executor
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches(microbatches: int, executor: Any):
    x = numbers(12, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum() / fdp.psum(len(x))

    found = fdp.value_and_grad(
        loss, devices=fdp.virtual_devices(2), reduction="sum", microbatches=microbatches, executor=executor
    )(W, x)
    grad, value = torch.func.grad_and_value(lambda w: (x @ w).square().mean() * microbatches)(W)
    assert_close_tree(found, (value, grad))


@each_executor
def test_uneven_microbatches_are_right_or_refused(executor: Any):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (fdp.psum(x).sum() * w.sum()).square()

    try:
        fdp.value_and_grad(loss, devices=fdp.virtual_devices(2), microbatches=2, executor=executor)(W, numbers(3, 3))
    except (RuntimeError, ValueError) as error:
        assert "psum" in str(error)  # noqa: PT017


# ---------------------------------------------------------------- randomness


def noisy(w: Tensor, x: Tensor) -> Tensor:
    mask = torch.nn.functional.dropout(torch.ones(len(x), 20))
    total = fdp.psum(mask.sum())
    return torch.cat([mask, torch.rand(len(x), 2), torch.randn(len(x), 1) * total], 1) * w


def test_seeded():
    x, w = torch.ones(6), torch.ones((), requires_grad=True)
    before = torch.get_rng_state()
    devices = fdp.virtual_devices(3)
    for seed in (0, 1):
        runs = [fdp.dp_apply(noisy, w, x, devices, seed=seed, executor=e) for e in EXECUTORS for _ in range(5)]
        assert all(torch.equal(run, runs[0]) for run in runs)
        assert torch.equal(torch.get_rng_state(), before)
        parts = runs[0].split(2)
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(parts, 2))
        runs[0].sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(fdp.dp_apply(noisy, w, x, devices, seed=0), fdp.dp_apply(noisy, w, x, devices, seed=1))


def test_seeded_draws_are_those_without_collectives():
    def plainly(w: Any, x: Tensor) -> Tensor:
        return torch.rand(len(x), 4)

    def meeting(w: Any, x: Tensor) -> Tensor:
        first = torch.rand(len(x), 2)
        fdp.psum(first.sum())
        return first

    def both(w: Any, x: Tensor) -> Tensor:
        fdp.psum(0)
        return torch.rand(len(x), 4)

    devices = fdp.virtual_devices(3)
    expected = fdp.dp_apply(plainly, None, torch.ones(6), devices, seed=3)
    assert torch.equal(fdp.dp_apply(both, None, torch.ones(6), devices, seed=3), expected)
    torch.manual_seed(fdp.fold_in(3, 1))
    assert torch.equal(fdp.dp_apply(meeting, None, torch.ones(6), devices, seed=3)[2:4], torch.rand(2, 2))


@each_executor
def test_seeded_in_microbatches(executor: Any):
    def loss(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.rand(())
        return w * fdp.psum(draw) * x.mean(), draw

    def loss_alone(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return w * x.mean(), torch.rand(())

    def draws(fn: Any) -> Any:
        options: Any = {"devices": fdp.virtual_devices(2), "microbatches": 2, "seed": 5, "executor": executor}
        (_, aux), _ = fdp.value_and_grad(fn, has_aux=True, aux_dims="stack", **options)(torch.ones(()), torch.ones(4))
        return aux

    found = draws(loss)
    assert torch.equal(found, draws(loss))
    assert len(set(found.tolist())) == 4
    assert torch.equal(found, draws(loss_alone))


@each_executor
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, executor: Any):
    def body(w: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout((w * x).exp() * fdp.psum((w * x).sum()))

    def fn(w: Tensor, x: Tensor, saved: bool) -> Tensor:
        return checkpoint(body, w, x, use_reentrant=reentrant) if saved else body(w, x)

    def run(saved: bool) -> Any:
        w = W.clone().requires_grad_()
        out = fdp.dp_apply(fn, w, (X, saved), fdp.virtual_devices(3), seed=3, executor=executor)
        (grad,) = torch.autograd.grad(out.square().sum(), w)
        return out, grad

    if not reentrant:
        assert_close_tree(run(saved=True), run(saved=False))
        return
    with pytest.raises(RuntimeError, match=r"calls whose slots meet in collectives.*Pass use_reentrant=False"):
        run(saved=True)


@each_executor
def test_a_reentrant_checkpoint_beside_a_collective(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.tanh(h * w), x, use_reentrant=True) - fdp.pmean(x.mean())

    w, x = leaves()
    out: Any = fdp.dp_apply(fn, w, x, fdp.virtual_devices(2), executor=executor)
    with pytest.raises(RuntimeError, match=r"calls whose slots meet in collectives.*Pass use_reentrant=False"):
        out.sum().backward()
    out = fdp.parallel_apply(lambda w, x: checkpoint(torch.mul, x, w, use_reentrant=True), w, x, devices=("cpu",) * 2)
    with pytest.raises(RuntimeError, match=r"not supported in parallel_apply.*Pass use_reentrant=False"):
        fdp.gather(out, "sum").sum().backward()


@each_executor
def test_checkpoint_without_a_seed(executor: Any):
    def body(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).exp() * fdp.psum((w * x).sum())

    def run(keep: bool) -> Any:
        def fn(w: Tensor, x: Tensor) -> Any:
            return checkpoint(body, w, x, use_reentrant=False, preserve_rng_state=keep)

        w = W.clone().requires_grad_()
        out = fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor)
        return torch.autograd.grad(out.sum(), w)

    v = W.clone().requires_grad_()
    expected = torch.autograd.grad((((v * X).exp()) * (v * X).sum()).sum(), v)
    assert_close_tree(run(keep=False), expected)
    try:
        assert_close_tree(run(keep=True), expected)
    except RuntimeError as error:
        if "Pass seed=" not in str(error):
            raise


# ---------------------------------------------------------------- torch's settings


@each_executor
def test_settings_of_the_caller(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        first = fdp.psum(w @ w)
        assert torch.is_autocast_enabled("cpu")
        second = w @ w
        assert first.dtype is second.dtype is torch.bfloat16
        assert not torch.is_grad_enabled()
        return x

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fdp.dp_apply(fn, torch.eye(2), torch.ones(3), fdp.virtual_devices(3), executor=executor)


@each_executor
def test_grad_mode_inside_is_the_slots_own(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(fdp.axis_index() != 1):
            y = fdp.psum((w * x).sum().detach())
            assert torch.is_grad_enabled() == (fdp.axis_index() != 1)
        assert torch.is_grad_enabled()
        return y * w * x

    w = torch.ones((), requires_grad=True)
    fdp.dp_apply(fn, w, torch.ones(3), fdp.virtual_devices(3), executor=executor).sum().backward()
    assert w.grad is not None
    assert w.grad.item() == 9.0


def test_both_executors_agree_often():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.psum((w * x).sin().sum(0))
        return fdp.all_gather(x * y).sum(0) * fdp.ppermute(y, ring(fdp.axis_size())) + x

    def run(executor: Any) -> Any:
        w, x = leaves()
        out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(4), executor=executor)
        return out, *torch.autograd.grad(out.square().sum(), (w, x))

    expected = run("sequential")
    with side_by_side():
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(run("threads"), expected, strict=True))


# ---------------------------------------------------------------- messages


Say = Callable[[], Any]


def test_outside_of_any_call():
    calls: dict[str, Say] = {
        "axis_index": fdp.axis_index,
        "axis_size": fdp.axis_size,
        "axis_rows": fdp.axis_rows,
        "psum": lambda: fdp.psum(X),
        "pmean": lambda: fdp.pmean(X),
        "pmax": lambda: fdp.pmax(X),
        "pmin": lambda: fdp.pmin(X),
        "all_gather": lambda: fdp.all_gather(X),
        "psum_scatter": lambda: fdp.psum_scatter(X),
        "all_to_all": lambda: fdp.all_to_all(X, split_dim=0, concat_dim=0),
        "ppermute": lambda: fdp.ppermute(X, [(0, 0)]),
    }
    for name, call in calls.items():
        with pytest.raises(NameError, match=f"{name}: there is no axis 'data' here.*no mapped function"):
            call()
    for n in (1, 2):
        with pytest.raises(NameError, match=r"psum: there is no axis 'rows' here\. There is 'data'"):
            everywhere(lambda i: fdp.psum(X, "rows"), n=n)


def as_any(x: Any) -> Any:
    """What the type checker would refuse too."""
    return x


WRONG: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "shapes": (lambda i: fdp.psum({"a": torch.ones(2 + i)}), ValueError, r"psum.*shard 0.*shard 1"),
    "shapes-that-broadcast": (lambda i: fdp.psum(torch.ones(1 + i)), ValueError, r"psum.*shard 0.*shard 1"),
    "dtypes": (
        lambda i: fdp.psum(torch.ones(2, dtype=(torch.float32, torch.float64)[i])),
        ValueError,
        r"psum.*float32.*shard 0.*float64.*shard 1",
    ),
    "structures": (lambda i: fdp.psum([X] if i else {"a": X}), ValueError, r"psum.*shard 0.*shard 1"),
    "keys": (lambda i: fdp.psum({"ab"[i]: X}), ValueError, r"psum.*'a'.*shard 0.*'b'.*shard 1"),
    "counts": (lambda i: fdp.psum([X] * (i + 1)), ValueError, r"psum.*shard 0.*shard 1"),
    "number-and-tensor": (lambda i: fdp.psum(X if i else 1), ValueError, r"psum.*shard 0.*shard 1"),
    "how-many-numbers": (lambda i: fdp.psum([1] * (i + 1)), ValueError, r"psum.*shard 0.*shard 1"),
    "where-numbers-are": (lambda i: fdp.psum([1] if i else {"a": 1}), ValueError, r"psum.*shard 0.*shard 1"),
    "dims": (lambda i: fdp.all_gather(torch.ones(2, 2), dim=i), ValueError, r"all_gather.*shard 0.*shard 1"),
    "stack": (
        lambda i: fdp.all_gather(torch.ones(2, 2), stack=i == 1),
        ValueError,
        r"all_gather.*shard 0.*shard 1",
    ),
    "other-dims": (lambda i: fdp.all_gather(torch.ones(2, 2 + i)), ValueError, r"all_gather.*shard 0.*shard 1"),
    "to-all": (
        lambda i: fdp.all_to_all(torch.ones(2, 2 + i), split_dim=1, concat_dim=0),
        ValueError,
        r"all_to_all.*shard 0.*shard 1",
    ),
    "perms": (lambda i: fdp.ppermute(X, [(0, i)]), ValueError, r"ppermute.*shard 0.*shard 1"),
    "perm-slots": (lambda i: fdp.ppermute(X, as_any([0, 1])), TypeError, r"pairs \(from, to\) of slots.*got \[0, 1\]"),
    "perm-dict": (lambda i: fdp.ppermute(X, as_any({0: 1})), TypeError, r"pairs \(from, to\) of slots.*got \{0: 1\}"),
    "perm-floats": (
        lambda i: fdp.ppermute(X, as_any([(0.7, 1.2)])),
        TypeError,
        r"pairs \(from, to\) of slots.*got \[\(0\.7",
    ),
    "perm-twice": (lambda i: fdp.ppermute(X, [(0, 1), (1, 1)]), ValueError, r"ppermute.*twice on one side"),
    "perm-range": (lambda i: fdp.ppermute(X, [(0, 2)]), ValueError, r"ppermute.*there are 2"),
    "perm-negative": (lambda i: fdp.ppermute(X, [(0, -1)]), ValueError, r"ppermute.*there are 2"),
    "weight-typo": (
        lambda i: fdp.pmean(X, weight="row"),
        TypeError,
        r"pmean: weight must be a number, a 0-dim tensor or 'rows', got 'row'",
    ),
    "weight-list": (lambda i: fdp.pmean(X, weight=[1, 2]), TypeError, r"pmean: weight must be.*got \[1, 2\]"),
    "weight-vector": (
        lambda i: fdp.pmean(X, weight=torch.ones(2)),
        TypeError,
        r"pmean: weight must be.*got a tensor of torch.float32 with shape \(2,\)",
    ),
    "weight-complex": (lambda i: fdp.pmean(X, weight=1j), TypeError, r"pmean: weight must be.*got 1j"),
    "weight-negative": (
        lambda i: fdp.pmean(X, weight=1 - 2 * i),
        ValueError,
        r"pmean: weight must be finite and not negative, got -1",
    ),
    "weight-nan": (
        lambda i: fdp.pmean(X, weight=torch.tensor(float("nan"))),
        ValueError,
        r"pmean: weight must be finite and not negative, got nan",
    ),
    "weight-kinds": (
        lambda i: fdp.pmean(X, weight=torch.tensor(1.0) if i else 1.0),
        ValueError,
        r"weight of pmean: the shards do not fit together: a number in shard 0, float64\[\] in shard 1",
    ),
    "weight-or-none": (
        lambda i: fdp.pmean(X, weight=None if i else 1.0),
        RuntimeError,
        r"different collectives: weight of pmean in shard 0, pmean in shard 1",
    ),
    "others": (
        lambda i: fdp.psum(X) if i else fdp.all_gather(X),
        RuntimeError,
        r"different collectives: all_gather in shard 0, psum in shard 1",
    ),
    "strings": (
        lambda i: fdp.psum({"a": "s", "b": 1}),
        TypeError,
        r"psum: only tensors, ints and floats can be exchanged, not tree\['a'\] \(str\)",
    ),
    "complex-number": (lambda i: fdp.psum([1j]), TypeError, r"psum: only.*not tree\[0\] \(complex\).*torch\.as_tensor"),
    "no-arithmetic": (
        lambda i: fdp.pmax(torch.ones(2).to(torch.uint16)),
        TypeError,
        r"pmax: torch has no arithmetic for torch\.uint16",
    ),
    "gathered-number": (lambda i: fdp.all_gather({"a": 1}), TypeError, r"all_gather: only tensors.*tree\['a'\]"),
    "gathered-0-dim": (
        lambda i: fdp.all_gather(torch.ones(())),
        ValueError,
        r"all_gather: dim 0 is out of range for a tensor of 0 dimensions; pass stack=True",
    ),
    "dim": (lambda i: fdp.psum_scatter(X, dim=2), ValueError, r"psum_scatter: dim 2 is out of range"),
    "dim-type": (lambda i: fdp.psum_scatter(X, dim=True), TypeError, r"psum_scatter: a dim must be an int"),
    "some": (lambda i: fdp.psum(X) if i else None, RuntimeError, r"psum.*shard 0, which has returned"),
    "more": (
        lambda i: [fdp.psum(X) for _ in range(2 - i)],
        RuntimeError,
        r"psum in shard 0.*shard 1, which has returned",
    ),
}


@each_executor
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_messages(wrong: Any, executor: Any):
    fn, kind, match = wrong
    for _ in range(2):  # the first run finds out that the shards meet
        with pytest.raises(kind, match=match):
            everywhere(fn, n=2, executor=executor)


@pytest.mark.parametrize("name", ["shapes", "structures", "others", "some"])
def test_messages_speak_of_nothing_private(name: str):
    fn, kind, _ = WRONG[name]
    with pytest.raises(kind, match="shard 0") as caught:
        everywhere(fn, n=2)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "PyTreeSpec" not in text
    assert "Abandoned" not in text


ALONE = (
    *("strings", "complex-number", "no-arithmetic", "gathered-number", "gathered-0-dim", "dim", "dim-type"),
    *("perm-range", "perm-twice", "perm-slots", "perm-dict", "perm-floats"),
    *("weight-typo", "weight-list", "weight-vector", "weight-complex", "weight-nan"),
)


@pytest.mark.parametrize("name", ALONE)
def test_messages_with_one_slot(name: str):
    fn, kind, match = WRONG[name]
    with pytest.raises(kind, match=match.replace("there are 2", "there are 1")):
        everywhere(fn, n=1)


def test_unsupported_nestings_say_so():
    devices = fdp.virtual_devices(2)

    def inside(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: fdp.psum((w * x).sum()).square())(w) * x

    with pytest.raises(RuntimeError, match=r"psum: torch.func transforms around the call and inside.*on one side only"):
        torch.func.grad(lambda w: fdp.dp_apply(inside, w, torch.ones(3), devices).sum())(torch.ones(()))

    def forward(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda w: fdp.psum((w * x).sum()), (w,), (w,))[1] * x

    with pytest.raises(RuntimeError, match="psum: inside forward-mode differentiation"):
        fdp.dp_apply(forward, torch.ones(()), torch.ones(3), devices)


def test_a_gradient_after_the_call():
    kept = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.psum((w * x).sum())
        kept.append(y)
        return y * x

    w = torch.ones((), requires_grad=True)
    fdp.dp_apply(fn, w, torch.ones(3), fdp.virtual_devices(2))
    with pytest.raises(RuntimeError, match=r"psum: its gradient was asked for where the slots.* do not run"):
        kept[-1].backward()


def test_a_thread_of_the_users_own():
    def fn(i: int) -> None:
        caught: list[Exception] = []

        def work() -> None:
            try:
                fdp.psum(torch.ones(2))
            except Exception as error:
                caught.append(error)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,))
        thread.start()
        thread.join()
        assert len(caught) <= 1
        fdp.psum(torch.ones(2))

    with contextlib.suppress(RuntimeError):
        everywhere(fn, n=2)


# ---------------------------------------------------------------- corners


@each_executor
def test_a_leaf_that_is_returned_as_it_is_keeps_its_gradient(executor: Any):
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    v = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def fn(params: Any, x: Tensor) -> Any:
        return fdp.psum((params["v"] * x).sum()) * x, params["w"]

    devices = fdp.virtual_devices(2)
    for _ in range(2):
        _, out = fdp.dp_apply(fn, {"v": v, "w": w}, X, devices, out_dims=(0, "sum"), executor=executor)
        assert torch.autograd.grad(3 * out, w)[0] == 6


@each_executor
def test_double_backward_beside_integers(executor: Any):
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        found = fdp.psum({"rows": torch.tensor(len(x)), "squares": (w * x).sum() ** 2})
        return found["squares"] * found["rows"] * x

    out = fdp.dp_apply(fn, w, x, fdp.virtual_devices(2), executor=executor).sum()  # 58 w^2 * 4 * 10
    (grad,) = torch.autograd.grad(out, w, create_graph=True)
    assert_close_tree([grad, torch.autograd.grad(grad, w)[0]], [2 * 2320 * w, torch.tensor(4640.0).double()])


@pytest.mark.parametrize("around", [torch.device("meta"), torch.device("cpu")], ids=str)
def test_calls_draw_anew_whatever_the_default_device_is(around: torch.device):
    def drop(w: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + 0 * fdp.psum(x.sum())

    x = torch.ones(64)
    with around:
        one, other = (fdp.dp_apply(drop, None, x, fdp.virtual_devices(2)) for _ in range(2))
    assert not torch.equal(one, other)


def test_modules_are_told_apart():
    """That one of them meets does not bring the others together."""

    class Meets(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / fdp.psum(x.sum())

    def pack(x: Tensor) -> Tensor:
        return x

    x, devices = torch.ones(4, 2), fdp.virtual_devices(2)
    meets, state = fdp.functional(Meets())
    fdp.dp_apply(meets, state, x, devices)
    plain, state = fdp.functional(torch.nn.Linear(2, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):  # under which slots cannot run together
        assert fdp.dp_apply(plain, state, x, devices)[0].shape == (4, 2)
        with pytest.raises(RuntimeError, match=r"collectives need a thread for each slot.*hooks for saved tensors"):
            fdp.dp_apply(meets, fdp.functional(Meets())[1], x, devices)


def mean_of(value: float, n: int, weight: Any, dtype: torch.dtype = torch.float16) -> Tensor:
    """The mean over n slots that all have the same value, and the same weight."""
    x = torch.full((100 * n,), value, dtype=dtype)
    return fdp.dp_apply(lambda _, x: fdp.pmean(x[0], weight=weight), None, x, fdp.virtual_devices(n), out_dims=None)


WEIGHTS: dict[str, Any] = {
    "none": None,
    "rows": "rows",
    "tiny": 1e-9,
    "less-than-tiny": 1e-60,
    "uint8": torch.tensor(200, dtype=torch.uint8),
    "half": torch.tensor(40000.0).half(),
    "bool": torch.tensor(True),
}


@each_count
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_mean_of_equal_values_is_the_value(dtype: torch.dtype, weight: Any, n: int):
    """Also where their sum, or that of the weights, would overflow."""
    found = mean_of(39936, n, weight, dtype)
    assert found.dtype is dtype
    assert found.item() == 39936


def test_weights_are_as_wide_as_the_leaves():
    assert mean_of(1000, 3, torch.tensor(0.1), torch.float64).item() == 1000


def test_numbers_stay_numbers_under_a_tensor_weight():
    found = fdp.dp_apply(
        lambda _, x: fdp.pmean({"a": 3.0 * fdp.axis_index(), "b": x.mean()}, weight=torch.tensor(2.0)),
        *(None, torch.ones(4), fdp.virtual_devices(2)),
        out_dims=None,
    )
    assert isinstance(found["a"], float)
    assert (found["a"], found["b"].item()) == (1.5, 1.0)


def of_empty(kind: str, x: Tensor, w: Tensor) -> Any:
    weight = torch.tensor(float(len(x)))
    return {"rows": "rows", "number": float(len(x)), "tensor": weight, "differentiated": weight * (1 + 0 * w.sum())}[
        kind
    ]


@each_executor
@pytest.mark.parametrize("kind", ["rows", "number", "tensor", "differentiated"])
def test_a_slot_of_weight_0_has_no_gradient(kind: str, executor: Any):
    """Where there are no rows, 0 times the gradient of their mean is NaN: differentiated outside and inside."""
    x, w = numbers(2, 3), W.clone().requires_grad_()
    shards = fdp.scatter(x, fdp.virtual_devices(3), keep_empty=True)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return fdp.pmean((x.mean(0) @ w) ** 2, weight=of_empty(kind, x, w))

    def call(w: Tensor) -> Any:
        return fdp.parallel_apply(loss, w, shards, executor=executor)[0]

    def by_func(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(loss)(w, x)

    def by_autograd(w: Tensor, x: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(loss(w, x), w, allow_unused=True, materialize_grads=True)[0]

    (expected,) = torch.autograd.grad(((x @ w) ** 2).mean(), w)
    call(w).backward()
    assert_close_tree(w.grad, expected)
    for fn in (torch.func.grad(call), torch.func.jacfwd(call)):
        assert_close_tree(fn(W), expected)
    if kind != "differentiated":
        assert_close_tree(torch.func.vmap(torch.func.grad(call))(W.expand(2, 3).clone())[1], expected)
    for inside in (by_func, by_autograd):  # the others sum the gradients of 3 equal means
        found: Any = fdp.parallel_apply(inside, W, shards, executor=executor)
        assert_close_tree(found[0] + found[1], 3 * expected)
        assert_close_tree(found[2], torch.zeros(3, dtype=torch.float64))


@each_executor
def test_the_gradient_of_a_weight_that_is_0(executor: Any):
    x = torch.tensor([5.0, 2.0], dtype=torch.float64)
    a = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def mapped(a: Tensor, x: Tensor = x) -> Tensor:
        devices = fdp.virtual_devices(2)
        fn = lambda a, x: fdp.pmean(x.sum(), weight=a[fdp.axis_index()])  # noqa: E731
        return fdp.dp_apply(fn, a, x, devices, out_dims=None, executor=executor)

    def plainly(a: Tensor) -> Tensor:
        return (a * x).sum() / a.sum()

    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        assert_close_tree(transform(mapped)(a), transform(plainly)(a))
    own = a.clone().requires_grad_()
    assert_close_tree(torch.autograd.grad(mapped(own), own)[0], torch.tensor([3.0, 0.0], dtype=torch.float64))
    mixed = torch.func.vmap(torch.func.grad(mapped))(torch.stack([a, a + 1]))  # of the weights, one is 0
    assert_close_tree(mixed, torch.func.vmap(torch.func.grad(plainly))(torch.stack([a, a + 1])))
    per_x = torch.func.vmap(lambda x: torch.func.grad(mapped)(a, x))(torch.stack([x, x + 1]))
    assert_close_tree(per_x, torch.tensor([[3.0, 0.0], [3.0, 0.0]], dtype=torch.float64))
    x_with_nan = torch.tensor([float("nan"), 2.0], dtype=torch.float64)
    out = mapped(own, x_with_nan)
    assert out.item() == 2
    assert torch.autograd.grad(out, own)[0].isfinite().all()


@pytest.mark.parametrize("slot", [0, 1])
def test_extremes_of_numbers_are_nan_if_one_is(slot: int):
    def fn(i: int) -> Any:
        x = float("nan") if i == slot else float(i)
        return [each(y) for each in (fdp.pmax, fdp.pmin) for y in (x, torch.tensor(x).double())]

    for found in everywhere(fn, n=3):
        assert all(x != x for x in found)


@each_count
def test_bools_are_counted(n: int):
    for number, tensor in everywhere(lambda i: fdp.psum([True, torch.tensor(True)]), n=n):
        assert type(number) is int
        assert number == tensor.item() == n


def test_pairs_in_any_order_are_the_same_permutation():
    pairs = [[(0, 1), (1, 0)], [(1, 0), (0, 1)]]
    found = everywhere(lambda i: fdp.ppermute(torch.tensor([i]), pairs[i]), n=2)
    assert [x.item() for x in found] == [1, 0]
