"""torch.func and autograd, inside of a mapped function and outside of the call: the numbers are those of one device."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers

Fn = Callable[..., Any]

X = numbers(4, 2) + 0.5
W = torch.tensor([0.7, -0.4], dtype=torch.float64)
V = torch.tensor([0.3, 1.1], dtype=torch.float64)
SLOTS = fdp.virtual_devices(3)
EXECUTORS: Any = ("sequential", "threads")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
REFUSED = r"executor='threads': the function calls .*, which enters forward mode .* Pass executor='sequential', or"


pytestmark = pytest.mark.usefixtures("switching")


def row(w: Tensor, r: Tensor) -> Tensor:
    """A row as a number, with derivatives of every order in `w`."""
    return torch.sin((w * r).sum()) * w.prod()


def rows(w: Tensor, x: Tensor) -> Tensor:
    return torch.sin((x * w).sum(-1)) * w.prod()


def each_row(of: Callable[[Fn, Tensor], Tensor]) -> Fn:
    """A transform of the function of one row, over all rows."""
    return lambda w, x: vmap(lambda r: of(lambda w: row(w, r), w))(x)


def pulled(fn: Fn, w: Tensor) -> Tensor:
    out, pull = vjp(fn, w)[:2]
    return pull(torch.ones_like(out))[0].sum()


INSIDE: dict[str, Fn] = {
    "none": rows,
    "grad": lambda w, x: grad(lambda x: rows(w, x).sum())(x).sum(1),
    "vjp": each_row(pulled),
    "jvp": lambda w, x: jvp(lambda w: rows(w, x), (w,), (V,))[1],
    "vmap": lambda w, x: vmap(row, in_dims=(None, 0))(w, x),
    "jacrev": lambda w, x: jacrev(rows)(w, x).sum(1),
    "jacfwd": lambda w, x: jacfwd(rows)(w, x).sum(1),
    "hessian": lambda w, x: hessian(rows)(w, x).sum((1, 2)),
    "per-sample": lambda w, x: vmap(grad(row), in_dims=(None, 0))(w, x).pow(2).sum(1),
}


def total(fn: Fn) -> Fn:
    return lambda w: fn(w).sin().sum()


def backward(fn: Fn, order: int) -> Tensor:
    w = W.clone().requires_grad_()
    out = total(fn)(w)
    for _ in range(order - 1):
        out = torch.autograd.grad(out, w, create_graph=True)[0].pow(2).sum()
    return torch.autograd.grad(out, w)[0]


OUTSIDE: dict[str, Callable[[Fn], Any]] = {
    "none": lambda fn: fn(W),
    "grad": lambda fn: grad(total(fn))(W),
    "vjp": lambda fn: vjp(fn, W)[1](numbers(*fn(W).shape)),
    "jvp": lambda fn: jvp(fn, (W,), (V,)),
    "vmap": lambda fn: vmap(fn)(torch.stack([W, V, W - V])),
    "jacrev": lambda fn: jacrev(fn)(W),
    "jacfwd": lambda fn: jacfwd(fn)(W),
    "hessian": lambda fn: hessian(total(fn))(W),
    "per-sample": lambda fn: vmap(grad(total(fn)))(torch.stack([W, V, W - V])),
    "backward": lambda fn: backward(fn, 1),
    "backward twice": lambda fn: backward(fn, 2),
}


def loss_of(inside: Fn) -> Fn:
    return lambda w, x: inside(w, x).pow(2).mean()


def flat(value: Tensor, grads: Tensor) -> Tensor:
    return torch.cat([value[None], grads])


# Each as a function of the parameters to a vector: on one device, and mapped.
PLAIN: dict[str, Callable[[Fn], Fn]] = {
    "dp_apply": lambda inside: lambda w: inside(w, X),
    "value_and_grad": lambda inside: lambda w: flat(*torch.func.grad_and_value(loss_of(inside))(w, X)[::-1]),
}
MAPPED: dict[str, Callable[[Fn, Any], Fn]] = {
    "dp_apply": lambda inside, executor: lambda w: fdp.dp_apply(inside, w, X, SLOTS, executor=executor),
    "value_and_grad": lambda inside, executor: (
        lambda w: flat(*fdp.value_and_grad(loss_of(inside), devices=SLOTS, executor=executor)(w, X))
    ),
}
INNER = (("hessian", "dp_apply"), ("jvp", "dp_apply"), ("jvp", "value_and_grad"))
OFTEN = [(outside, *inner) for outside in ("grad", "vmap", "vjp") for inner in INNER]
IN_ORDER = ("jvp", "jacfwd", "hessian")  # forward mode: around the call even threads run one shard after the other


@few(3)
@pytest.mark.parametrize("call", MAPPED)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_inside_and_outside(outside: str, inside: str, call: str, times: int = 1):  # noqa: PT028 (for the next test)
    differentiate = OUTSIDE[outside]
    want = differentiate(PLAIN[call](INSIDE[inside]))
    for tensor in want if isinstance(want, tuple) else (want,):
        assert tensor.abs().max() > 1e-3  # zeros would hide what got lost
    assert_close_tree(differentiate(MAPPED[call](INSIDE[inside], "sequential")), want)
    for _ in range(times):
        if inside in IN_ORDER and outside not in IN_ORDER:  # its level is one for all threads
            with pytest.raises(RuntimeError, match=REFUSED):
                differentiate(MAPPED[call](INSIDE[inside], "threads"))
        else:
            assert_close_tree(differentiate(MAPPED[call](INSIDE[inside], "threads")), want)
    assert_close_tree(differentiate(MAPPED[call](INSIDE[inside], "sequential")), want)


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("outside", "inside", "call"), OFTEN)
def test_inside_and_outside_often(outside: str, inside: str, call: str, times: int):
    test_inside_and_outside(outside, inside, call, times)


@few()
@pytest.mark.parametrize("call", MAPPED)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_threads_run_under_all_but_forward_mode(outside: str, call: str):
    meeting, threads = threading.Barrier(1 if outside in IN_ORDER else len(SLOTS)), set()

    def inside(w: Tensor, x: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        meeting.wait(30)
        return rows(w, x)

    OUTSIDE[outside](MAPPED[call](inside, "threads"))
    # Calls one after another may have other threads.
    assert len(threads) >= meeting.parties if meeting.parties > 1 else threads == {threading.get_ident()}
    assert (threading.get_ident() in threads) == (meeting.parties == 1)


# ---- what goes wrong without fdp


def in_plain_threads(fn: Fn, w: Tensor) -> Tensor:
    """As a user would write it: a thread for each part of the batch."""
    parts, outs, errors = X.tensor_split(3), {}, []

    def run(i: int) -> None:
        try:
            outs[i] = fn(w, parts[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return torch.cat([outs[i] for i in range(3)])


def test_plain_threads_lose_the_transforms():
    """Were the stack of transforms not carried, the tests above would see this."""
    assert torch.equal(in_plain_threads(rows, W), rows(W, X))
    assert not grad(lambda w: in_plain_threads(rows, w).sum())(W).any()  # zeros, and no error
    assert not jacrev(lambda w: in_plain_threads(rows, w))(W).any()
    assert not jvp(lambda w: in_plain_threads(rows, w), (W,), (V,))[1].any()
    with pytest.raises(RuntimeError, match="escaped from inside a function being vmapped"):
        vmap(lambda w: in_plain_threads(rows, w))(torch.stack([W, V]))


# ---- vmap's options


def noisy(w: Tensor, x: Tensor) -> Tensor:
    return rows(w, x) + torch.rand(len(x), dtype=torch.float64)


@each_executor
@pytest.mark.parametrize("seed", [None, 3])
def test_vmap_with_random_numbers(executor: Any, seed: int | None):
    def call(randomness: str) -> Tensor:
        torch.manual_seed(0)
        mapped = vmap(lambda w: fdp.dp_apply(noisy, w, X, SLOTS, executor=executor, seed=seed), randomness=randomness)
        return mapped(W.expand(5, 2)) - rows(W, X)

    different, same = call("different"), call("same")
    assert len(set(different.flatten().tolist())) == different.numel()
    assert len(set(same[0].tolist())) == len(X)
    for drawn in (different, same):
        assert ((drawn > 0) & (drawn < 1)).all()
    torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=0)
    if seed is not None or executor == "sequential":
        torch.testing.assert_close(call("different"), different, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode") as caught:
        call("error")
    assert caught.value.__notes__[1] == "in shard 0 of 3, rows 0:2, on cpu"


@each_executor
def test_vmap_with_random_numbers_inside(executor: Any):
    def fn(w: Tensor, x: Tensor, randomness: str) -> Tensor:
        return vmap(lambda r: row(w, r) + torch.rand(3, dtype=torch.float64), randomness=randomness)(x)

    def call(randomness: str) -> Tensor:
        kwargs = {"randomness": randomness}
        drawn = fdp.dp_apply(fn, W, X, SLOTS, kwargs=kwargs, executor=executor, seed=3)
        return (drawn - rows(W, X)[:, None]).round(decimals=9)

    assert len(set(call("different").flatten().tolist())) == 12
    same = call("same")
    assert torch.equal(same[0], same[1])  # one shard
    assert len({tuple(r) for r in same.tolist()}) == len(SLOTS)
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        call("error")


@few()
@each_executor
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("call", MAPPED)
def test_vmap_in_chunks(call: str, size: int, executor: Any):
    stack = numbers(5, 2)

    def inside(w: Tensor, x: Tensor) -> Tensor:
        return vmap(grad(row), in_dims=(None, 0), chunk_size=size)(w, x).pow(2).sum(1)

    want = torch.stack([PLAIN[call](INSIDE["per-sample"])(w) for w in stack])
    mapped = MAPPED[call](inside, executor)
    assert_close_tree(vmap(mapped, chunk_size=size)(stack), want)
    want = vmap(grad(total(PLAIN[call](INSIDE["per-sample"]))))(stack)
    assert_close_tree(vmap(grad(total(mapped)), chunk_size=size)(stack), want)


# ---- other transforms


@few()
@each_executor
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("call", MAPPED)
def test_functionalize(call: str, remove: str, executor: Any):
    def writes(w: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), dtype=x.dtype)
        out += rows(w, x)
        out[:1].mul_(2)
        return out

    def parts(w: Tensor) -> Tensor:
        return torch.cat([writes(w, part) for part in X.tensor_split(3)])

    mapped = MAPPED["dp_apply"](functionalize(writes, remove=remove), executor)
    assert_close_tree(mapped(W), parts(W))
    assert_close_tree(jacrev(mapped)(W), jacrev(parts)(W))
    mapped, plain = MAPPED[call](rows, executor), PLAIN[call](rows)
    assert_close_tree(functionalize(mapped, remove=remove)(W), plain(W))
    assert_close_tree(functionalize(grad(total(mapped)), remove=remove)(W), grad(total(plain))(W))
    assert_close_tree(grad(total(functionalize(mapped, remove=remove)))(W), grad(total(plain))(W))


@pytest.mark.parametrize(
    ("call", "executor"),
    [
        ("dp_apply", "sequential"),
        ("dp_apply", "threads"),
        pytest.param("value_and_grad", "threads", marks=pytest.mark.deep),
    ],
)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")  # of any constant, on one device too
def test_linearize(call: str, executor: Any):
    out, push = linearize(MAPPED[call](rows, executor), W)
    want, want_push = linearize(PLAIN[call](rows), W)
    assert_close_tree(out, want)
    for tangent in (V, W):
        assert_close_tree(push(tangent), want_push(tangent))
        assert_close_tree(push(tangent), jvp(PLAIN[call](rows), (W,), (tangent,))[1])


FUNCTIONAL: dict[str, Callable[[Fn], Any]] = {
    "jacobian": lambda fn: torch.autograd.functional.jacobian(fn, W, create_graph=True),
    "jacobian vectorized": lambda fn: torch.autograd.functional.jacobian(fn, W, vectorize=True),
    "jacobian forward": lambda fn: torch.autograd.functional.jacobian(fn, W, vectorize=True, strategy="forward-mode"),
    "hessian": lambda fn: torch.autograd.functional.hessian(total(fn), W),
    "hessian vectorized": lambda fn: torch.autograd.functional.hessian(total(fn), W, vectorize=True),
    "hessian forward": lambda fn: torch.autograd.functional.hessian(
        total(fn), W, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "hvp": lambda fn: torch.autograd.functional.hvp(total(fn), W, V),
    "vhp": lambda fn: torch.autograd.functional.vhp(total(fn), W, V),
    "jvp": lambda fn: torch.autograd.functional.jvp(fn, W, V),
    "vjp": lambda fn: torch.autograd.functional.vjp(total(fn), W),
}


@few()
@each_executor
@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("call", MAPPED)
def test_autograd_functional(call: str, name: str, executor: Any):
    got, want = FUNCTIONAL[name](MAPPED[call](rows, executor)), FUNCTIONAL[name](PLAIN[call](rows))
    assert_close_tree(got, want)


@few()
@each_executor
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_autograd_functional_inside(name: str, executor: Any):
    """Each shard has another derivative, and it is that of its own rows."""

    def fn(w: Tensor, x: Tensor) -> Any:
        return FUNCTIONAL[name](lambda w: rows(w, x))

    if executor == "threads" and name.endswith("forward"):
        with pytest.raises(RuntimeError, match=REFUSED):
            fdp.dp_apply(fn, W, X, SLOTS, executor=executor, out_dims="list")
        return
    for _ in range(3):
        got = fdp.dp_apply(fn, W, X, SLOTS, executor=executor, out_dims="list")
        want = [fn(W, part) for part in X.tensor_split(3)]
        for i, value in enumerate(got if isinstance(got, tuple) else (got,)):
            assert_close_tree(value, [part[i] if isinstance(part, tuple) else part for part in want])


# ---- the batch


@each_executor
def test_the_jacobian_of_the_batch_is_block_diagonal(executor: Any):
    got = jacrev(lambda x: fdp.dp_apply(rows, W, x, SLOTS, executor=executor))(X)
    assert_close_tree(
        got, torch.einsum("ij,jk->ijk", torch.eye(4, dtype=torch.float64), grad(lambda x: rows(W, x).sum())(X))
    )


# ---- aux


@each_executor
def test_aux_passes_the_transforms(executor: Any):
    def aux_of(w: Tensor, x: Tensor) -> Any:
        return rows(w, x).mean(), {"rows": rows(w, x), "double": w * 2}

    mapped = fdp.shard_map(
        aux_of, devices=SLOTS, in_dims=(None, 0), out_dims=("mean", {"rows": 0, "double": None}), executor=executor
    )
    both = fdp.value_and_grad(
        aux_of, has_aux=True, devices=SLOTS, aux_dims={"rows": 0, "double": None}, executor=executor
    )

    def plain(w: Tensor) -> Any:
        return aux_of(w, X)

    assert_close_tree(grad(mapped, has_aux=True)(W, X), grad(plain, has_aux=True)(W))
    assert_close_tree(jacrev(mapped, has_aux=True)(W, X), jacrev(plain, has_aux=True)(W))
    assert_close_tree(jacfwd(mapped, has_aux=True)(W, X), jacfwd(plain, has_aux=True)(W))
    assert_close_tree(vjp(mapped, W, X, has_aux=True)[-1], plain(W)[1])
    (value, aux), grads = both(W, X)
    assert_close_tree((grads, (value, aux)), torch.func.grad_and_value(plain, has_aux=True)(W))
    # The aux of the inner gradient is differentiated outside.
    got = jacrev(lambda w: both(w, X)[0][1])(W)
    assert_close_tree(got, jacrev(lambda w: plain(w)[1])(W))


@each_executor
def test_aux_of_a_transform_inside(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Any:
        return vmap(grad(lambda w, r: (row(w, r), (w * r).sum()), has_aux=True), in_dims=(None, 0))(w, x)

    assert_close_tree(fdp.dp_apply(fn, W, X, SLOTS, executor=executor), fn(W, X))


# ---- calls in calls


BETWEEN: dict[str, Callable[[Fn, Tensor], Tensor]] = {
    "grad": lambda fn, w: grad(total(fn))(w),
    "jacrev": lambda fn, w: jacrev(fn)(w).sum(0),
    "jvp": lambda fn, w: jvp(fn, (w,), (V,))[1],
    "vmap": lambda fn, w: vmap(fn)(torch.stack([w, w * 2])).sum(0),
    "hessian": lambda fn, w: hessian(total(fn))(w).flatten(),
}


@few(5)
@pytest.mark.parametrize("executors", [(a, b) for a in EXECUTORS for b in EXECUTORS], ids="-".join)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("outside", ["none", "grad", "jvp", "per-sample", "backward"])
def test_a_call_in_a_transform_in_a_call(outside: str, between: str, executors: Any):
    def nested(w: Tensor, x: Tensor) -> Tensor:
        return BETWEEN[between](lambda w: fdp.dp_apply(rows, w, x, SLOTS[:2], executor=executors[1]), w)

    def outer(w: Tensor) -> Tensor:
        return fdp.dp_apply(nested, w, X, SLOTS[:2], executor=executors[0])

    def plain(w: Tensor) -> Tensor:
        return torch.cat([BETWEEN[between](lambda w, x=x: rows(w, x), w) for x in X.tensor_split(2)])

    if executors[0] == "threads" and between in ("jvp", "hessian") and outside != "jvp":
        with pytest.raises(RuntimeError, match=REFUSED):
            OUTSIDE[outside](outer)
        return
    assert_close_tree(OUTSIDE[outside](outer), OUTSIDE[outside](plain))


@few()
@pytest.mark.parametrize("executors", [(a, b) for a in EXECUTORS for b in EXECUTORS], ids="-".join)
@pytest.mark.parametrize("outside", ["none", "grad", "jvp", "per-sample", "backward"])
def test_a_gradient_in_a_transform_in_a_gradient(outside: str, executors: Any):
    def nested(w: Tensor, x: Tensor, inner: Fn) -> Tensor:
        return vmap(lambda v: inner(lambda w, x: rows(w * v, x).mean())(w, x))(torch.stack([V, W])).pow(2).sum()

    def outer(w: Tensor) -> Tensor:
        def inner(fn: Fn) -> Fn:
            return fdp.grad(fn, devices=SLOTS[:2], executor=executors[1])

        # Not linear in the rows: a sum over shards of what each of them gives.
        return fdp.grad(lambda w, x: nested(w, x, inner), devices=SLOTS[:2], executor=executors[0], reduction="sum")(
            w, X
        )

    def plain(w: Tensor) -> Tensor:
        return grad(lambda w: torch.stack([nested(w, x, grad) for x in X.tensor_split(2)]).sum())(w)

    assert_close_tree(OUTSIDE[outside](outer), OUTSIDE[outside](plain))


# ---- checkpoints


@few(2)
@each_executor
@pytest.mark.parametrize("place", ["inside", "around", "inside and around"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("call", "reentrant"), [("dp_apply", False), ("dp_apply", True), ("value_and_grad", False)])
def test_checkpoint(call: str, reentrant: bool, early_stop: bool, place: str, executor: Any):
    def inside(w: Tensor, x: Tensor) -> Any:
        options: Any = {"use_reentrant": reentrant, "preserve_rng_state": False}  # which threads refuse to look at
        return rows(w, x) if place == "around" else checkpoint(rows, w, x, **options)

    w, plain = W.clone().requires_grad_(), PLAIN[call](rows)
    mapped = MAPPED[call](inside, executor)
    with set_checkpoint_early_stop(early_stop):
        out: Any = mapped(w) if place == "inside" else checkpoint(mapped, w, use_reentrant=reentrant)
        total(lambda _: out)(w).backward()
    assert_close_tree(out, plain(W))
    assert_close_tree(w.grad, grad(total(plain))(W))


@each_executor
@pytest.mark.parametrize("place", ["inside", "around"])
def test_checkpoint_under_torch_func_is_refused_as_on_one_device(place: str, executor: Any):
    def inside(w: Tensor, x: Tensor) -> Any:
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return rows(w, x) if place == "around" else checkpoint(rows, w, x, **options)

    def outside(w: Tensor) -> Any:
        mapped = MAPPED["dp_apply"](inside, executor)
        return mapped(w) if place == "inside" else checkpoint(mapped, w, use_reentrant=False)

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        grad(total(lambda w: checkpoint(rows, w, X, use_reentrant=False)))(W)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        grad(total(outside))(W)
