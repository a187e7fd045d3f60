"""Exchanges of processes as nodes of one chain: values and gradients of any order, as if one process had all slots.

Slots are stood in for by lists here: what each of two slots of a process has, in one thread.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp._collectives.operations import Extreme, Gather, Operation, Permute, Sum
from fdp._placement.peers import ALONE_IN_CALL, Joined
from fdp._placement.split_dims import flatten_args
from fdp._trees.tree import Flat
from fdp.distributed._call import MeshCall, Same
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers
from tests.distributed.pool import Failure, Pool

Parts = list[Tensor]
Meet = Callable[..., Parts]
Losses = Callable[[Tensor, Parts, list[int], Meet], Parts]
CPU = torch.device("cpu")
W, X = numbers(3, 4), numbers(11, 3).sin()
PARTS = [*X[:7].tensor_split(2), *X[7:].tensor_split(2)]


def parts_of(mesh: Any) -> tuple[Parts, list[int]]:
    first = 2 * mesh.rank
    return PARTS[first : first + 2], [first, first + 1]


def meeting(call: Any) -> Meet:
    count = 0

    def meet(operation: Operation, xs: Parts) -> Parts:
        nonlocal count
        count += 1
        kinds = operation.kinds(xs[:1])
        return call.combine(operation, [xs], (count, kinds), lambda: f"number {count}\n{kinds}")[0]

    return meet


@contextlib.contextmanager
def begun(mesh: Any, parts: Parts, w: Tensor | None = None) -> Iterator[MeshCall]:
    """A call, in which all begin together."""
    flats: list[Flat] = [] if w is None else flatten_args([("w", w, None, "in_dims")], "by hand")
    with mesh.peers.begins("by hand"):
        call = MeshCall(mesh.peers.world.epoch, mesh.slots, "by hand", Same(0, str), [len(p) for p in parts], flats)
        call.table()
        yield call


class Sums:
    """Gradients, as a call has them."""

    sent_as: torch.dtype | None = None

    def __init__(self, grads: list[Tensor]) -> None:
        self.found = grads

    def sums(self) -> list[Tensor]:
        return self.found

    def replace_sums(self, sums: Sequence[Tensor]) -> None:
        self.found = list(sums)


def value_and_grad(mesh: Any, losses: Losses, w: Tensor) -> tuple[Tensor, Tensor]:
    """What a gradient function does."""
    parts, indices = parts_of(mesh)
    create = torch.is_grad_enabled() and w.requires_grad
    with begun(mesh, parts, w) as call:
        call.enter()
        whole = call.whole(0, counts=False)
        with torch.enable_grad():
            entered = next(iter(call.flats)).leaves[0]
            alias = entered.view_as(entered) if create else w.detach().requires_grad_()
            call.begins_with([alias])
            found = losses(alias, parts, indices, meeting(call))
        counted = [(x, len(p) / whole) for x, p in zip(found, parts, strict=True) if x.requires_grad]
        ends = call.ends()
        roots = [*(x for x, _ in counted), *ends]
        seeds = [*(torch.full_like(x, share) for x, share in counted), *(x if create else x.detach() for x in ends)]
        given: Any = [None]
        if roots:
            given = torch.autograd.grad(roots, [alias], seeds, create_graph=create, allow_unused=True)
        grads = Sums([torch.zeros_like(w) if grad is None else grad for grad in given])
        each = [x if create else x.detach() for x in found]
        loss = Joined(each, "mean", [len(p) for p in parts], "loss")
        value, _ = call.reduce(loss, None, grads, [alias], CPU, "by hand")
    return value, grads.found[0]


def mean_loss(losses: Losses) -> Callable[[Tensor], Tensor]:
    """The same in one process, which has all slots."""

    def loss(w: Tensor) -> Tensor:
        found = losses(w, PARTS, [0, 1, 2, 3], meeting(ALONE_IN_CALL))
        return torch.stack([x * (len(p) / 11) for x, p in zip(found, PARTS, strict=True)]).sum()

    return loss


def batch_norm(w: Tensor, parts: Parts, _: list[int], meet: Meet) -> Parts:
    zs = [p @ w for p in parts]
    counts = meet(Sum(), [torch.tensor(float(len(z)), dtype=z.dtype) for z in zs])
    means = [s / n for s, n in zip(meet(Sum(), [z.sum(0) for z in zs]), counts, strict=True)]
    rows = [z - m for z, m in zip(zs, means, strict=True)]
    squares = meet(Sum(), [x.square().sum(0) for x in rows])
    return [
        torch.tanh(x / (s / n + 1e-5).sqrt() * m).square().sum(1).mean()
        for x, s, n, m in zip(rows, squares, counts, means, strict=True)
    ]


def contrastive(w: Tensor, parts: Parts, _: list[int], meet: Meet) -> Parts:
    zs = [p @ w for p in parts]
    every = meet(Gather([-2]), zs)
    return [(z @ all_rows.t()).logsumexp(1).mean() for z, all_rows in zip(zs, every, strict=True)]


def unused(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
    """Results that one process uses, or nobody, whose gradient would be NaN."""
    zs = [(p @ w).tanh() for p in parts]
    sums, squares = meet(Sum(), [z.sum(0) for z in zs]), meet(Sum(), [(z * z).sum(0) for z in zs])
    meet(Sum(), [(z * 0).sqrt().sum() for z in zs])
    again = meet(Sum(), [(z * s).sum(0) for z, s in zip(zs, sums, strict=True)])
    return [
        (z * (sums[k] if i < 2 else squares[k])).sum(1).mean() + ((again[k] * z).mean() if i > 1 else z.mean())
        for k, (i, z) in enumerate(zip(indices, zs, strict=True))
    ]


def lonely(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
    """The losses of process 1 depend on nothing."""
    zs = [p @ w for p in parts]
    sums = meet(Sum(), [z.tanh().sum(0) for z in zs])
    more = meet(Sum(), [(z * s).sum(0) for z, s in zip(zs, sums, strict=True)])
    return [(zs[k] * more[k]).mean() if i < 2 else parts[k].mean() for k, i in enumerate(indices)]


def in_another_order(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
    zs = [p @ w for p in parts]
    a, b = meet(Sum(), [z.sin().sum(0) for z in zs]), meet(Sum(), [z.cos().sum(0) for z in zs])
    return [
        ((a[k] * z).sin() * b[k] * z if i > 1 else (b[k] * z).sin() * a[k] * z).mean()
        for k, (i, z) in enumerate(zip(indices, zs, strict=True))
    ]


def sent_around(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
    """What only one slot gets, and what has no gradient."""
    zs = [p @ w for p in parts]
    sent = meet(Permute([(3, 0)]), [z.square().sum(0) for z in zs])
    largest = meet(Extreme("pmax"), [z.detach().amax(0) for z in zs])
    meet(Extreme("pmax"), [z.amax(0) for z in zs])  # nobody uses it
    return [(z * s - m * z.sin()).mean() for z, s, m in zip(zs, sent, largest, strict=True)]


def nothing(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
    """Nobody exchanges anything with a gradient."""
    counts = meet(Sum(), [torch.tensor(float(len(p)), dtype=w.dtype) for p in parts])
    return [(p @ w).sin().mean() * n for p, n in zip(parts, counts, strict=True)]


LOSSES = [batch_norm, contrastive, unused, lonely, in_another_order, sent_around, nothing]
each_loss = pytest.mark.parametrize("losses", LOSSES)


def orders(mesh: Any, losses: Losses) -> list[Tensor]:
    """Value and gradient, the same of a parameter that requires grad, and derivatives from outside."""

    def run(w: Tensor) -> tuple[Tensor, Tensor]:
        return value_and_grad(mesh, losses, w)

    return derivatives(run)


def derivatives(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
    w = W.clone().requires_grad_()
    value, grad = run(W)
    found = [value.detach(), grad.detach()]
    found += torch.autograd.grad(run(w)[0], w)
    found += torch.autograd.grad(run(w)[1].square().sum(), w)
    (second,) = torch.autograd.grad(run(w)[1].square().sum(), w, create_graph=True)
    found += torch.autograd.grad(second.square().sum(), w)
    value, grad = run(w)
    found += torch.autograd.grad(value.sin() * grad.sin().sum(), w)
    return [x.detach() for x in found]


def expected(losses: Losses) -> list[Tensor]:
    def run(w: Tensor) -> tuple[Tensor, Tensor]:
        w = w if w.requires_grad else w.clone().requires_grad_()
        value = mean_loss(losses)(w)
        return value, torch.autograd.grad(value, w, create_graph=True)[0]

    return derivatives(run)


@each_loss
def test_derivatives_of_any_order(two: Pool, losses: Losses):
    want = expected(losses)
    for found in two(orders, 2, losses):
        assert_close_tree(found, want)


def applied(mesh: Any, losses: Losses) -> Any:
    """A call without gradients of its own; process 1 uses one slot's result only, twice differentiated."""
    w = W.clone().requires_grad_()
    parts, indices = parts_of(mesh)
    with begun(mesh, parts, w) as call:
        call.enter()
        call.begins_with(next(iter(call.flats)).leaves)
        found = losses(next(iter(call.flats)).leaves[0], parts, indices, meeting(call))
        own: Any = call.join(Joined(found, "list", None, "out"), CPU, "by hand")
    total = own[0] + own[1] if mesh.rank == 0 else own[1]
    (grad,) = torch.autograd.grad(total.sin(), w, create_graph=True)
    return grad.detach(), torch.autograd.grad(grad.square().sum(), w)[0]


