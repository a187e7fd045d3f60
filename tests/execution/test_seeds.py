"""Under `seed=` slot i draws what one device does after `torch.manual_seed(fold_in(seed, i))`; nobody else notices.

All rows are the same: slots differ in what they draw.
"""

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Binomial, Categorical, Dirichlet, Normal, VonMises
from torch.utils.checkpoint import checkpoint

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.common.depth import few
from tests.common.numbers import numbers
from tests.common.threads import side_by_side

Draw = Callable[[Tensor], Tensor]
SLOTS, SEED = fdp.virtual_devices(3), 7
EXECUTORS: Any = ("sequential", "threads")
W, X = torch.tensor(2.0, dtype=torch.float64), numbers(1, 8).expand(6, 8)
each_executor = pytest.mark.parametrize("executor", EXECUTORS)


@pytest.fixture(autouse=True)
def enough_cores() -> Iterator[None]:
    with side_by_side():
        yield


# ---- the table: whatever draws, from rows of 8 numbers to rows of some

RECURRENT = [kind(2, 4, 2, dropout=0.5, batch_first=True).double() for kind in (nn.LSTM, nn.GRU, nn.RNN)]
ATTENTION = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True).double()
ENCODER = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.5, batch_first=True).double()
APPLY, STATE = fdp.functional(nn.Sequential(nn.Linear(8, 8), nn.Dropout()).double())
IN_PLACE = ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "cauchy_", "log_normal_")
DRAWS: dict[str, Draw] = {
    "Dropout": nn.Dropout(),
    "Dropout2d": lambda x: nn.Dropout2d()(x[..., None, None]).flatten(1),
    "functional": lambda x: APPLY(STATE, x)[0],
    "dropout": F.dropout,
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], training=True).flatten(1),
    "gumbel_softmax": F.gumbel_softmax,
    **{net.mode: lambda x, net=net: net(x.reshape(-1, 4, 2))[0].flatten(1) for net in RECURRENT},
    "MultiheadAttention": lambda x: ATTENTION(*[x.reshape(-1, 4, 2)] * 3)[0].flatten(1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(-1, 4, 2)] * 3, dropout_p=0.5).flatten(1),
    "TransformerEncoderLayer": lambda x: ENCODER(x.reshape(-1, 4, 2)).flatten(1),
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(len(x), 3),  # an odd number: a generator keeps the other half of a pair
    "randint": lambda x: torch.randint(1000, x.shape),
    "randperm": lambda x: torch.stack([torch.randperm(8) for _ in x]),
    "normal": lambda x: torch.normal(x, 1.0),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 6),
    "poisson": lambda x: torch.poisson(10 * x.exp()),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    **{name: lambda x, name=name: getattr(torch.empty_like(x), name)() for name in IN_PLACE},
    "Normal": lambda x: Normal(x, 1.0).rsample(),
    "Beta": lambda x: Beta(x.exp(), x.exp()).rsample(),
    "Dirichlet": lambda x: Dirichlet(x.exp()).rsample(),
    "VonMises": lambda x: VonMises(x, x.exp()).sample(),
    "Binomial": lambda x: Binomial(1000, x.sigmoid()).sample(),
    "Categorical": lambda x: Categorical(logits=x).sample(torch.Size([9])).T,
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty_like(x)),
    "a new layer": lambda x: nn.Linear(8, 8, dtype=x.dtype)(x),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def slowly(x: Tensor) -> Tensor:
    time.sleep(1e-3)  # others would draw meanwhile
    return torch.rand_like(x)


# Not one function with a flag: fdp remembers by their code which ones meet.
def plain(draw: Draw) -> Callable[[Any, Tensor], Tensor]:
    return lambda _, x: torch.cat([draw(x), draw(x)], 1)


def meeting(draw: Draw) -> Callable[[Any, Tensor], Tensor]:
    return lambda _, x: torch.cat([draw(x), fdp.psum(W), draw(x)][::2], 1)


each_kind = pytest.mark.parametrize("kind", [plain, meeting])


def alone(fn: Callable[[Any, Tensor], Tensor], seed: int = SEED, parts: Sequence[Tensor] = X.split(2)) -> Tensor:
    """What all slots return, by the law."""
    found = []
    with torch.random.fork_rng(devices=[]):
        for i, part in enumerate(parts):
            torch.manual_seed(fdp.fold_in(seed, i))
            found.append(fn(W, part))
    return torch.cat(found)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Whatever happens inside, the caller's generator is as before."""
    torch.manual_seed(3)
    torch.rand(1)
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 3


