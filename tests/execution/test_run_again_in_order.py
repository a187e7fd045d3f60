"""Shards that run again, in order, because they draw or look at random numbers."""

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.threads import side_by_side
from tests.execution.side_by_side import X, threads

pytestmark = pytest.mark.usefixtures("switching")


DROPOUT = nn.Dropout(0.5)


def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda w, x: DROPOUT(w * x), w, x, use_reentrant=False)


def test_a_checkpoint_recomputes_with_the_same_random_numbers():
    def loss(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        DROPOUT(x)  # others draw meanwhile
        out = checkpointed(w, x)
        return out.sum(), out.detach()

    both = fdp.grad(loss, has_aux=True, devices=fdp.virtual_devices(4), executor="threads", reduction="sum", aux_dims=0)
    w = torch.ones(3, dtype=torch.float64)
    for _ in range(20):
        grads, out = both(w, X)
        torch.testing.assert_close(grads, out.sum(0))  # the derivative in w of the sum of mask * w * x, at w = 1


def test_seeding_in_a_shard_is_as_in_order():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(w))
        return torch.rand(len(x), 3)

    for _ in range(20):
        torch.testing.assert_close(threads(fn, torch.tensor(5), X), fdp.dp_apply(fn, torch.tensor(5), X, ["cpu"] * 4))


def test_a_seeded_call_in_a_shard_is_as_in_order():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return fdp.dp_apply(lambda w, x: torch.rand(len(x), 3), w, x, fdp.virtual_devices(2), seed=3)

    for _ in range(20):
        torch.testing.assert_close(threads(fn, X[0], X), fdp.dp_apply(fn, X[0], X, fdp.virtual_devices(4)))


def test_functions_that_had_to_run_again_run_in_order_from_then_on():
    used = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        used.append(threading.get_ident())
        return torch.rand(len(x)) if torch.get_rng_state() is not None else x

    threads(fn, X[0], X)
    used.clear()
    threads(fn, X[0], X)
    assert used == [threading.get_ident()] * 4


@pytest.mark.parametrize("look", [lambda: torch.get_rng_state(), lambda: torch.manual_seed(0)], ids=["get", "seed"])
def test_a_shard_that_looks_at_the_random_state_goes_on_alone(look: Callable[[], Any]):
    """What it did before, with effects or without, it has done once."""
    lock, state, inside, most = threading.Lock(), fdp.replicate(torch.zeros(3), fdp.virtual_devices(4)), 0, 0

    def step(state: torch.Tensor) -> torch.Tensor:
        nonlocal inside, most
        state.add_(1)
        look()
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.01)
        with lock:
            inside -= 1
        return state

    with side_by_side(4):
        for _ in range(2):  # then one after the other from the beginning
            fdp.parallel_apply(step, state, executor="threads")
    assert most == 1
    assert all(shard.tolist() == [2, 2, 2] for shard in state.shards)


def test_shards_that_look_and_shards_that_do_not():
    """Those that look go on when no other runs, and what has ended before is not lost."""
    running, seen, lock = set[int](), [], threading.Lock()

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        number = int(x[0, 0])
        with lock:
            running.add(number)
        time.sleep(0.002)
        if number % 3 == 1:
            torch.get_rng_state()
            with lock:
                seen.append(running - {number} - waiting)
        with lock:
            running.discard(number)
        return x

    waiting = {1, 4, 7, 10}
    x = torch.arange(12.0)[:, None]
    with side_by_side(4):
        assert torch.equal(fdp.dp_apply(fn, X[0], x, fdp.virtual_devices(12), executor="threads"), x)
    assert seen == [set()] * 4


