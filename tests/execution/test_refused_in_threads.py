"""What needs the process to itself is refused in shards that run side by side, whatever it is inside of."""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fdp
from tests.execution.side_by_side import X, threads

pytestmark = pytest.mark.usefixtures("switching")
REFUSED = r"^executor='threads': the function calls "
DROPOUT = nn.Dropout(0.5)


def checkpointed(w: torch.Tensor, x: torch.Tensor, keeps: bool = True) -> torch.Tensor:
    return checkpoint(lambda w, x: DROPOUT(w * x).sin(), w, x, use_reentrant=False, preserve_rng_state=keeps)


def drawing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def seeded(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fdp.dp_apply(drawing, w, x, fdp.virtual_devices(2), seed=3)


def looking(look: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    return lambda w, x: (look(), w * x)[1]


CLOSING: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
CLOSING[1].register_forward_hook(lambda _, args, out: out * CLOSING[0].bias.sum())


def in_place(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(CLOSING, dict(CLOSING.named_parameters()), (w * x,))


STATE = torch.get_rng_state()
LOOKS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "manual_seed": (looking(lambda: torch.manual_seed(3)), r"torch\.manual_seed"),
    "random.manual_seed": (looking(lambda: torch.random.manual_seed(3)), r"torch\.manual_seed"),
    "seed": (looking(lambda: torch.seed()), r"torch\.seed"),
    "get_rng_state": (looking(lambda: torch.get_rng_state()), r"torch\.get_rng_state"),
    "random.get_rng_state": (looking(lambda: torch.random.get_rng_state()), r"torch\.get_rng_state"),
    "set_rng_state": (looking(lambda: torch.set_rng_state(STATE)), r"torch\.set_rng_state"),
    "fork_rng": (looking(lambda: torch.random.fork_rng(devices=[]).__enter__()), r"torch\.get_rng_state"),
    "checkpoint": (checkpointed, r"torch\.get_rng_state.*for torch\.utils\.checkpoint, preserve_rng_state=False does"),
    "a module in place": (in_place, "a module that can only be called in place.*remove what leads back"),
    "a seed inside": (seeded, "another one with a seed"),
    "in a call inside": (
        lambda w, x: fdp.dp_apply(looking(lambda: torch.get_rng_state()), w, x, fdp.virtual_devices(2)),
        r"torch\.get_rng_state",
    ),
}
DEVICES = fdp.virtual_devices(4)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "dp_apply": lambda fn, executor: fdp.dp_apply(fn, X[0], X, DEVICES, executor=executor),
    "parallel_apply": lambda fn, executor: fdp.parallel_apply(fn, X[0], fdp.scatter(X, DEVICES), executor=executor),
    "grad": lambda fn, executor: fdp.grad(lambda w, x: fn(w, x).mean(), devices=DEVICES, executor=executor)(X[0], X),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.filterwarnings("ignore:Calls of this Sequential run on the module itself:UserWarning")
@each_call
@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_the_generator(name: str, call: Callable[[Any, Any], Any]):
    fn, said = LOOKS[name]
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=REFUSED + said):
        call(fn, "threads")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        call(fn, "sequential")


@each_call
def test_a_checkpoint_that_does_not_look(call: Callable[[Any, Any], Any]):
    """And draws nothing."""

    def saved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda w, x: (w * x).sin(), w, x, use_reentrant=False, preserve_rng_state=False)

    def plain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x).sin()

    found, want = call(saved, "threads"), call(plain, "threads")
    if call is CALLS["parallel_apply"]:
        found, want = found.shards, want.shards
    torch.testing.assert_close(found, want)


def test_what_was_done_before_is_done_once():
    """Nothing is run again."""
    state = fdp.replicate(torch.zeros(3), DEVICES)

    def step(state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        torch.get_rng_state()
        return state.add_(1)

    with pytest.raises(RuntimeError, match=REFUSED):
        fdp.parallel_apply(step, state, executor="threads")
    assert all(shard.tolist() == [1, 1, 1] for shard in state.shards)


def test_a_function_may_catch_it():
    def catching(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        except RuntimeError:
            return -x
        return x

    def failing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.get_rng_state()
        finally:
            raise ValueError(f"inside {int(x[0, 0])}")

    x = torch.arange(8.0)[:, None]
    assert torch.equal(threads(catching, X[0], x), -x)
    with pytest.raises(ValueError, match=r"^inside 0") as caught:
        threads(failing, X[0], x)
    assert str(caught.value.__context__).startswith("executor='threads'")


def test_draws_of_a_seeded_call_and_its_checkpoints_are_in_order():
    """Which is refused nowhere: seeded shards take turns."""

    def call(executor: Any) -> Any:
        options: Any = {"devices": DEVICES, "executor": executor, "seed": 3}
        return fdp.value_and_grad(lambda w, x: checkpointed(w, x).mean(), **options)(X[0], X)

    torch.testing.assert_close(call("threads"), call("sequential"), rtol=0, atol=0)


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
    around = parametrize.cached() if place == "around" else contextlib.nullcontext()
    with (
        around,
        pytest.raises(RuntimeError, match=r"inside torch\.nn\.utils\.parametrize\.cached\(\), whose cache"),
    ):
        call(params, X)


def test_threads_that_a_shard_starts():
    """They have its context, and so it is refused there too; and in what is left of it, when the shard has ended."""
    refused, late = [], []

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def look() -> None:
            with pytest.raises(RuntimeError, match=REFUSED):
                torch.get_rng_state()
            refused.append(1)

        started = [threading.Thread(target=contextvars.copy_context().run, args=(look,)) for _ in range(3)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        late.append(threading.Thread(target=torch.get_rng_state))  # with no context of the shard
        return x

    assert torch.equal(fdp.dp_apply(fn, X[0], X, DEVICES, executor="threads"), X)
    assert len(refused) == 12
    for thread in late:
        thread.start()
        thread.join()
