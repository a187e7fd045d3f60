"""What a shard sees of its surroundings, and what it cannot do to the other shards."""

import contextvars
from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree

W = torch.tensor(2.0, dtype=torch.float64)
SLOTS = fdp.virtual_devices(4)
ROWS = torch.arange(8, dtype=torch.float64)


# Under torch.func `torch.get_default_device` itself fails.


def test_a_shard_cannot_change_the_mode_of_the_next():
    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        seen = x.new_full((len(x),), torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        return seen

    with torch.enable_grad():  # and whatever is left of it ends here
        assert fdp.dp_apply(fn, W, ROWS, SLOTS).tolist() == [1] * 8


# ---- context variables


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("run", ["dp_apply", "parallel_apply", "grad", "grad-transformed", "microbatches", "count"])
def test_context_variables_do_not_leak(run: str, slots: int, executor: Any):
    seen: list[int] = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(VARIABLE.get())
        VARIABLE.set(100 + len(seen))
        return (w * x).mean()

    options: Any = {"devices": fdp.virtual_devices(slots), "executor": executor}
    token = VARIABLE.set(7)
    match run:
        case "dp_apply":
            fdp.dp_apply(fn, W, ROWS, out_dims="mean", **options)
        case "parallel_apply":
            fdp.parallel_apply(fn, W, fdp.scatter(ROWS, options["devices"]), executor=executor)
        case "grad":
            fdp.grad(fn, **options)(W, ROWS)
        case "grad-transformed":
            torch.func.grad(lambda w: fdp.value_and_grad(fn, **options)(w, ROWS)[0])(W)
        case "microbatches":
            fdp.grad(fn, microbatches=2, **options)(W, ROWS)
        case "count":
            fdp.grad(fn, count=lambda w, x: float(fn(w.detach(), x)) + 9, **options)(W, ROWS)
    assert seen == [7] * slots * (2 if run in ("microbatches", "count") else 1)
    assert VARIABLE.get() == 7
    VARIABLE.reset(token)


# ---- devices=None inside


def test_inside_a_mapped_function_none_is_the_slots_device():
    """On "meta" too, which is no device that `None` means outside."""

    def inner(_: Any, x: torch.Tensor) -> torch.Tensor:
        devices = fdp.scatter(x, None).devices
        assert devices == (x.device,)
        assert fdp.replicate(x, None).devices == devices
        out = fdp.dp_apply(torch.mul, W, x)
        assert out.device == x.device
        assert fdp.value_and_grad(lambda w, x: (w * x).mean())(x[0], x)[0].device == x.device
        return fdp.shard_map(lambda x: x * 2)(x)

    assert_same_tree(fdp.dp_apply(inner, W, ROWS, SLOTS), ROWS * 2)
    assert fdp.dp_apply(inner, W, ROWS, "meta").device.type == "meta"
    fdp.value_and_grad(lambda w, x: (w * inner(w, x)).mean(), devices=SLOTS)(W, ROWS)
    fdp.parallel_apply(inner, W, fdp.scatter(ROWS, ["meta", "cpu"]))
    assert fdp.scatter(ROWS, None).devices == fdp.available_devices()


def test_the_innermost_slot_counts():
    def outer(_: Any, x: torch.Tensor) -> torch.Tensor:
        def middle(_: Any, x: torch.Tensor) -> torch.Tensor:
            assert fdp.scatter(x, None).devices[0].type == "meta"
            return x

        assert fdp.dp_apply(middle, W, x, ["meta"]).device.type == "meta"
        assert fdp.scatter(x, None).devices[0].type == "cpu"
        return x

    fdp.dp_apply(outer, W, ROWS, SLOTS)


def test_after_a_failure_the_outside_is_as_before():
    with pytest.raises(ZeroDivisionError, match="division"):
        fdp.dp_apply(lambda w, x: 1 / 0, W, ROWS, "meta")
    assert fdp.scatter(ROWS, None).devices == fdp.available_devices()


# ---- random numbers


def draw(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, dtype=torch.float64)


def of_slot(seed: int, slot: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fdp.fold_in(seed, slot))
    return torch.rand(rows, dtype=torch.float64, generator=generator)


def test_active_slots_draw_by_their_new_numbers():
    out = fdp.dp_apply(draw, W, ROWS, SLOTS, seed=7, weights=(0, 1, 0, 1))
    assert_same_tree(out, torch.cat([of_slot(7, 0, 4), of_slot(7, 1, 4)]))


def test_microbatches_draw_different_numbers():
    def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
        return (w * x).mean(), draw(w, x)

    options: Any = {"has_aux": True, "aux_dims": 0, "devices": ["cpu"] * 2, "seed": 7}
    draws = [fdp.grad(loss, microbatches=2, **options)(W, ROWS)[1] for _ in range(3)]
    assert len(set(draws[0].tolist())) == 8
    assert_same_tree(draws[1:], draws[:1] * 2)


def test_fold_in():
    assert fdp.fold_in(3, 4) == fdp.fold_in(3, 4)
    seeds = {fdp.fold_in(seed, data) for seed in range(-50, 50) for data in range(-50, 50)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert fdp.fold_in(0, 1) != fdp.fold_in(1, 0)
    assert fdp.fold_in(-(2**40), 2**60) in range(2**63)
    torch.Generator().manual_seed(max(seeds))
    # Half of the bits change with every step, or streams would be related.
    flips = [(fdp.fold_in(0, i) ^ fdp.fold_in(0, i + 1)).bit_count() for i in range(200)]
    assert 28 < sum(flips) / len(flips) < 35


def test_fold_in_stays_what_it_was():
    """Numbers that were drawn yesterday can be drawn again tomorrow."""
    seeds = [fdp.fold_in(0, 0), fdp.fold_in(0, 1), fdp.fold_in(7, 3)]
    assert seeds == [6017775124710473527, 313702574736366215, 3879072848308665546]
