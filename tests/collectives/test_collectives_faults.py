"""Shards that do not come to a collective: nobody waits for ever, and the error says who has not come and why."""

import contextlib
import gc
import re
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from fdp._execution import function_traits
from tests.common.threads import side_by_side, within

SLOTS = 3
EXECUTORS = ("sequential", "threads")
DEVICES = fdp.virtual_devices(SLOTS)
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "psum": fdp.psum,
    "pmean": fdp.pmean,
    "pmax": fdp.pmax,
    "pmin": fdp.pmin,
    "all_gather": lambda x: fdp.all_gather(x, stack=True),
    "psum_scatter": fdp.psum_scatter,
    "all_to_all": lambda x: fdp.all_to_all(x, split_dim=0, concat_dim=1),
    "ppermute": lambda x: fdp.ppermute(x, [(0, 1)]),
}
LINEAR = [name for name in COLLECTIVES if name not in ("pmax", "pmin")]
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_slot = pytest.mark.parametrize("slot", range(SLOTS))
each_name = pytest.mark.parametrize("name", COLLECTIVES)
each_linear = pytest.mark.parametrize("name", LINEAR)
each_run = pytest.mark.parametrize("known", [False, True], ids=["first-run", "known"])
first_run = pytest.mark.parametrize("known", [False], ids=["first-run"])


class OddError(Exception):
    """That of the user."""


def works(executor: Any) -> None:
    """The next call does, forward and backward."""
    within(20, lambda: _works(executor))


def _works(executor: Any) -> None:
    w = torch.ones((), requires_grad=True)
    out = fdp.dp_apply(lambda w, x: fdp.psum((w * x).sum()) * x, w, torch.ones(SLOTS), DEVICES, executor=executor)
    out.sum().backward()
    assert torch.equal(out, torch.full((SLOTS,), float(SLOTS)))
    assert w.grad == SLOTS**2


def call(fn: Callable[[int, Tensor], Any], executor: Any, known: bool = True, **options: Any) -> Any:
    """Run a function of the slot's number and a tensor; `known`: that its shards meet."""

    def body(w: Tensor, x: Tensor) -> Any:
        return fn(fdp.axis_index(), w * x)

    if known:
        function_traits.remember_together(body)
    else:
        function_traits._TOGETHER.clear()
    w, x = torch.ones((), requires_grad=True), torch.ones(SLOTS, 3, 2)

    def run() -> Any:
        return fdp.dp_apply(body, w, x, DEVICES, executor=executor, out_dims="list", **options)

    return within(20, run)


def argument(x: Tensor) -> Tensor:
    return x.sum(0)


# ---------------------------------------------------------------- forward


@each_run
@each_executor
@each_slot
@each_name
def test_one_raises(name: str, slot: int, executor: Any, known: bool):
    raised: list[OddError] = []

    def fn(i: int, x: Tensor) -> Tensor:
        if i == slot:
            raised.append(OddError("wrong"))
            raise raised[-1]
        return COLLECTIVES[name](argument(x))

    with pytest.raises(OddError, match=r"^wrong") as caught:
        call(fn, executor, known)
    assert caught.value is raised[-1]
    notes = caught.value.__notes__
    assert notes[0] == f"in shard {slot} of 3, rows {slot}:{slot + 1}, on cpu"
    assert len(notes) == SLOTS
    for note in notes[1:]:
        assert re.search(f"{name} in shard .* waits for .*shard {slot}, which has raised OddError: wrong", note)
    works(executor)


@each_executor
@each_slot
@each_name
def test_one_raises_afterwards(name: str, slot: int, executor: Any):
    """Between two collectives."""

    def fn(i: int, x: Tensor) -> Tensor:
        COLLECTIVES[name](argument(x))
        if i == slot:
            raise OddError("wrong")
        return COLLECTIVES[name](argument(x))

    with pytest.raises(OddError, match=r"^wrong"):
        call(fn, executor)
    works(executor)