@pytest.mark.parametrize("losses", [x for x in LOSSES if x is not lonely])
def test_what_a_call_returns_is_tied_to_all_of_it(two: Pool, losses: Losses):
    w = W.clone().requires_grad_()
    found = losses(w, PARTS, [0, 1, 2, 3], meeting(ALONE_IN_CALL))
    total = (found[0] + found[1]).sin() + found[3].sin()
    (grad,) = torch.autograd.grad(total, w, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), w)
    for each in two(applied, 2, losses):
        assert_close_tree(each, (grad.detach(), second))


def skips(what: str) -> Losses:
    def losses(w: Tensor, parts: Parts, indices: list[int], meet: Meet) -> Parts:
        zs, odd = [p @ w for p in parts], indices[0] > 0
        if what == "the first" and odd:
            return [(z * s).mean() for z, s in zip(zs, meet(Sum(), [z.sin().sum(0) for z in zs]), strict=True)]
        first = meet(Sum(), [z.sum() for z in zs])
        if what == "raises" and odd:
            raise ValueError("mine")
        if what == "a hook raises" and odd:
            first[0].register_hook(lambda grad: {}["mine"])
        if what == "the last" and odd:
            return [(z * s).mean() for z, s in zip(zs, first, strict=True)]
        if what == "another kind" and odd:
            more = [x.sum(0) for x in meet(Gather([-2]), zs)]
        elif what == "no_grad" and odd:
            with torch.no_grad():
                more = meet(Sum(), [z.sin().sum(0) for z in zs])
        else:
            more = meet(Sum(), [z.sin().sum(0) for z in zs])
        return [(z * s * m).mean() for z, s, m in zip(zs, first, more, strict=True)]

    return losses


