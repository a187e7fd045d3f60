"""What a shard sees of its surroundings, and what it cannot do to the other shards."""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.settings import default_dtype

W = torch.tensor(2.0, dtype=torch.float64)
SLOTS = fdp.virtual_devices(4)
ROWS = torch.arange(8, dtype=torch.float64)


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast-off": lambda: torch.autocast("cpu", enabled=False),
    "default-dtype": default_dtype,
    "default-device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
def test_the_function_sees_what_its_caller_set(name: str, slots: int, executor: Any):
    devices = fdp.virtual_devices(slots)
    seen: list[Any] = []

    def fn(*_: Any) -> None:
        seen.append(state())

    with SURROUNDINGS[name]():
        want = state()
        fdp.dp_apply(fn, W, ROWS, devices, executor=executor)
        fdp.shard_map(fn, devices=devices, executor=executor)(ROWS)
        fdp.parallel_apply(fn, W, devices=devices, executor=executor)
        assert state() == want
    assert seen == [want] * 3 * slots


# Under torch.func `torch.get_default_device` itself fails.
@pytest.mark.parametrize("name", [name for name in SURROUNDINGS if name != "default-device"])
@pytest.mark.parametrize("slots", [1, 4])
def test_inside_gradient_functions_it_sees_what_torch_func_shows(name: str, slots: int):
    seen: list[Any] = []

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(state())
        return (w * x).mean()

    with SURROUNDINGS[name]():
        fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots))(W, ROWS)
        torch.func.grad(loss)(W, ROWS)
    want = seen.pop()
    assert want[0]
    assert seen == [want] * slots


@pytest.mark.parametrize("slots", [1, 4])
def test_results_carry_what_the_mode_says(slots: int):
    devices = fdp.virtual_devices(slots)
    w = W.clone().requires_grad_()
    with torch.no_grad():
        assert not fdp.dp_apply(torch.mul, w, ROWS, devices).requires_grad
    with torch.inference_mode():
        assert fdp.dp_apply(torch.mul, w, ROWS, devices).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        out = fdp.shard_map(torch.matmul, devices=devices, in_dims=(0, None))(torch.ones(8, 2), torch.eye(2))
        assert out.dtype is torch.bfloat16
    assert fdp.dp_apply(torch.mul, w, ROWS, devices).requires_grad


def test_a_shard_cannot_change_the_mode_of_the_next():
    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        seen = x.new_full((len(x),), torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        return seen

    with torch.enable_grad():  # and whatever is left of it ends here
        assert fdp.dp_apply(fn, W, ROWS, SLOTS).tolist() == [1] * 8


# ---- context variables


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("run", ["dp_apply", "parallel_apply", "grad", "grad-transformed", "microbatches", "count"])
def test_context_variables_do_not_leak(run: str, slots: int):
    seen: list[int] = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(VARIABLE.get())
        VARIABLE.set(100 + len(seen))
        return (w * x).mean()

    devices = fdp.virtual_devices(slots)
    token = VARIABLE.set(7)
    match run:
        case "dp_apply":
            fdp.dp_apply(fn, W, ROWS, devices, out_dims="mean")
        case "parallel_apply":
            fdp.parallel_apply(fn, W, fdp.scatter(ROWS, devices))
        case "grad":
            fdp.grad(fn, devices=devices)(W, ROWS)
        case "grad-transformed":
            torch.func.grad(lambda w: fdp.value_and_grad(fn, devices=devices)(w, ROWS)[0])(W)
        case "microbatches":
            fdp.grad(fn, devices=devices, microbatches=2)(W, ROWS)
        case "count":
            fdp.grad(fn, devices=devices, count=lambda w, x: float(fn(w.detach(), x)) + 9)(W, ROWS)
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


@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
def test_a_seed_gives_the_same_numbers_in_ten_runs(executor: Any):
    runs = [fdp.dp_apply(draw, W, ROWS, SLOTS, seed=7, executor=executor) for _ in range(10)]
    for run in runs:
        assert_same_tree(run, runs[0])
    assert not torch.equal(runs[0], fdp.dp_apply(draw, W, ROWS, SLOTS, seed=8))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slot_i_draws_from_fold_in(slots: int):
    devices = fdp.virtual_devices(slots)
    parts = fdp.scatter(ROWS, devices)
    want = torch.cat([of_slot(7, i, len(part)) for i, part in enumerate(parts.shards)])
    assert_same_tree(fdp.dp_apply(draw, W, ROWS, devices, seed=7), want)
    assert_same_tree(fdp.shard_map(lambda x: draw(None, x), devices=devices, seed=7)(ROWS), want)
    assert_same_tree(fdp.gather(as_sharded(fdp.parallel_apply(draw, W, parts, seed=7)), 0), want)
    aux = fdp.grad(lambda w, x: ((w * x).mean(), draw(w, x)), has_aux=True, aux_dims=0, devices=devices, seed=7)(
        W, ROWS
    )
    assert_same_tree(aux[1], want)


def as_sharded(value: Any) -> fdp.Sharded:
    assert isinstance(value, fdp.Sharded)
    return value


def test_slots_draw_different_numbers():
    out = fdp.dp_apply(draw, W, ROWS, SLOTS, seed=7)
    assert len(set(out.tolist())) == 8
    masks = fdp.dp_apply(lambda w, x: F.dropout(torch.ones(1, 64)), W, ROWS, SLOTS, seed=7)
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


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


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_generator_is_untouched(fails: bool):
    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        torch.manual_seed(5)
        if fails:
            raise ValueError("failed")
        return x

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="failed") if fails else contextlib.nullcontext():
        fdp.dp_apply(fn, W, ROWS, SLOTS, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 3


def test_without_a_seed_the_callers_generator_is_drawn_from():
    torch.manual_seed(3)
    out = fdp.dp_apply(draw, W, ROWS, SLOTS)
    torch.manual_seed(3)
    assert_same_tree(out, torch.rand(8, dtype=torch.float64))


def test_dropout_with_a_seed_has_its_exact_gradient():
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(x) * w).mean()

    value, grad = fdp.value_and_grad(loss, devices=SLOTS, seed=7)(W, ROWS)
    assert_close_tree(grad * W, value)
    assert float(grad) != float(fdp.grad(loss, devices=SLOTS, seed=8)(W, ROWS))


@pytest.mark.parametrize("seed", ["7", 7.0, torch.tensor(7), (1, 2)])
def test_a_seed_is_an_int(seed: Any):
    with pytest.raises(TypeError, match=r"^dp_apply: seed must be an int"):
        fdp.dp_apply(draw, W, ROWS, SLOTS, seed=seed)


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