@each_run
@each_executor
@each_slot
@each_name
def test_one_returns_early(name: str, slot: int, executor: Any, known: bool):
    def fn(i: int, x: Tensor) -> Tensor:
        return x if i == slot else COLLECTIVES[name](argument(x))

    with pytest.raises(RuntimeError, match=f"{name} .*shard {slot}, which has returned"):
        call(fn, executor, known)
    works(executor)


@first_run
@each_executor
@each_slot
@each_name
def test_one_calls_another(name: str, slot: int, executor: Any, known: bool):
    other = "all_gather" if name != "all_gather" else "psum"

    def fn(i: int, x: Tensor) -> Tensor:
        return COLLECTIVES[other if i == slot else name](argument(x))

    with pytest.raises(RuntimeError, match="different collectives") as caught:
        call(fn, executor, known)
    assert f"{other} in shard {slot}" in str(caught.value)
    assert f"{name} in shard {(slot + 1) % SLOTS}" in str(caught.value)
    works(executor)


@first_run
@each_executor
@each_slot
@each_name
def test_one_has_another_shape(name: str, slot: int, executor: Any, known: bool):
    def fn(i: int, x: Tensor) -> Tensor:
        value = argument(x)
        return COLLECTIVES[name](torch.cat([value, value]) if i == slot else value)

    with pytest.raises(ValueError, match=f"{name}.*shard {slot}"):
        call(fn, executor, known)
    works(executor)


@each_executor
@each_slot
@each_name
def test_one_calls_once_more(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        for _ in range(1 + (i == slot)):
            COLLECTIVES[name](argument(x))
        return x

    with pytest.raises(RuntimeError, match=f"{name} in shard {slot} waits for .*, which has returned"):
        call(fn, executor)
    works(executor)


@each_executor
@each_slot
def test_one_catches_the_error_of_a_collective(slot: int, executor: Any):
    """The others do not hang on it."""

    def fn(i: int, x: Tensor) -> Tensor:
        try:
            fdp.psum(argument(torch.cat([x, x], 1) if i == slot else x))
        except (ValueError, RuntimeError):
            if i == slot:
                return x
            raise
        return fdp.psum(x)

    with pytest.raises((ValueError, RuntimeError), match="psum"):
        call(fn, executor)
    works(executor)


@each_executor
def test_all_catch_the_error_and_go_on(executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError, RuntimeError):
            fdp.psum(torch.ones(i + 1))
        return fdp.psum(argument(x))

    with contextlib.suppress(ValueError, RuntimeError):
        for out in call(fn, executor):
            assert torch.equal(out, torch.full((3, 2), 3.0))
    works(executor)


@each_executor
def test_all_fail(executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        fdp.psum(0)
        raise OddError(f"wrong in {i}")

    with pytest.raises(OddError, match="wrong in 0") as caught:
        call(fn, executor)
    assert [note.split(", rows")[0] for note in caught.value.__notes__] == [
        "in shard 0 of 3",
        "also in shard 1 of 3",
        "also in shard 2 of 3",
    ]
    works(executor)


@each_executor
@each_slot
@pytest.mark.parametrize("first", ["value_and_grad", "parallel_apply", "microbatches"])
def test_other_calls(first: str, slot: int, executor: Any):
    error = OddError("wrong")

    def fn(w: Tensor, x: Tensor) -> Tensor:
        fdp.psum(0)
        if fdp.axis_index() == slot:
            raise error
        return fdp.psum((w * x).sum())

    options: Any = {"devices": DEVICES, "executor": executor}
    w, x = torch.ones(()), torch.ones(2 * SLOTS)
    calls: dict[str, Callable[[], Any]] = {
        "value_and_grad": lambda: fdp.value_and_grad(fn, **options)(w, x),
        "parallel_apply": lambda: fdp.parallel_apply(fn, w, fdp.scatter(x, DEVICES), executor=executor),
        "microbatches": lambda: fdp.value_and_grad(fn, microbatches=2, **options)(w, x),
    }
    with pytest.raises(OddError, match=r"^wrong") as caught:
        within(20, calls[first])
    assert caught.value is error
    works(executor)


# ---------------------------------------------------------------- backward


@each_executor
@each_slot
@each_linear
def test_one_raises_in_an_outside_backward(name: str, slot: int, executor: Any):
    raised: list[OddError] = []

    def hook(grad: Tensor) -> None:
        raised.append(OddError("wrong"))
        raise raised[-1]

    def fn(i: int, x: Tensor) -> Tensor:
        out = COLLECTIVES[name](argument(x)) * 1
        if i == slot:
            out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    total = torch.stack([out.sum() for out in outs]).sum()
    with pytest.raises(OddError, match=r"^wrong") as caught:
        within(20, total.backward)
    assert caught.value is raised[-1]
    works(executor)


@each_executor
@each_slot
@each_linear
def test_one_raises_in_a_backward_inside(name: str, slot: int, executor: Any):
    error = OddError("wrong")

    def hook(grad: Tensor) -> None:
        raise error

    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own)) * 1
        if i == slot:
            out.register_hook(hook)
        return torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(OddError, match=r"^wrong") as caught:
        call(fn, executor)
    assert caught.value is error
    works(executor)