SKIPS = {
    "the first": r"psum: the processes do not fit together: .*float64",
    "the last": "psum: the processes do not fit together: number 2 in process 0, number 1 in process 1",
    "another kind": "different places: psum in process 0, all_gather in process 1",
    "no_grad": "psum: a gradient goes through it in one process, and another is in torch.no_grad",
    "raises": "mine",
    "a hook raises": "mine",
}


def failing(mesh: Any, what: str) -> None:
    value_and_grad(mesh, skips(what), W)


@pytest.mark.parametrize("what", SKIPS)
def test_what_one_process_skips_or_changes_is_an_error_in_both(two: Pool, what: str):
    for found in two.outcomes(failing, 2, what):
        assert isinstance(found, Failure)
        assert "could not reach" not in found.message, found
        assert re.search(SKIPS[what], found.message), found
    want = expected(batch_norm)
    for found in two(orders, 2, batch_norm):
        assert_close_tree(found, want)


def by_vjp(mesh: Any, losses: Losses) -> list[Tensor]:
    """Value and gradient by torch.func, around the slots and inside of the call."""
    parts, indices = parts_of(mesh)

    def own(call: MeshCall, w: Tensor) -> Any:
        call.begins_with([w])
        found = losses(w, parts, indices, meeting(call))
        shares = [x * (len(p) / 11) for x, p in zip(found, parts, strict=True)]
        return torch.stack(shares).sum(), call.ends()

    with torch.inference_mode(), begun(mesh, parts) as call:
        call.enter()
        with torch.inference_mode(False), torch.no_grad():
            made: Any = torch.func.vjp(functools.partial(own, call), W)
            (value, ends), vjp = made
            (grad,) = vjp((torch.ones_like(value), [torch.zeros_like(x) for x in ends]))
        grads = Sums([grad])
        value, _ = call.reduce(Joined([value], "sum", None, "loss"), None, grads, [], CPU, "by hand")
    return [value.clone(), grads.found[0].clone()]


