"""Activation checkpointing around collectives: the numbers are those without it, on one device, and nothing meets twice."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fdp
from tests.collectives.cases import CASES, EXECUTORS, Case, W, X, cotangents, filled, leaves, mapped, plain, product
from tests.common.comparing import assert_close_tree
from tests.common.depth import few
from tests.common.numbers import numbers

each_executor = pytest.mark.parametrize("executor", EXECUTORS)
TWO, THREE = fdp.virtual_devices(2), fdp.virtual_devices(3)
Fn = Callable[..., Tensor]


def saving(fn: Fn, **options: Any) -> Fn:
    """The function, whose block is computed again in the backward. Side by side no state of generators is looked at."""
    given: Any = {"use_reentrant": False, "context_fn": fdp.checkpoint_context, "preserve_rng_state": False, **options}
    return lambda *args: checkpoint(fn, *args, **given)


# ---------------------------------------------------------------- equal numbers


@few(2)
@each_executor
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_each_collective(name: str, n: int, executor: Any):
    """Values, gradients, and those of gradients."""

    def run(call: Callable[..., Any]) -> Any:
        w, x = leaves()
        outs = call(w, x)
        first = torch.autograd.grad(
            product(outs, cotangents(outs)).sin(), (w, x), create_graph=True, allow_unused=True, materialize_grads=True
        )
        total = torch.stack([grad.sin().sum() for grad in first]).sum()
        return list(outs), list(first), filled(torch.autograd.grad(total, (w, x), allow_unused=True))

    case = CASES[name]
    saved = Case(saving(lambda x: case.call(x).sin()), case.oracle, case.before)
    unsaved = Case(lambda x: case.call(x).sin(), lambda xs, rows: [x.sin() for x in case.oracle(xs, rows)], case.before)
    assert_close_tree(run(mapped(saved, n, executor)), run(plain(unsaved, n)))


def centred(w: Tensor, x: Tensor) -> Tensor:
    h = (w * x).exp()
    h = (h - fdp.pmean(h.mean(0), weight="rows")).tanh()
    return (h * fdp.psum(h.square().sum(0))).sin()


def centred_alone(w: Tensor, x: Tensor) -> Tensor:
    h = (w * x).exp()
    h = (h - h.mean(0)).tanh()
    return (h * h.square().sum(0)).sin()


def twice(w: Tensor, x: Tensor) -> Tensor:
    return saving(lambda w, x: saving(centred)(w, x) * fdp.psum(x.sum(0)))(w, x)


def of_blocks(w: Tensor, x: Tensor) -> Tensor:
    return saving(centred)(w, saving(centred)(w, x))


BLOCKS: dict[str, tuple[Fn, Fn]] = {
    "one": (saving(centred), centred_alone),
    "one after the other": (of_blocks, lambda w, x: centred_alone(w, centred_alone(w, x))),
    "in another": (twice, lambda w, x: centred_alone(w, x) * x.sum(0)),
    "to its end": (
        saving(centred, determinism_check="none", early_stop=False),
        centred_alone,
    ),
}
each_block = pytest.mark.parametrize("block", BLOCKS)


@each_executor
@each_block
def test_a_backward_from_outside(block: str, executor: Any):
    def run(call: Fn) -> Any:
        w = W.clone().requires_grad_()
        out = call(w, X)
        return out, torch.autograd.grad((out * numbers(7, 3)).sum(), w)

    fn, alone = BLOCKS[block]
    assert_close_tree(run(lambda w, x: fdp.dp_apply(fn, w, x, THREE, executor=executor)), run(alone))


@each_executor
@each_block
@pytest.mark.parametrize("microbatches", [1, 2])
def test_in_a_gradient_function(microbatches: int, block: str, executor: Any):
    """The statistics are those of a round of microbatches."""
    fn, alone = BLOCKS[block]
    x = numbers(12, 3)
    rounds = torch.stack([x[3 * i : 3 * i + 3] for i in range(4)])  # slot 0 has two of them, and slot 1
    parts = [x] if microbatches == 1 else [torch.cat([rounds[i], rounds[i + 2]]) for i in range(2)]

    def whole(w: Tensor) -> Tensor:
        return torch.stack([alone(w, part).square().mean() for part in parts]).mean()

    call = fdp.value_and_grad(
        lambda w, x: fn(w, x).square().mean(), devices=TWO, microbatches=microbatches, executor=executor
    )
    grad, value = torch.func.grad_and_value(whole)(W)
    assert_close_tree(call(W, x), (value, grad))


@each_executor
def test_the_gradient_of_a_gradient_function(executor: Any):
    def second(call: Callable[[Tensor], Tensor]) -> Tensor:
        w = W.clone().requires_grad_()
        return torch.autograd.grad(call(w).square().sum(), w)[0]

    found = fdp.grad(lambda w, x: saving(centred)(w, x).square().mean(), devices=TWO, executor=executor)
    alone = torch.func.grad(lambda w: centred_alone(w, X).square().mean())
    assert_close_tree(second(lambda w: found(w, X)), torch.func.grad(lambda w: alone(w).square().sum())(W))


# ---------------------------------------------------------------- modules


class Block(nn.Module):
    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves, self.calls = saves, 0
        self.body = nn.Sequential(nn.Linear(3, 4), fdp.nn.SyncBatchNorm(4), nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        return saving(self.body)(x) if self.saves else self.body(x)


def block(saves: bool) -> Block:
    torch.manual_seed(0)
    return Block(saves)


@each_executor
@pytest.mark.parametrize("saves", [True, False])
def test_synchronized_batch_norm_in_data_parallel(saves: bool, executor: Any):
    """Buffers are moved once."""
    module, alone = block(saves), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    alone.load_state_dict(module.body.state_dict())
    parallel = fdp.DataParallel(module, THREE, executor=executor)
    for _ in range(2):
        out, want = parallel(X), alone(X)
        assert_close_tree(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
    assert_close_tree([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])
    assert_close_tree(dict(module.body.named_buffers()), dict(alone.named_buffers()))


@each_executor
def test_synchronized_batch_norm_in_a_gradient_function(executor: Any):
    def run(saves: bool) -> Any:
        apply, (params, buffers) = fdp.functional(block(saves))

        def loss(params: Any, x: Tensor) -> Any:
            out, new = apply((params, buffers), x)
            return out.square().mean(), new

        return fdp.value_and_grad(loss, has_aux=True, devices=THREE, aux_dims=None, executor=executor)(params, X)

    assert_close_tree(run(saves=True), run(saves=False))


# ---------------------------------------------------------------- random numbers


def noisy(w: Tensor, x: Tensor) -> Tensor:
    h = nn.functional.dropout((w * x).exp())
    h = nn.functional.dropout(h * fdp.psum(h.sum()))
    return nn.functional.dropout(h * fdp.psum(h.mean()))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("how", ["outside", "grad", "nested"])
def test_dropout_around_collectives(how: str, seed: int | None):
    """What is drawn between them and after them is drawn again, and the generator goes on where it was."""

    def block(saves: bool) -> Fn:
        if how == "nested":
            return saving(saving(noisy, preserve_rng_state=True), preserve_rng_state=True) if saves else noisy
        return saving(noisy, preserve_rng_state=True) if saves else noisy

    def run(saves: bool) -> Any:
        torch.manual_seed(5)
        if how == "grad":
            found: Any = fdp.value_and_grad(
                lambda w, x: block(saves)(w, x).square().mean(), devices=THREE, seed=seed
            )(W, X)
            return found, torch.rand(2)
        w = W.clone().requires_grad_()
        out = fdp.dp_apply(block(saves), w, X, THREE, seed=seed)
        return out, torch.autograd.grad(out.square().sum(), w), torch.rand(2)

    assert_close_tree(run(saves=True), run(saves=False))


def test_side_by_side_the_state_of_the_generator_is_not_looked_at():
    call = fdp.shard_map(saving(noisy, preserve_rng_state=True), in_dims=(None, 0), devices=TWO, executor="threads")
    with pytest.raises(RuntimeError, match=r"^executor='threads': the function calls torch\.get_rng_state.*preserve_rng"):
        call(W, X)


# ---------------------------------------------------------------- once, or an error


@each_executor
def test_nothing_meets_in_the_backward(executor: Any):
    """Another call may be under way then, or none: the block runs again, and its collectives do not."""
    met: list[int] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        i = fdp.axis_index()

        def block(w: Tensor, x: Tensor) -> Tensor:
            met.append(fdp.axis_index())
            assert (fdp.axis_index(), fdp.axis_size(), fdp.axis_rows()) == (i, 3, len(x))
            return centred(w, x)

        return saving(block)(w, x)

    w = W.clone().requires_grad_()
    out = fdp.dp_apply(fn, w, X, THREE, executor=executor)
    assert sorted(met) == [0, 1, 2]
    with fdp.transfers() as log:
        (grad,) = torch.autograd.grad(out.sum(), w)
    assert not [each for each in log if "psum" in str(each)]
    assert sorted(met) == [0, 0, 1, 1, 2, 2]
    assert_close_tree(grad, torch.func.grad(lambda w: centred_alone(w, X).sum())(W))


@each_executor
def test_a_block_that_calls_others_when_it_is_computed_again(executor: Any):
    is_first = [True]

    def block(w: Tensor, x: Tensor) -> Tensor:
        h = (w * x).exp()
        return h * (fdp.psum(h.sum()) if is_first[0] else fdp.pmean(h.sum()))

    w = W.clone().requires_grad_()
    out = fdp.dp_apply(saving(block), w, X, TWO, executor=executor)
    is_first[0] = False
    with pytest.raises(RuntimeError, match="pmean: a block under activation checkpointing calls other collectives"):
        out.sum().backward()


@each_executor
@pytest.mark.parametrize("how", ["outside", "grad"])
def test_without_the_context_an_error_says_so(how: str, executor: Any):
    fn = saving(centred, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
    with pytest.raises(RuntimeError, match=r"^p\w+: this code runs in a backward.*context_fn=fdp\.checkpoint_context"):
        if how == "grad":
            fdp.grad(lambda w, x: fn(w, x).mean(), devices=TWO, executor=executor)(W, X)
        else:
            fdp.dp_apply(fn, W.clone().requires_grad_(), X, TWO, executor=executor).sum().backward()


@each_executor
def test_the_reentrant_kind_says_so(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint(centred, w, x, use_reentrant=True, preserve_rng_state=False)  # pyright: ignore[reportReturnType]

    out = fdp.dp_apply(fn, W.clone().requires_grad_(), X, TWO, executor=executor)
    with pytest.raises(RuntimeError, match=r"^p\w+: this code runs in a backward.*use_reentrant=False"):
        out.sum().backward()


@each_executor
def test_the_reentrant_kind_beside_a_collective(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        h: Any = checkpoint(lambda h: torch.tanh(h * w), x, use_reentrant=True, preserve_rng_state=False)
        return h - fdp.pmean(x.mean(), weight="rows")

    w, x = leaves()
    fdp.dp_apply(fn, w, x, TWO, executor=executor).square().sum().backward()
    alone = torch.func.grad(lambda w, x: (torch.tanh(x * w) - x.mean()).square().sum(), (0, 1))(W, X)
    assert_close_tree((w.grad, x.grad), alone)