@each_executor
@each_slot
@each_linear
def test_one_leaves_out_its_backward(name: str, slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own))
        return x if i == slot else torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match=f"in shard . waits for .*shard {slot}, which has returned"):
        call(fn, executor)
    works(executor)


@each_executor
@each_slot
@each_linear
def test_one_calls_a_collective_meanwhile(name: str, slot: int, executor: Any):
    """One is in its backward while the others are in a forward."""

    def fn(i: int, x: Tensor) -> Any:
        own = x.detach().requires_grad_()
        out = COLLECTIVES[name](argument(own))
        return fdp.psum(x) if i == slot else torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match="waits for shard") as caught:
        call(fn, executor)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"psum in shard {slot} waits for" in text
    assert f"shard {slot}, which waits in psum" in text
    works(executor)


@each_executor
@each_slot
def test_one_calls_another_in_its_backward(slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        out = fdp.psum(argument(x)) * 1

        def hook(grad: Tensor) -> Tensor:
            return fdp.pmax(grad) if i == slot else fdp.psum(grad)

        out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    with pytest.raises(RuntimeError, match=f"different collectives.*pmax in shard {slot}"):
        within(20, torch.stack([out.sum() for out in outs]).sum().backward)
    works(executor)


@each_executor
@each_slot
def test_a_hook_that_changes_the_shape(slot: int, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        out = fdp.psum(argument(own)) * 1
        if i == slot:
            out.register_hook(lambda grad: grad[:1])
        return torch.autograd.grad(out.sum(), own)[0]

    with pytest.raises(RuntimeError, match="changed the size"):
        call(fn, executor)
    works(executor)


@each_executor
def test_a_second_backward_after_one_that_failed(executor: Any):
    fails = [True]

    def fn(i: int, x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> None:
            if fails[0] and i == 1:
                raise OddError("wrong")

        out = fdp.psum(argument(x)) * 1
        out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    total = torch.stack([out.sum() for out in outs]).sum()
    for _ in range(2):
        with pytest.raises(OddError, match="wrong"):
            within(20, lambda: total.backward(retain_graph=True))
    fails[0] = False
    within(20, lambda: total.backward(retain_graph=True))
    within(20, total.backward)
    works(executor)


# ---------------------------------------------------------------- interrupts


@first_run
@each_executor
@each_slot
@each_name
def test_an_interrupt(name: str, slot: int, executor: Any, known: bool):
    error = KeyboardInterrupt()

    def fn(i: int, x: Tensor) -> Tensor:
        fdp.axis_index()
        if i == slot:
            raise error
        return COLLECTIVES[name](argument(x))

    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT011
        call(fn, executor, known)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    works(executor)


@each_executor
@each_slot
def test_an_interrupt_in_a_backward(slot: int, executor: Any):
    def hook(grad: Tensor) -> None:
        raise KeyboardInterrupt

    def fn(i: int, x: Tensor) -> Tensor:
        out = fdp.psum(argument(x)) * 1
        if i == slot:
            out.register_hook(hook)
        return out * 2

    outs = call(fn, executor)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        within(20, torch.stack([out.sum() for out in outs]).sum().backward)
    works(executor)


@each_executor
def test_an_interrupt_of_the_caller(executor: Any):
    """Ctrl-C while the slots exchange: the main thread gets it, and the slots stop."""
    main = threading.main_thread().ident
    assert main is not None
    rounds = [0] * SLOTS

    def fn(w: Any, x: Tensor) -> Tensor:
        i = fdp.axis_index()
        for k in range(3000):  # without an interrupt it ends too
            rounds[i] = k
            if i == 0 and k == 20:
                signal.pthread_kill(main, signal.SIGINT)
            fdp.psum(k)
        return x

    function_traits.remember_together(fn)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fdp.dp_apply(fn, None, torch.ones(SLOTS), DEVICES, executor=executor)
    assert max(rounds) < 2900
    works(executor)


# ---------------------------------------------------------------- time limit


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdp._execution.scheduler.PATIENCE", 0.3)


@each_slot
@each_name
def test_a_slot_that_never_comes(name: str, slot: int, impatient: None):
    done = threading.Event()

    def fn(i: int, x: Tensor) -> Tensor:
        if i == slot:
            done.wait(10)
            return x
        try:
            return COLLECTIVES[name](argument(x))
        except RuntimeError:
            done.set()
            raise

    with pytest.raises(RuntimeError, match=f"{name} in shard .* waits for .*shard {slot}, which has not come"):
        call(fn, "threads")
    assert done.is_set()
    works("threads")


def test_a_slot_that_comes_late(impatient: None):
    """After the others have given up, it gets an error too."""
    gave_up = threading.Event()

    def fn(i: int, x: Tensor) -> Tensor:
        if i == 0:
            gave_up.wait(10)
        try:
            return fdp.psum(argument(x))
        finally:
            gave_up.set()

    with pytest.raises(RuntimeError, match="psum in shard"):
        call(fn, "threads")
    works("threads")


# ---------------------------------------------------------------- what is left


@each_executor
@pytest.mark.parametrize("fault", ["none", "raises", "returns", "other", "shape", "backward", "interrupt"])
def test_no_thread_is_left_over(fault: str, executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        if i == 1:
            if fault == "raises":
                raise OddError
            if fault == "interrupt":
                raise KeyboardInterrupt
            if fault == "returns":
                return x
            if fault == "other":
                return fdp.pmax(x)
            if fault == "shape":
                return fdp.psum(x.sum())
        out = fdp.psum(argument(x)) * 1
        if fault == "backward" and i == 1:
            out.register_hook(lambda grad: 1 / 0)
        return out * 2

    def once() -> None:
        with contextlib.suppress(OddError, RuntimeError, ValueError, ZeroDivisionError, KeyboardInterrupt):
            outs = call(fn, executor)
            within(20, torch.stack([out.sum() for out in outs]).sum().backward)

    once()
    before = threading.active_count()
    for _ in range(15):
        once()
    assert threading.active_count() <= before


@each_executor
@pytest.mark.parametrize("fault", ["none", "raises", "returns", "other", "shape", "interrupt"])
def test_nothing_is_kept(fault: str, executor: Any):
    def once() -> list[weakref.ref[Any]]:
        seen: list[weakref.ref[Any]] = []

        def fn(w: Tensor, x: Tensor) -> Tensor:
            y = w * x.sum()
            seen.append(weakref.ref(y))
            if fdp.axis_index() == 1:
                if fault == "raises":
                    raise OddError
                if fault == "interrupt":
                    raise KeyboardInterrupt
                if fault == "returns":
                    return x
                if fault == "other":
                    return fdp.pmax(y)
                if fault == "shape":
                    return fdp.psum(y.reshape(1))
            return fdp.psum(y) * x

        w, x = torch.ones(()), torch.ones(SLOTS)
        with contextlib.suppress(OddError, RuntimeError, ValueError, KeyboardInterrupt):
            fdp.dp_apply(fn, w, x, DEVICES, executor=executor)
        return [weakref.ref(w), weakref.ref(x), weakref.ref(fn), *seen]

    once()
    gc.collect()
    references = once()
    gc.collect()  # the traceback of an error may be part of a cycle
    assert [reference() for reference in references] == [None] * len(references)


@each_executor
@pytest.mark.parametrize("seed", [None, 3])
def test_the_callers_state_is_as_before(seed: int | None, executor: Any):
    threads, state = torch.get_num_threads(), torch.get_rng_state()

    def fn(i: int, x: Tensor) -> Tensor:
        if seed is not None:
            torch.rand(3)
        fdp.psum(0)
        if i == 1:
            raise OddError("wrong")
        with torch.no_grad():
            return fdp.psum(argument(x))

    with pytest.raises(OddError, match="wrong"):
        call(fn, executor, seed=seed)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(NameError, match="no axis 'data'"):
        fdp.axis_index()


# ---------------------------------------------------------------- many at once


@each_executor
@pytest.mark.parametrize("seed", [None, 3])
def test_many_callers(seed: int | None, executor: Any):
    """Some of them with faults."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        w = torch.tensor(float(number), requires_grad=True)

        def fn(w: Tensor, x: Tensor) -> Tensor:
            if number % 3 == 2 and fdp.axis_index() == number % SLOTS:
                raise OddError(number)
            return fdp.psum((w * x).sum()) * x + fdp.all_gather(w * x).sum()

        try:
            for _ in range(5):
                options: Any = {"executor": executor, "seed": seed}
                if number % 3 == 2:
                    with pytest.raises(OddError, match=str(number)):
                        fdp.dp_apply(fn, w, torch.ones(SLOTS), DEVICES, **options)
                    continue
                out = fdp.dp_apply(fn, w, torch.ones(SLOTS), DEVICES, **options)
                assert torch.equal(out, torch.full((SLOTS,), 2.0 * SLOTS * number))
                (grad,) = torch.autograd.grad(out.sum(), w)
                assert grad == 2 * SLOTS**2
        except BaseException as error:
            errors.append(error)

    def all_at_once() -> None:
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert not any(thread.is_alive() for thread in threads)

    with side_by_side():
        within(45, all_at_once)
    assert not errors
    works(executor)


@each_executor
def test_many_callers_start_no_more_threads_than_they_use(executor: Any):
    def once() -> None:
        threads = [threading.Thread(target=works, args=(executor,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    for _ in range(3):
        once()
    assert sum(thread.name == "fdp-worker" for thread in threading.enumerate()) <= 200
    before = threading.active_count()
    for _ in range(5):
        once()
    assert threading.active_count() <= before + 4 * SLOTS


@each_executor
@pytest.mark.parametrize("inner_executor", EXECUTORS)
@pytest.mark.parametrize("fault", ["none", "outer", "inner", "inner-other", "inner-shape", "early"])
def test_nested(fault: str, inner_executor: Any, executor: Any):
    error = OddError("wrong")

    def fn(i: int, x: Tensor) -> Tensor:
        def inner(w: Any, y: Tensor) -> Tensor:
            j = fdp.axis_index("inner")
            if i == 1 and j == 1:
                if fault == "inner":
                    raise error
                if fault == "inner-other":
                    return fdp.pmax(y, "inner")
                if fault == "inner-shape":
                    return fdp.psum(y.sum(), "inner")
                if fault == "early":
                    return y
            return fdp.psum(y, "inner")

        if fault == "outer" and i == 1:
            raise error
        y = fdp.dp_apply(
            inner, None, torch.ones(2, 2), fdp.virtual_devices(2), executor=inner_executor, axis_name="inner"
        )
        return fdp.psum(y * x.sum())

    if fault == "none":
        assert torch.equal(call(fn, executor)[0], torch.full((2, 2), 36.0))
    else:
        kinds = {"outer": OddError, "inner": OddError, "inner-shape": ValueError}
        with pytest.raises(kinds.get(fault, RuntimeError), match=r"wrong|psum|inner") as caught:
            call(fn, executor)
        if isinstance(caught.value, OddError):
            assert caught.value is error
    works(executor)


@each_executor
def test_nested_in_a_failing_backward(executor: Any):
    def fn(i: int, x: Tensor) -> Tensor:
        def inner(w: Any, y: Tensor) -> Tensor:
            out = fdp.psum(y, "inner") * 1
            if i == 1 and fdp.axis_index("inner") == 0:
                out.register_hook(lambda grad: 1 / 0)
            return out * 2

        y = fdp.dp_apply(inner, None, x[0, :2] * 1, fdp.virtual_devices(2), executor=executor, axis_name="inner")
        return fdp.psum(y)

    outs = call(fn, executor)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        within(20, torch.stack([out.sum() for out in outs]).sum().backward)
    works(executor)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_transform_around_the_first_collective_of_parallel_apply(inside: bool):
    rows = fdp.scatter(torch.arange(4.0), fdp.virtual_devices(2))
    if inside:
        grads: Any = fdp.parallel_apply(torch.func.grad(lambda x: fdp.pmean(x.mean(), weight="rows")), rows)
        assert torch.equal(torch.cat(grads.shards), torch.full((4,), 0.5))
    else:

        def total(w: torch.Tensor) -> Any:
            return fdp.parallel_apply(lambda w, x: fdp.psum((w * x).sum()), w, rows)[0]

        assert torch.func.grad(total)(torch.tensor(2.0)) == 6


@each_executor
@pytest.mark.parametrize("where", ["argument", "captured"])
def test_hooks_of_a_tensor_see_its_gradient_once(where: str, executor: Any):
    c, seen = torch.tensor(3.0, requires_grad=True), []
    c.register_hook(lambda grad: (seen.append(grad.item()), 2 * grad)[1])
    given = c if where == "argument" else None

    def f(w: Any, x: torch.Tensor) -> torch.Tensor:
        return fdp.psum(((c if w is None else w) * x).sum())

    for _ in range(2):
        c.grad = None
        fdp.dp_apply(
            f, given, torch.tensor([1.0, 2.0]), fdp.virtual_devices(2), out_dims=None, executor=executor
        ).backward()
        assert c.grad == 6
    assert seen == [3, 3]


def test_a_function_that_catches_everything_around_its_first_collective():
    def swallows(_: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return fdp.psum(x.sum()) + x
        except:  # noqa: E722
            return x

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"psum: the function catches what is no Exception around its first"):
            fdp.dp_apply(swallows, None, torch.arange(4.0), fdp.virtual_devices(2))


@pytest.mark.parametrize("call", ["dp_apply", "parallel_apply"])
def test_no_more_threads(call: str, monkeypatch: pytest.MonkeyPatch):
    """What the system refuses arrives at the caller, and the next call works."""
    slots = threading.active_count() + 2  # more than there are threads that wait for work
    rows = fdp.scatter(torch.ones(slots), fdp.virtual_devices(slots))

    def run() -> Any:
        if call == "parallel_apply":
            return fdp.parallel_apply(lambda x: fdp.psum(x.sum()), rows)[0]
        return fdp.dp_apply(lambda _, x: fdp.psum(x.sum()), None, rows, out_dims=None)

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run()
    assert run() == slots