parallel_apply: Any = fdp.parallel_apply
value_and_grad: Any = functools.partial(fdp.value_and_grad, devices=SLOTS, has_aux=True, aux_dims=0)
CALLS: dict[str, Callable[..., Any]] = {
    "dp_apply": lambda fn, **options: fdp.dp_apply(fn, W, X, SLOTS, **options),
    "shard_map": lambda fn, **options: fdp.shard_map(fn, devices=SLOTS, in_dims=(None, 0), **options)(W, X),
    "parallel_apply": lambda fn, **options: fdp.gather(parallel_apply(fn, W, fdp.scatter(X, SLOTS), **options), 0),
    "value_and_grad": lambda fn, **options: value_and_grad(lambda w, x: (w, fn(w, x)), **options)(W, X)[0][1],
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# ---- the law


@few(2)
@each_draw
@each_kind
def test_a_slot_draws_what_one_device_would(draw: Draw, kind: Any):
    want = alone(plain(draw))
    assert not any(itertools.starmap(torch.equal, itertools.combinations(want.split(2), 2)))
    with untouched():
        found = [fdp.dp_apply(kind(draw), W, X, SLOTS, seed=SEED, executor=executor) for executor in EXECUTORS * 3]
    assert_same_tree(found, [want] * 6)


@few()
@each_call
@each_kind
@each_executor
def test_so_in_each_call(call: Callable[..., Any], kind: Any, executor: Any):
    with untouched():
        assert_same_tree(call(kind(F.dropout), seed=SEED, executor=executor), alone(plain(F.dropout)))


@few()
@each_draw
@each_executor
@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpoint"])
def test_gradients_are_those_of_what_was_drawn(draw: Draw, executor: Any, again: bool):
    def losses(w: Tensor, x: Tensor) -> Tensor:
        return (plain(draw)(None, w * x).double() * w).square()

    def loss(w: Tensor, x: Tensor) -> Any:
        return (checkpoint(losses, w, x, use_reentrant=False) if again else losses(w, x)).mean()

    def meeting_loss(w: Tensor, x: Tensor) -> Tensor:
        return loss(w, x + 0 * fdp.psum((w * x[:1]).sum())) + 0 * fdp.psum(w)

    w = W.clone().requires_grad_()
    value = alone(lambda _, x: losses(w, x)).mean()
    (grad,) = torch.autograd.grad(value, w)
    options: Any = {"devices": SLOTS, "seed": SEED, "executor": executor}
    with untouched():
        found = [fdp.value_and_grad(fn, **options)(W, X) for fn in (loss, meeting_loss)]
    assert_close_tree(found, [(value, grad)] * 2)


@few(2)
@each_kind
@each_executor
@pytest.mark.parametrize("inner", [plain, meeting])
@pytest.mark.parametrize("seed", [None, 9])
def test_nested(kind: Any, executor: Any, inner: Any, seed: int | None):
    """A seed inside is that of the call inside; without one it draws as the slot does by itself."""

    def draw(x: Tensor, executor: Any = "sequential") -> Tensor:
        drawn = fdp.dp_apply(inner(slowly), W, x, fdp.virtual_devices(2), seed=seed, executor=executor)
        return torch.cat([torch.rand_like(x), drawn, torch.rand_like(x)], 1)  # (rows, 8 + 16 + 8)

    with untouched():
        found = fdp.dp_apply(kind(lambda x: draw(x, executor)), W, X, SLOTS, seed=SEED, executor=executor)
    assert_same_tree(found, alone(plain(draw)))
    if seed is not None:
        assert_same_tree(found[:, 8:24], alone(plain(slowly), seed, X[:2].split(1)).repeat(3, 1))


# ---- who else draws


@few()
@each_call
@each_kind
@each_executor
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_untouched_after_a_failure(call: Callable[..., Any], kind: Any, executor: Any, error: type[BaseException]):
    def draw(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        if fdp.axis_index() == 1:
            raise error("wrong")
        return torch.rand_like(x)

    with untouched(), pytest.raises(error, match="wrong"):
        call(kind(draw), seed=SEED, executor=executor)


def test_callers_at_the_same_time():
    found, started = [], threading.Barrier(4)

    def caller(kind: Any, executor: Any) -> None:
        started.wait(30)
        found.extend(CALLS["dp_apply"](kind(slowly), seed=SEED, executor=executor) for _ in range(10))

    threads = [threading.Thread(target=caller, args=each) for each in itertools.product((plain, meeting), EXECUTORS)]
    with untouched():
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
    assert_same_tree(found, [alone(plain(slowly))] * 40)


@each_executor
def test_a_generator_that_is_passed_in_goes_on_where_it_is(executor: Any):
    passed, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draw: Any = lambda _, x, generator: torch.rand(x.shape, generator=generator)  # noqa: E731
    found = fdp.dp_apply(draw, W, X, SLOTS, kwargs={"generator": passed}, seed=SEED, executor=executor)
    assert_same_tree(found, torch.rand(6, 8, generator=other))
    assert torch.equal(passed.get_state(), other.get_state())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", [True, 1.0, "1", torch.tensor(1), torch.Generator()], ids=type)
def test_only_an_int_is_a_seed(name: str, seed: Any):
    with untouched(), pytest.raises(TypeError, match=rf"^{name}: seed must be an int, got "):
        CALLS[name](plain(torch.rand_like), seed=seed)


@pytest.mark.parametrize("data", [0.5, "7", None], ids=repr)
def test_only_ints_are_folded_in(data: Any):
    with pytest.raises(TypeError, match="integer"):
        fdp.fold_in(0, data)


def test_the_state_of_the_process_is_taken_one_at_a_time():
    """And not by `get_state`: two threads inside of it can wait for each other for ever, if garbage is collected."""
    inside, crowds, started = set[int](), list[int](), threading.Barrier(4)
    names = set[str]()

    def look(_: Any, event: str, builtin: Any) -> None:
        if event.startswith("c_") and getattr(builtin, "__self__", None) is torch.default_generator:
            if event == "c_call":
                names.add(builtin.__name__)
                inside.add(threading.get_ident())
                crowds.append(len(inside))
                time.sleep(0.001)  # others come in, where they can
            else:
                inside.discard(threading.get_ident())

    def caller(kind: Any) -> None:
        started.wait(30)
        sys.setprofile(look)
        CALLS["dp_apply"](kind(torch.rand_like), seed=SEED, executor="sequential")

    threads = [threading.Thread(target=caller, args=[kind]) for kind in (plain, meeting) * 2]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(crowds) >= 8
    assert set(crowds) == {1}
    assert names == {"clone_state"}  # beside `set_state`, which is called from C


# ---- without a seed

MEETS: dict[str, Callable[[Draw, Any], Any]] = {
    "dp_apply": lambda fn, executor: fdp.dp_apply(lambda _, x: fn(x), None, X, SLOTS, executor=executor),
    "shard_map": lambda fn, executor: fdp.shard_map(fn, devices=SLOTS, executor=executor)(X),
    "grad": lambda fn, executor: fdp.grad(lambda w, x: fn(w * x).sum(), devices=SLOTS, executor=executor)(W, X),
    "inside a transform": lambda fn, executor: torch.func.vmap(
        fdp.shard_map(fn, devices=SLOTS, executor=executor), randomness="different"
    )(torch.stack([X, X])),
    "inside another": lambda fn, executor: fdp.shard_map(
        lambda x: F.dropout(x) + fdp.shard_map(fn, devices=SLOTS, executor=executor)(x), devices=SLOTS[:2]
    )(X),
}


@pytest.mark.parametrize("call", MEETS.values(), ids=MEETS)
def test_a_seed_of_the_process_repeats_what_slots_draw(call: Callable[[Draw, Any], Any]):
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x) - fdp.psum(x.sum())

    results, states = [], []
    for _ in range(3):
        torch.manual_seed(SEED)
        results.append(call(fn, "sequential"))
        states.append(torch.get_rng_state())
    assert_same_tree(results[1:], results[:1] * 2)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], torch.manual_seed(SEED).get_state())  # the next call draws something else


def test_slots_draw_in_turn_from_the_generator_of_the_process():
    """All before the first collective, in slot order, and then all after it: each draw once."""

    def fn(_: Any, x: Tensor) -> Tensor:
        first = torch.rand(len(x))
        fdp.psum(0)
        return torch.stack([first, torch.rand(len(x))], 1)

    torch.manual_seed(SEED)
    found = fdp.dp_apply(fn, None, X, SLOTS)
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    firsts, seconds = ([torch.rand(2) for _ in SLOTS] for _ in range(2))
    assert_same_tree(found, torch.stack([torch.cat(firsts), torch.cat(seconds)], 1))
    assert torch.equal(state, torch.get_rng_state())