@each_loss
def test_by_torch_func_in_inference_mode(two: Pool, losses: Losses):
    want = expected(losses)[:2]
    for found in two(by_vjp, 2, losses):
        assert_close_tree(found, want)


def memory(mesh: Any) -> list[bool]:
    """Whether results of slots are in memory of their own, in a gradient too."""
    parts, _ = parts_of(mesh)
    with begun(mesh, parts) as call:
        call.enter()
        xs = [torch.ones(2, requires_grad=True) for _ in parts]
        call.begins_with(xs)
        a, b = meeting(call)(Sum(), xs)
        one, other = torch.autograd.grad([a, b, *call.ends()], xs, [a, b, *(x.detach() for x in call.ends())])
    return [x.data_ptr() != y.data_ptr() for x, y in ((a, b), (one, other), (a, xs[0]), (one, a))]


def test_no_memory_is_shared(two: Pool):
    assert two(memory, 2) == [[True] * 4] * 2


def rounds(mesh: Any, create: bool) -> Any:
    """Two rounds of a call, each differentiated by itself; whether the second leads to the leaves of the first."""
    parts, indices = parts_of(mesh)
    w = W.clone().requires_grad_()
    values: list[Tensor] = []
    grads: Any = []
    aliases: list[Tensor] = []
    reached = False
    with begun(mesh, parts, w) as call:
        call.enter()
        meet = meeting(call)
        for k in range(2):
            entered = next(iter(call.flats)).leaves[0]
            aliases.append(entered.view_as(entered) if create else w.detach().requires_grad_())
            call.begins_with([aliases[-1]])
            values.append(torch.stack(batch_norm(aliases[-1] * (k + 1), parts, indices, meet)).sum())
            ends = call.ends()
            seeds = [torch.ones_like(values[-1]), *(x if create else x.detach() for x in ends)]
            grads += torch.autograd.grad([values[-1], *ends], [aliases[-1]], seeds, create_graph=create)
            reached = k > 0 and not create and leads_to(ends[0], aliases[0])
        sums = Sums([torch.stack(grads).sum(0)])
        loss = Joined([values[-1] if create else values[-1].detach()], "sum", None, "loss")
        call.reduce(loss, None, sums, aliases if create else [], CPU, "by hand")
    (grad,) = sums.found
    second = torch.autograd.grad(grad.square().sum(), w)[0] if create else grad
    return grad.detach(), second, reached


def leads_to(x: Tensor, leaf: Tensor) -> bool:
    nodes, seen = [x.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    return any(getattr(node, "variable", None) is leaf for node in seen)


@pytest.mark.parametrize("create", [False, True])
def test_rounds_of_one_call(two: Pool, create: bool):
    w = W.clone().requires_grad_()
    values = [x for k in (1, 2) for x in batch_norm(w * k, PARTS, [], meeting(ALONE_IN_CALL))]
    (grad,) = torch.autograd.grad(torch.stack(values).sum(), w, create_graph=True)
    second = torch.autograd.grad(grad.square().sum(), w)[0] if create else grad
    for found, other, reached in two(rounds, 2, create):
        assert_close_tree((found, other), (grad.detach(), second.detach()))
        assert not reached