def test_a_shard_of_a_shard_looks_when_no_other_runs():
    inside: set[tuple[int, int]] = set()
    lock, most = threading.Lock(), 0

    def inner(outer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        torch.get_rng_state()
        with lock:
            inside.add((int(outer), int(x[0, 0])))
            most = max(most, len(inside))
        time.sleep(0.002)
        with lock:
            inside.discard((int(outer), int(x[0, 0])))
        return x

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(inner, x[0, 0], x, fdp.virtual_devices(2), executor="threads")

    x = torch.arange(8.0)[:, None]
    with side_by_side(8):
        assert torch.equal(fdp.dp_apply(outer, X[0], x, fdp.virtual_devices(4), executor="threads"), x)
    assert most == 1


@pytest.mark.parametrize("kind", ["dp_apply", "nested", "grad"])
def test_a_call_that_begins_anew_draws_as_in_order(kind: str):
    """From the first call on, and whatever the shards had drawn before one of them looked."""

    def drawing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(x), 3, dtype=torch.float64)
        return checkpoint(lambda w, x: DROPOUT(w * x) * noise, w, x, use_reentrant=False)

    def call(executor: Any) -> Any:
        torch.manual_seed(3)
        devices, w = fdp.virtual_devices(4), torch.ones(3, dtype=torch.float64)
        if kind == "dp_apply":
            found = fdp.dp_apply(drawing, w, X, devices, executor=executor)
        elif kind == "nested":
            inner = functools.partial(fdp.dp_apply, drawing, devices=devices[:2], executor=executor)
            found = fdp.dp_apply(inner, w, X, devices, executor=executor)
        else:
            found = fdp.grad(lambda w, x: drawing(w, x).sum(), devices=devices, executor=executor)(w, X)
        return found, torch.get_rng_state()

    with side_by_side(4):
        first, second = call("threads"), call("threads")
    torch.testing.assert_close(first, call("sequential"), rtol=0, atol=0)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_nobody_sees_that_a_call_began_anew():
    """A failure is the only one in its chain, and a function may catch whatever it likes."""

    def failing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        finally:
            raise ValueError(f"inside {int(x[0, 0])}")

    def catching(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        except BaseException:
            return x * 0
        return x

    x = torch.arange(8.0)[:, None]
    with side_by_side(4):
        with pytest.raises(ValueError, match=r"^inside 0") as caught:
            threads(failing, X[0], x)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None
        assert torch.equal(threads(catching, X[0], x), x)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_cached_parametrizations(place: str, executor: Any):
    torch.manual_seed(0)
    module = parametrizations.weight_norm(nn.Linear(3, 3)).double()
    apply, (params, _) = fdp.functional(module)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if place == "inside" else contextlib.nullcontext():
            return apply((params, {}), x)[0].sin().mean()

    call = fdp.grad(loss, devices=fdp.virtual_devices(4), executor=executor)
    want = [grad(loss)({name: p * k for name, p in params.items()}, X) for k in (1, 2)]
    for _ in range(10):
        with parametrize.cached() if place == "around" else contextlib.nullcontext():
            got = [call({name: p * k for name, p in params.items()}, X) for k in (1, 2)]
        torch.testing.assert_close(got, want)


def test_threads_that_a_shard_starts_may_look_too():
    """They have its context; some come when it has ended."""
    late = []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def look() -> None:
            torch.get_rng_state()

        started = [threading.Thread(target=contextvars.copy_context().run, args=(look,)) for _ in range(3)]
        for thread in started:
            thread.start()
        torch.get_rng_state()
        for thread in started:
            thread.join()
        late.append(contextvars.copy_context())
        return x

    with side_by_side(4):
        assert torch.equal(fdp.dp_apply(fn, X[0], X, fdp.virtual_devices(4), executor="threads"), X)
    for context in late:
        context.run(torch.get_rng_state)


def test_a_function_that_closes_over_an_object_with_attributes_of_its_own():
    """Only functions are asked for their code."""

    class Mapping:
        def __getattr__(self, name: str) -> Any:
            return {"scale": 2.0}[name]

    kept = Mapping()

    def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.get_rng_state()
        return x * w * kept.scale

    w, x = torch.tensor(3.0), torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(fdp.dp_apply(checkpointed, w, x, fdp.virtual_devices(2), executor="threads"), x * 6)
