"""Activation checkpointing around collectives: the numbers are those without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fdp
from tests.collectives.cases import CASES, Case, W, X, each_case, each_executor, leaves
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

TWO, THREE = fdp.virtual_devices(2), fdp.virtual_devices(3)
Fn = Callable[..., Tensor]
saving: dict[str, Any] = {"use_reentrant": False, "context_fn": fdp.checkpoint_context}


def saved(block: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(block, *args, **saving, **options)


def plainly(block: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return block(*args)


def both(run: Callable[[Callable[..., Any]], Any]) -> None:
    assert_close_tree(run(saved), run(plainly))


@each_executor
@each_case
def test_each_collective(case: Case, executor: Any):
    """Beside others nothing may look at generators."""
    keep = {} if executor == "sequential" else {"preserve_rng_state": False}

    def run(way: Callable[..., Any]) -> Any:
        def block(h: Tensor) -> Tensor:
            return (case.call(case.before(h).tanh()) * h.sum()).sin()

        def fn(w: Tensor, x: Tensor) -> Tensor:
            return way(block, w * x, **keep)

        w = W.clone().requires_grad_()
        outs = fdp.dp_apply(fn, w, X, fdp.virtual_devices(3), executor=executor, out_dims="list")
        value = torch.stack([out.square().sum() for out in outs]).sum()
        return value, torch.autograd.grad(value, w)

    if case is not CASES["ppermute-nothing"]:
        both(run)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_dropout_before_and_after_what_slots_meet_in(seed: int | None, microbatches: int):
    """What others drew meanwhile is not drawn again."""

    def block(h: Tensor) -> Tensor:
        h = nn.functional.dropout(h, 0.4) * fdp.psum(h.sum())
        return nn.functional.dropout(h, 0.4).sin() * fdp.pmean(h.mean(), weight="rows") + torch.rand_like(h) * h

    def run(way: Callable[..., Any]) -> Any:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            h = way(block, w * x)
            return way(block, h).square().mean()

        torch.manual_seed(7)
        options: Any = {"devices": fdp.virtual_devices(3), "seed": seed, "microbatches": microbatches}
        found = fdp.value_and_grad(loss, **options)(W, X)
        return (*found, torch.rand(2, dtype=torch.float64))

    both(run)


@pytest.mark.parametrize("name", ["inner", "data"])
def test_a_call_inside_whose_slots_meet_is_refused(name: str):
    def block(w: Tensor, h: Tensor) -> Tensor:
        def part(w: Tensor, x: Tensor) -> Tensor:
            return fdp.psum((w * x).sin().sum(), name) * x

        return fdp.dp_apply(part, w, h, fdp.virtual_devices(2), axis_name="inner")

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return saved(block, w, w * x).mean()

    with pytest.raises(RuntimeError, match=r"psum: in a call inside of a block.*Write the checkpoint inside"):
        fdp.value_and_grad(loss, devices=fdp.virtual_devices(2))(W, X)


def test_a_block_that_calls_others_when_it_is_computed_again():
    times: list[int] = []

    def block(h: Tensor) -> Tensor:
        times.append(1)
        return h.sin() * (fdp.psum(h.sum()) if len(times) <= 2 else fdp.pmax(h.detach().sum()))

    w = W.clone().requires_grad_()
    out = fdp.dp_apply(lambda w, x: saved(block, w * x), w, X, fdp.virtual_devices(2))
    with pytest.raises(RuntimeError, match="pmax: a block under activation checkpointing calls other collectives"):
        out.sum().backward()


@each_executor
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_without_the_context_the_error_says_what_to_write(slots: int, reentrant: bool, executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint(centred, w, x, use_reentrant=reentrant, preserve_rng_state=False)

    out = fdp.dp_apply(fn, W.clone().requires_grad_(), X, fdp.virtual_devices(slots), executor=executor)
    says = r"^p\w+: this code runs in a backward.*use_reentrant=False.*context_fn=fdp\.checkpoint_context"
    with pytest.raises(RuntimeError, match=says):
        out.sum().backward()


def test_axis_index_in_a_hook_of_a_backward():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        h = w * x
        h.register_hook(lambda grad: grad * fdp.axis_index())
        return h * fdp.psum(h.sum())

    w = W.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"axis_index: this code runs in a backward.*take axis_index\(\) before"):
        fdp.dp_apply(fn, w, X, fdp.virtual_devices(2)).sum().backward()


# ---------------------------------------------------------------- those of one device


def rerun(fn: Fn, **options: Any) -> Fn:
    """The function, whose block is computed again in the backward. Side by side no state of generators is looked at."""
    return lambda *args: saved(fn, *args, **{"preserve_rng_state": False, **options})


def centred(w: Tensor, x: Tensor) -> Tensor:
    h = (w * x).exp()
    h = (h - fdp.pmean(h.mean(0), weight="rows")).tanh()
    return (h * fdp.psum(h.square().sum(0))).sin()


def centred_alone(w: Tensor, x: Tensor) -> Tensor:
    h = (w * x).exp()
    h = (h - h.mean(0)).tanh()
    return (h * h.square().sum(0)).sin()


def twice(w: Tensor, x: Tensor) -> Tensor:
    return rerun(lambda w, x: rerun(centred)(w, x) * fdp.psum(x.sum(0)))(w, x)


def of_blocks(w: Tensor, x: Tensor) -> Tensor:
    return rerun(centred)(w, rerun(centred)(w, x))


BLOCKS: dict[str, tuple[Fn, Fn]] = {
    "one": (rerun(centred), centred_alone),
    "one after the other": (of_blocks, lambda w, x: centred_alone(w, centred_alone(w, x))),
    "in another": (twice, lambda w, x: centred_alone(w, x) * x.sum(0)),
    "to its end": (rerun(centred, determinism_check="none", early_stop=False), centred_alone),
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

    found = fdp.grad(lambda w, x: rerun(centred)(w, x).square().mean(), devices=TWO, executor=executor)
    alone = torch.func.grad(lambda w: centred_alone(w, X).square().mean())
    assert_close_tree(second(lambda w: found(w, X)), torch.func.grad(lambda w: alone(w).square().sum())(W))


class Block(nn.Module):
    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves, self.calls = saves, 0
        self.body = nn.Sequential(nn.Linear(3, 4), fdp.nn.SyncBatchNorm(4), nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        return rerun(self.body)(x) if self.saves else self.body(x)


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

        return rerun(block)(w, x)

    w = W.clone().requires_grad_()
    out = fdp.dp_apply(fn, w, X, THREE, executor=executor)
    assert sorted(met) == [0, 1, 2]
    with fdp.transfers() as log:
        (grad,) = torch.autograd.grad(out.sum(), w)
    assert not [each for each in log if "psum" in str(each)]
    assert sorted(met) == [0, 0, 1, 1, 2, 2]
    assert_close_tree(grad, torch.func.grad(lambda w: centred_alone(w, X).sum())(W))


def test_side_by_side_the_state_of_the_generator_is_not_looked_at():
    call = fdp.shard_map(rerun(centred, preserve_rng_state=True), in_dims=(None, 0), devices=TWO, executor="threads")
    with pytest.raises(
        RuntimeError, match=r"^executor='threads': the function calls torch\.get_rng_state.*preserve_rng"
    ):
        call(W, X)


@each_executor
def test_the_reentrant_kind_beside_a_collective(executor: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        h: Any = checkpoint(lambda h: torch.tanh(h * w), x, use_reentrant=True, preserve_rng_state=False)
        return h - fdp.pmean(x.mean(), weight="rows")

    w, x = leaves()
    fdp.dp_apply(fn, w, x, TWO, executor=executor).square().sum().backward()
    alone = torch.func.grad(lambda w, x: (torch.tanh(x * w) - x.mean()).square().sum(), (0, 1))(W, X)
    assert_close_tree((w.grad, x.grad), alone)
