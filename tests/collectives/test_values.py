"""Values of collectives, in all kinds of calls and in nested ones, and memory of their own."""

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import (
    CASES,
    Case,
    W,
    X,
    balanced,
    each_case,
    each_count,
    each_executor,
    everywhere,
    mapped,
    plain,
    same,
)
from tests.common.comparing import assert_close_tree
from tests.common.depth import few

EXTREMES: dict[str, Case] = {
    "pmax": Case(fdp.pmax, lambda xs, rows: [torch.stack(list(xs)).amax(0)] * len(xs)),
    "pmin": Case(fdp.pmin, lambda xs, rows: [torch.stack(list(xs)).amin(0)] * len(xs)),
}


@few(4)
@each_executor
@each_count
@pytest.mark.parametrize("case", (CASES | EXTREMES).values(), ids=CASES | EXTREMES)
def test_values(case: Case, n: int, executor: str):
    assert_close_tree(mapped(case, n, executor)(W, X), plain(case, n)(W, X))


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


# ---------------------------------------------------------------- memory


@few(2)
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


@few(2)
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


def test_pairs_in_any_order_are_the_same_permutation():
    pairs = [[(0, 1), (1, 0)], [(1, 0), (0, 1)]]
    found = everywhere(lambda i: fdp.ppermute(torch.tensor([i]), pairs[i]), n=2)
    assert [x.item() for x in found] == [1, 0]
