"""Copies of what `functional` makes, for other processes and for keeping: pickled, deep-copied, passed along."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp import functional
from tests.common.comparing import assert_same_tree
from tests.common.numbers import numbers
from tests.common.threads import side_by_side

X = numbers(8, 3)
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "file": lambda value: _through_a_file(value),
}
each_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


@each_copy
@pytest.mark.parametrize("detach", [False, True])
def test_copies_give_the_same(duplicate: Callable[[Any], Any], detach: bool):
    apply, state = functional(network(), detach=detach)
    want = apply(state, X)  # of which clones are left
    other = duplicate(apply)
    for _ in range(2):
        assert_same_tree(other(state, X), want)
    both, its_state = duplicate((apply, state))
    assert_same_tree(both(its_state, X), want)
    assert [p.requires_grad for p in its_state[0].values()] == [not detach] * len(its_state[0])


@each_copy
def test_copies_have_what_the_original_has(duplicate: Callable[[Any], Any]):
    apply, state = functional(network())
    for each in (apply, duplicate(apply), duplicate(duplicate(apply))):
        assert each.out_dims == (0, "mean")
        assert getattr(each, "__name__", "") == "apply"
        for fn in (each, torch.compile(each, backend="eager")):
            assert fdp.explain(fn, state, X, ["cpu"] * 2).executor == "one shard after the other: executor='auto'"
        out, buffers = fdp.dp_apply(each, state, X, ["cpu"] * 2)
        assert out.shape == (8, 2)
        assert buffers["1.num_batches_tracked"] == 1


@each_copy
def test_copies_have_a_module_of_their_own(duplicate: Callable[[Any], Any]):
    module = network()
    apply, state = functional(module)
    other = duplicate(apply)
    module.eval()
    assert not torch.equal(apply(state, X)[0], other(state, X)[0])
    assert_same_tree(apply(state, X)[1], state[1])


def test_a_copy_that_is_used_beside_the_original():
    apply, state = functional(network())
    other = copy.deepcopy(apply)
    want = apply(state, X)[0]
    with side_by_side():
        for _ in range(10):
            shards = fdp.parallel_apply(
                lambda x: (apply(state, x)[0], other(state, x)[0]), fdp.replicate(X, ["cpu"] * 4), executor="threads"
            )
            pairs: Any = [part.shards for part in shards]
            assert all(torch.equal(out, want) for out in (*pairs[0], *pairs[1]))


def test_it_may_be_an_argument():
    apply, state = functional(network().eval())

    def call(state: Any, fn: Any, x: Tensor) -> Tensor:
        return fn(state, x)[0]

    assert_same_tree(fdp.dp_apply(call, state, (apply, X), "cpu"), apply(state, X)[0])
    halves = [apply(state, part)[0] for part in X.chunk(2)]
    assert_same_tree(fdp.dp_apply(call, state, (apply, X), ["cpu"] * 2), torch.cat(halves))


def test_what_wraps_it_has_its_dims():
    apply, _ = functional(network())

    @functools.wraps(apply)
    def wrapped(*args: Any) -> Any:
        return apply(*args)

    assert (wrapped.__name__, getattr(wrapped, "out_dims", None)) == ("apply", (0, "mean"))


def test_it_is_compiled_in_one_graph():
    apply, state = functional(network())
    compiled = torch.compile(apply, backend="eager", fullgraph=True)
    out, buffers = compiled(state, X)
    torch.testing.assert_close((out, buffers), apply(state, X))
    assert getattr(compiled, "out_dims", None) == (0, "mean")
    assert state[1]["1.num_batches_tracked"] == 0
