"""Each collective, and plain torch over the arguments of all slots."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fdp
from tests.common.numbers import numbers

COUNTS = (1, 2, 3, 4)
EXECUTORS = ("sequential", "threads")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_count = pytest.mark.parametrize("n", COUNTS)
some_counts = pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 4))])

Columns = Sequence[Tensor]


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


def everywhere(fn: Callable[..., Any], *, n: int, executor: Any = "auto", **options: Any) -> list[Any]:
    """What a function of the number of the slot returns on each."""
    numbers = fdp.Sharded(tuple(range(n)), fdp.virtual_devices(n))
    out = fdp.parallel_apply(lambda i: [fn(i)], numbers, executor=executor, **options)
    assert isinstance(out, fdp.Sharded)
    return [shard[0] for shard in out.shards]
