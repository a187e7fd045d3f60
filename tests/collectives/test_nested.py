"""Calls inside of calls, with collectives of each axis: right numbers, or an error at once."""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from tests.collectives.cases import each_executor
from tests.common.threads import many_cores, within

LIMIT = 30.0
TWO, THREE = fdp.virtual_devices(2), fdp.virtual_devices(3)
X = torch.arange(12.0, dtype=torch.float64) / 10


def inner(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fdp.shard_map(fn, devices=TWO, axis_name="inner", **options)


def outer(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fdp.shard_map(fn, devices=THREE, **options)


def scaled(x: Tensor) -> Tensor:
    return x * fdp.psum(x.sum(), "inner")


@each_executor
def test_slots_of_calls_inside_meet_where_others_have_not_begun(executor: Any):
    """Slots of a call further out, of which some have begun a call inside, and some have not."""

    def leaf(x: Tensor) -> Tensor:
        return x + fdp.psum(x.sum(), "middle") + fdp.psum(x.sum(), "inner")

    def fn(x: Tensor) -> Tensor:
        fdp.psum(0)
        found = fdp.shard_map(inner(leaf), devices=TWO, axis_name="middle")(x)
        fdp.psum(0)
        return found

    found = within(LIMIT, lambda: fdp.shard_map(fn, devices=TWO, executor=executor)(X[:8]))
    x = X[:8].reshape(2, 2, 2, 1)
    torch.testing.assert_close(found, (x + x.sum((1, 3), keepdim=True) + x.sum((2, 3), keepdim=True)).reshape(-1))


# ---------------------------------------------------------------- what only one thread may have


REFUSED = "^executor='threads': the function calls "
OUTER = r"psum: executor='threads': a collective over axis 'data', which is further out"


@each_executor
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("meets", [True, False])
def test_forward_mode_around_a_call_inside(meets: bool, seed: int | None, executor: Any):
    def fn(x: Tensor) -> Tensor:
        found = torch.func.jvp(inner(scaled, seed=seed), (x,), (torch.ones_like(x),))[1]
        return found + (0 * fdp.psum(x.sum()) if meets else 0)

    if executor == "threads":
        with pytest.raises(RuntimeError, match=REFUSED):
            within(LIMIT, lambda: outer(fn, executor=executor)(X))
        return
    sums = X.reshape(3, 4).sum(1, keepdim=True)
    found = within(LIMIT, lambda: outer(fn, executor=executor)(X))
    torch.testing.assert_close(found, (sums + 4 * X.reshape(3, 4)).reshape(-1))


@each_executor
def test_a_collective_of_the_outer_axis_in_forward_mode_around_a_call_inside(executor: Any):
    def fn(x: Tensor) -> Tensor:
        return torch.func.jvp(inner(lambda x: x * fdp.psum(x.sum())), (x,), (torch.ones_like(x),))[1]

    match = REFUSED if executor == "threads" else "psum: inside forward-mode differentiation"
    with pytest.raises(RuntimeError, match=match):
        within(LIMIT, lambda: outer(fn, executor=executor)(X))


class Hooked(nn.Module):
    """A module that must be called in place, since its hook leads back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_forward_hook(lambda *_: self.look())

    def look(self) -> None:
        self.seen = True

    def forward(self, x: Tensor) -> Tensor:
        return inner(scaled)(x * self.factor)


@pytest.mark.filterwarnings("ignore:Calls of this Hooked run on the module itself:UserWarning")
@each_executor
@pytest.mark.parametrize("seed", [None, 0])
def test_a_call_in_a_module_that_is_called_in_place(seed: int | None, executor: Any):
    module = Hooked()

    def fn(x: Tensor) -> Tensor:
        return fdp.functional_call(module, dict(module.named_parameters()), x)

    match = REFUSED if executor == "threads" and seed is None else "psum: in a module that is called in place"
    with pytest.raises(RuntimeError, match=match):
        within(LIMIT, lambda: outer(fn, executor=executor, seed=seed)(X))


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


@each_executor
def test_a_thread_of_the_users_calls_inside(executor: Any):
    def fn(x: Tensor) -> Tensor:
        y = in_a_thread(lambda: inner(scaled)(x))
        return y + 0 * fdp.psum(y.sum())

    sums = X.reshape(3, 4).sum(1, keepdim=True)
    found = within(LIMIT, lambda: outer(fn, executor=executor)(X))
    torch.testing.assert_close(found, (X.reshape(3, 4) * sums).reshape(-1))


@each_executor
def test_a_thread_of_the_users_meets_nobody_of_the_call_around(executor: Any):
    def fn(x: Tensor) -> Tensor:
        return in_a_thread(lambda: inner(lambda x: x * fdp.psum(x.sum()))(x))

    with pytest.raises(RuntimeError, match=r"^psum: this thread is none of fdp's"):
        within(LIMIT, lambda: outer(fn, executor=executor)(X))


# ---------------------------------------------------------------- nobody waits for ever


def crossed(names: Sequence[str], x: Tensor) -> Tensor:
    """Half of the slots come to the axes in the other order."""
    order = list(names)
    if sum(map(fdp.axis_index, names)) % 2:
        order.reverse()
    for name in order:
        x = fdp.psum(x.sum(), name)
    return x


def crossing(names: Sequence[str], executor: Any) -> Callable[[Tensor], Tensor]:
    fn: Callable[[Tensor], Tensor] = functools.partial(crossed, names)
    for name in reversed(names):
        fn = fdp.shard_map(fn, devices=TWO, axis_name=name, out_dims="sum", executor=executor)
    return fn


@each_executor
@pytest.mark.parametrize("names", [["data", "inner"], ["data", "middle", "inner"]], ids=len)
def test_axes_in_different_orders(names: list[str], executor: Any):
    """The error says in which collectives of which axes the slots wait."""
    with pytest.raises(RuntimeError, match=OUTER if executor == "threads" else "waits for shard") as caught:
        within(LIMIT, lambda: crossing(names, executor)(torch.arange(8.0)))
    if executor == "sequential":
        assert f"psum over '{names[0]}'" in str(caught.value)
        assert f"psum over '{names[-1]}'" in str(caught.value)


@each_executor
def test_a_slot_inside_that_waits_for_one_that_has_ended(executor: Any):
    def fn(x: Tensor) -> Tensor:
        if fdp.axis_index():
            return x
        return inner(lambda x: x + fdp.psum(x.sum()) + fdp.psum(x.sum(), "inner"))(x)

    match = r"psum over 'data' in shard 0 waits for .*shard ., which has returned"
    with pytest.raises(RuntimeError, match=OUTER if executor == "threads" else match):
        within(LIMIT, lambda: outer(fn, executor=executor)(X))


def test_one_that_is_stuck_beside_others_that_run():
    """Each caller is told of its own, and nobody of another's."""
    over = threading.Event()

    def busy(x: Tensor) -> Tensor:
        y = fdp.psum(x.sum())
        over.wait(LIMIT)
        return x + y + inner(lambda x: fdp.psum(x.sum(), "inner"), out_dims="sum")(x)

    found: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(many_cores(12))  # those that are under way have each a core
        others = [threading.Thread(target=lambda: found.append(outer(busy, executor="threads")(X))) for _ in range(2)]
        for other in others:
            other.start()
            stack.callback(other.join)
        stack.callback(over.set)
        for executor in ("sequential", "threads"):
            with pytest.raises(RuntimeError, match=OUTER if executor == "threads" else "waits for shard"):
                within(LIMIT, lambda executor=executor: crossing(["data", "inner"], executor)(torch.arange(8.0)))
        assert not found
    sums = X.reshape(3, 4).sum(1, keepdim=True)
    want = (X.reshape(3, 4) + X.sum() + 2 * sums).reshape(-1)
    torch.testing.assert_close(found, [want, want])
