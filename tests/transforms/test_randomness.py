"""Which random numbers slots draw: different ones, the same, or those that their rows have on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fdp

X = torch.linspace(-2, 2, 13 * 8, dtype=torch.float64).sin().reshape(13, 8)
W = torch.linspace(-1, 1, 64, dtype=torch.float64).cos().reshape(8, 8)
SLOTS = (1, 2, 3, 13)
ROWS: dict[str, Any] = {"seed": 3, "randomness": "rows"}


def drop(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.4)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return drop(w, x).square().mean()


def equal_on(run: Callable[[Any], Any], slots: tuple[int, ...] = SLOTS) -> Any:
    """What is returned on one device, and on others."""
    want = run(fdp.virtual_devices(1))
    for k in slots[1:]:
        torch.testing.assert_close(run(fdp.virtual_devices(k)), want, rtol=1e-12, atol=1e-12)
    return want


# ---- the three kinds


def uniform(_: None, x: Tensor) -> Tensor:
    return torch.rand(x.shape[0], 3)


def test_different_slots_draw_different_numbers():
    found = fdp.dp_apply(uniform, None, torch.ones(4), fdp.virtual_devices(4), seed=1)
    assert len({tuple(row) for row in found.tolist()}) == 4


def test_same_gives_all_slots_the_same_numbers():
    found = fdp.dp_apply(uniform, None, torch.ones(4), fdp.virtual_devices(4), seed=1, randomness="same")
    assert len({tuple(row) for row in found.tolist()}) == 1


def test_same_is_the_same_in_microbatches_and_in_slots_that_meet():
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return (x * torch.rand(8) * w).mean()

    def meeting(w: Tensor, x: Tensor) -> Tensor:
        fdp.psum(x.sum())
        return noisy(w, x)

    options: dict[str, Any] = {"seed": 1, "randomness": "same"}
    want = fdp.value_and_grad(noisy, devices="cpu", **options)(W[0], X)
    for function in (noisy, meeting):
        step = fdp.value_and_grad(function, devices=fdp.virtual_devices(2), microbatches=3, **options)
        torch.testing.assert_close(step(W[0], X), want)


def test_rows_are_other_numbers_in_each_row_and_with_each_seed():
    def draws(seed: int) -> Tensor:
        return fdp.dp_apply(uniform, None, torch.ones(5), fdp.virtual_devices(2), seed=seed, randomness="rows")

    assert len({tuple(row) for seed in (1, 2) for row in draws(seed).tolist()}) == 10


def test_the_generator_of_the_caller_is_left_alone():
    before = torch.get_rng_state()
    fdp.value_and_grad(loss, devices=fdp.virtual_devices(2), **ROWS)(W, X)
    assert torch.equal(torch.get_rng_state(), before)


# ---- where rows come from


def test_every_mapped_function_takes_it():
    want = equal_on(lambda d: fdp.dp_apply(drop, W, X, d, **ROWS))
    equal_on(lambda d: fdp.shard_map(drop, devices=d, in_dims=(None, 0), **ROWS)(W, X))
    equal_on(lambda d: fdp.grad(loss, devices=d, **ROWS)(W, X))

    def on_slots(devices: Any) -> Tensor:
        shards = fdp.parallel_apply(drop, fdp.replicate(W, devices), fdp.scatter(X, devices), **ROWS)
        assert isinstance(shards, fdp.Sharded)
        return torch.cat(shards.shards)

    assert torch.equal(equal_on(on_slots), want)


def test_rows_in_another_dim():
    equal_on(
        lambda d: fdp.dp_apply(lambda _, x: F.dropout(x), None, X.T.contiguous(), d, in_dims=1, out_dims=1, **ROWS)
    )


def test_rows_of_a_list():
    def noisy(_: None, items: list[Tensor]) -> Tensor:
        return torch.stack(items) * torch.rand(len(items), 1)

    equal_on(lambda d: fdp.dp_apply(noisy, None, list(X), d, in_dims="items", **ROWS))


@pytest.mark.parametrize("known", [True, False])
def test_rows_of_what_is_on_its_slots(known: bool):
    def run(devices: Any) -> Tensor:
        shards = fdp.scatter(X, devices)
        return fdp.dp_apply(drop, W, shards if known else shards.map(lambda shard: shard), **ROWS)

    equal_on(run)


def test_rows_of_a_replicated_step():
    equal_on(lambda d: fdp.value_and_grad(loss, devices=d, **ROWS)(fdp.replicate(W, d), fdp.scatter(X, d))[0])


def test_where_nothing_is_split_there_is_one_slot():
    step: Any = {"in_dims": None, "out_dims": None}
    equal_on(lambda d: fdp.shard_map(F.dropout, devices=d, **step, **ROWS)(W))


# ---- around, inside, afterwards


def test_transforms_around_the_call():
    def run(w: Tensor, devices: Any) -> Tensor:
        return fdp.dp_apply(drop, w, X, devices, **ROWS).square().sum()

    equal_on(lambda d: torch.func.grad(run)(W, d))
    equal_on(lambda d: torch.func.jvp(lambda w: run(w, d), (W,), (W,))[1])
    two = torch.stack([W, W])
    for randomness in ("same", "different"):
        equal_on(lambda d, how=randomness: torch.func.vmap(lambda w: run(w, d), randomness=how)(two))


def test_modes_around_the_call():
    step = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    found = [equal_on(lambda d, mode=mode: mode()(fdp.dp_apply)(drop, W, X, d, **ROWS)) for mode in step.values()]
    assert torch.equal(*found)


def test_second_derivatives():
    def run(devices: Any) -> Tensor:
        w = W.clone().requires_grad_()
        gradient: Any = fdp.grad(loss, devices=devices, create_graph=True, **ROWS)(w, X)
        return torch.autograd.grad(gradient.square().sum(), w)[0]

    equal_on(run)


class NoisyGradient(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.rand_like(grads[0])


def test_draws_in_a_backward():
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return NoisyGradient.apply(drop(w, x)).square().mean()

    equal_on(lambda d: fdp.grad(noisy, devices=d, **ROWS)(W, X))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"rand_like.* is not always drawn"):
        fdp.grad(noisy, devices=fdp.virtual_devices(2), **ROWS)(W, X)  # by torch.func: its backward is in no slot


def test_gradients_by_torch_func():
    """There dropout draws by other operations."""

    def run(devices: Any) -> list[Tensor]:
        step = fdp.grad(loss, devices=devices, **ROWS)
        with torch.inference_mode():
            first = step(W, X)
        return [first, torch.func.jvp(lambda w: step(w, X), (W,), (W,))[1]]

    equal_on(run)


def test_slots_that_meet():
    def centred(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(x - fdp.psum(F.dropout(x).sum(0)) / 13) @ w

    equal_on(lambda d: fdp.dp_apply(centred, W, X, d, **ROWS))


def test_a_module_that_changes_between_train_and_eval():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).double()
    apply, state = fdp.functional(module)

    def run(devices: Any) -> list[Tensor]:
        return [fdp.dp_apply(apply, state, X, devices, **ROWS)[0] for _ in map(module.train, (True, False, True))]

    first, second, third = equal_on(run)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_a_module_that_changes_where_a_call_is_not_made_twice():
    module, held = nn.Dropout(0.5), fdp.scatter(X, fdp.virtual_devices(2))

    def run() -> Tensor:
        shards = fdp.parallel_apply(call, held, **ROWS)
        assert isinstance(shards, fdp.Sharded)
        return torch.cat(shards.shards)

    def call(x: Tensor) -> Tensor:
        return module(x)

    run()
    module.p = 0.2
    with pytest.raises(RuntimeError, match=r"with 0\.8 in place of defaults") as refusal:
        run()
    assert any("looks at it anew in the next call" in note for note in refusal.value.__notes__)
    want = fdp.dp_apply(lambda _, x: module(x), None, X, "cpu", **ROWS)
    torch.testing.assert_close(run(), want)


def test_a_function_that_is_made_anew_each_time():
    def run(devices: Any) -> list[Tensor]:
        each = [lambda w, x: x, drop, lambda w, x: drop(w, drop(w, x))]
        return [fdp.dp_apply(lambda w, x, step=step: step(w, x), W, X, devices, **ROWS) for step in each]

    equal_on(run)


def test_compiled_shards():
    equal_on(lambda d: fdp.dp_apply(torch.compile(drop, backend="eager"), W, X, d, **ROWS))


# ---- what is an error


def refused(words: str, function: Callable[..., Any], slots: int = 2, **options: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        fdp.dp_apply(function, W, X, fdp.virtual_devices(slots), **(ROWS | options))


def test_options_that_make_no_sense():
    refused("needs a seed: pass seed=", drop, seed=None)
    refused("no randomness 'row'; expected 'different', 'same' or 'rows'", drop, randomness="row")
    with pytest.raises(
        ValueError,
        match=r"parallel_apply: randomness='rows' needs to know which rows each slot has",
    ):
        fdp.parallel_apply(lambda w: F.dropout(w), fdp.replicate(W, fdp.virtual_devices(2)), **ROWS)


def test_draws_that_have_no_rows_to_share_out():
    refused(r"aten.randperm.* of shape \[101\] \(test_randomness.py, line", lambda w, x: x[torch.randperm(len(x))])
    refused("depends on how many rows there are", lambda w, x: x * torch.randint(0, len(x), (8,)))
    refused(
        r"aten.rand.default of shape \[101, 101\].* has rows in 2 dims", lambda w, x: torch.rand(len(x), len(x)) @ x
    )
    refused("has 102 elements in dim 0 for 101 rows", lambda w, x: x * torch.rand(len(x) + 1)[1:, None])
    refused("draws over the rows", lambda w, x: x + x[torch.multinomial(torch.ones(len(x)), 3)].sum())
    refused("is drawn with 103 rows, and not with 101.* Draw once for all rows", lambda w, x: x * _one_each(x))


def _one_each(x: Tensor) -> Tensor:
    return torch.stack([torch.rand(()) for _ in x])[:, None]


def test_rows_that_are_inside_a_dim_with_others():
    def inside(_: None, x: Tensor) -> Tensor:
        turned = x.reshape(-1, 2, 4).transpose(0, 1)
        return F.dropout(turned.reshape(-1, 4)).reshape(turned.shape).transpose(0, 1)

    def factor(_: None, x: Tensor) -> Tensor:
        turned = x.reshape(-1, 2, 4).transpose(0, 1).reshape(-1, 4)
        return (turned * torch.rand(turned.shape[0], 1)).reshape(2, -1, 4).transpose(0, 1)

    for function in (inside, factor):
        refused(r"\(time, rows\) does. Put the rows first", function)


def test_rows_that_have_changed_places():
    def sorted_rows(_: None, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return F.dropout(x[order])[order.argsort()]

    for function in (sorted_rows, lambda w, x: (x.flip(0) * torch.rand(len(x), 1)).flip(0)):
        refused(r"is for rows that aten\.\w+.* has reordered, cut or joined. That is refused, not followed", function)
    equal_on(lambda d: fdp.dp_apply(lambda _, x: F.dropout(x.flip(1)).gather(1, x.argsort(1)), None, X, d, **ROWS))
    equal_on(lambda d: fdp.grad(lambda w, x: drop(w, x)[x[:, 0].argsort()].square().mean(), devices=d, **ROWS)(W, X))


def test_attention_which_has_rows_inside_for_a_while():
    layer = nn.MultiheadAttention(8, 4, dropout=0.2).double().requires_grad_(False)

    def attend(_: None, x: Tensor) -> Tensor:
        turned = x.reshape(-1, 2, 8).transpose(0, 1)
        return F.dropout(layer(turned, turned, turned)[0]).transpose(0, 1)

    equal_on(lambda d: fdp.dp_apply(attend, None, X.repeat(1, 2), d, **ROWS))


def test_attention_without_dropout_draws_nothing():
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()  # so the kernel is called without its dropout
    apply, state = fdp.functional(layer)

    def attend(_: None, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 2, 4)
        return F.dropout(apply(state, rows, rows, rows, need_weights=False)[0][0], 0.4)

    equal_on(lambda devices: fdp.dp_apply(attend, None, X, devices, **ROWS))


def test_what_is_on_its_slots_may_have_other_shapes_next_time():
    def run(devices: Any) -> list[Tensor]:
        held = [fdp.scatter(x, devices) for x in (X, X[:, :3], X[:5], X)]
        found = [fdp.parallel_apply(lambda x: F.dropout(x), shards, **ROWS) for shards in held]
        return [torch.cat(each.shards) for each in found if isinstance(each, fdp.Sharded)]

    equal_on(run)


def test_what_draws_past_fdp():
    refused("draws from a generator of its own", lambda w, x: x * torch.rand(8, generator=torch.Generator()))
    refused(
        "has used torch's generator in a way that fdp does not see", lambda w, x: (torch.manual_seed(1), drop(w, x))[1]
    )
    refused("has used torch's generator", lambda w, x: _noise(x))


@torch.library.custom_op("fdp_tests::noise", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_draws_that_depend_on_values_or_slots():
    refused("the function depends on values", lambda w, x: drop(w, x) if x.sum() > 0 else x)
    refused("is not always drawn", lambda w, x: drop(w, x) if fdp.axis_index() == 0 else x)
    refused("is not always drawn", lambda w, x: x if fdp.axis_index() == 0 else drop(w, x))


def test_a_split_inside():
    refused("has 51 elements in dim 0 for 101 rows", lambda w, x: fdp.dp_apply(drop, w, x, fdp.virtual_devices(2)))
    equal_on(lambda d: fdp.dp_apply(lambda w, x: fdp.dp_apply(drop, w, x), W, X, d, **ROWS))


def test_a_checkpoint_whose_backward_comes_later():
    def function(w: Tensor, x: Tensor) -> Any:
        return checkpoint(drop, w, x, use_reentrant=False)

    equal_on(lambda d: fdp.grad(lambda w, x: function(w, x).square().mean(), devices=d, **ROWS)(W, X))
    with pytest.raises(
        RuntimeError, match=r"is inside torch\.utils\.checkpoint, and a backward after this call would draw"
    ):
        fdp.dp_apply(function, W.clone().requires_grad_(), X, fdp.virtual_devices(2), **ROWS)


@pytest.mark.deep
def test_compiling_around_the_call():
    with pytest.raises(RuntimeError, match=r"and not inside torch\.compile: compile the function of a shard"):
        torch.compile(lambda w, x: fdp.dp_apply(drop, w, x, fdp.virtual_devices(2), **ROWS), backend="eager")(W, X)


def test_an_error_of_the_function_says_that_it_was_tried_without_data():
    refused("on 101 rows without data, and there it fails: .*reduction dim", lambda w, x: drop(w[:3], x))
