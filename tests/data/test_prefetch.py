"""`prefetch`: batches as `scatter` splits them, loaded ahead by a thread that always ends."""

import gc
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fdp
from tests.common.comparing import assert_same_tree
from tests.common.numbers import numbers
from tests.common.programs import run_program

SLOTS = fdp.virtual_devices(3)
WAIT = 30  # seconds, for what is to come at once


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if threads():  # a generator that is open still
        gc.collect()
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fdp-prefetch"]


def ones(count: int, rows: int = 4) -> Iterator[Tensor]:
    return (torch.full((rows,), float(i)) for i in range(count))


def assert_same_batches(got: list[fdp.Sharded], want: list[fdp.Sharded]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.devices, a.sizes, a.dims) == (b.devices, b.sizes, b.dims)
        assert_same_tree(a.shards, b.shards)


# ---- the law


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [[], [6], [6, 6, 1], [7, 0, 2, 3, 1, 5]], ids=str)
def test_batches_are_those_of_scatter(rows: list[int], size: int):
    batches = [(numbers(n, 2), {"y": numbers(n)}) for n in rows]
    assert_same_batches(list(fdp.prefetch(batches, SLOTS, size=size)), [fdp.scatter(b, SLOTS) for b in batches])


def test_options_are_those_of_scatter():
    batches = [numbers(2, 9), numbers(2, 1)]
    options: dict[str, Any] = {"in_dims": 1, "weights": [1, 0, 2], "keep_empty": True}
    got = list(fdp.prefetch(batches, SLOTS, **options))
    assert_same_batches(got, [fdp.scatter(batch, SLOTS, **options) for batch in batches])
    assert [sharded.sizes for sharded in got] == [(3, 0, 6), (0, 0, 1)]


def test_batches_go_into_calls():
    w = numbers(3)
    batches = [numbers(n, 3) for n in (7, 2, 5)]
    step = fdp.value_and_grad(lambda w, x: (x @ w).square().mean())
    for sharded, x in zip(fdp.prefetch(batches, SLOTS), batches, strict=True):
        torch.testing.assert_close(fdp.dp_apply(lambda w, x: x @ w, w, sharded), x @ w)
        sums = fdp.parallel_apply(lambda x: x.sum(), sharded)
        assert isinstance(sums, fdp.Sharded)
        torch.testing.assert_close(sum(sums.shards), x.sum())
        grad, value = torch.func.grad_and_value(lambda w, x=x: (x @ w).square().mean())(w)
        torch.testing.assert_close(step(w, sharded), (value, grad))


# ---- ahead


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_many_ahead_as_it_says_and_no_more(size: int):
    loaded = [threading.Event() for _ in range(10)]

    def load() -> Iterator[Tensor]:
        for event in loaded:
            event.set()
            yield torch.ones(3)

    with_prefetch = fdp.prefetch(load(), SLOTS, size=size)
    assert not loaded[0].is_set()
    for i, _ in enumerate(itertools.islice(with_prefetch, 10 - size - 1)):
        assert loaded[i + size].wait(WAIT)  # while the consumer holds batch i
        assert not loaded[i + size + 1].wait(0.02)
    with_prefetch.close()


# ---- exceptions


@pytest.mark.parametrize("at", [0, 1, 2, 4])
@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_of_the_loader_comes_in_its_place(error: BaseException, at: int):
    def load() -> Iterator[Tensor]:
        yield from ones(at)
        raise error

    batches = fdp.prefetch(load(), SLOTS)
    for i in range(at):
        assert fdp.gather(next(batches))[0] == i
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert list(batches) == []


def test_what_scatter_raises_comes_in_its_place():
    batches = fdp.prefetch([torch.ones(3), {"a": torch.ones(3), "b": torch.ones(4)}, torch.ones(3)], SLOTS)
    next(batches)
    with pytest.raises(ValueError, match=r"scatter: rows differ: tree\['a'\] has 3 along dim 0, tree\['b'\] has 4"):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize("error", [RuntimeError("of the step"), KeyboardInterrupt()], ids=repr)
def test_an_exception_in_the_loop_ends_the_thread(error: BaseException):
    def train() -> None:
        for _ in fdp.prefetch(ones(100), SLOTS):
            raise error

    with pytest.raises(type(error)) as caught:
        train()
    del caught  # the traceback holds the loop's generator
    if threads():  # a generator that is open still
        gc.collect()
    assert threads() == []


def test_an_early_end():
    for _ in fdp.prefetch(ones(100), SLOTS):
        break
    assert threads() == []
    batches = fdp.prefetch(ones(100), SLOTS)
    next(batches)
    assert len(threads()) == 1
    batches.close()
    assert threads() == []
    assert list(batches) == []


def test_garbage():
    closed: list[bool] = []

    def load() -> Iterator[Tensor]:
        try:
            yield from ones(100)
        finally:
            closed.append(True)

    batches = fdp.prefetch(load(), SLOTS)
    next(batches)
    del batches
    gc.collect()
    assert threads() == []
    assert closed == [True]


def test_nothing_begins_before_the_first_batch_is_asked_for():
    batches = fdp.prefetch(ones(3), SLOTS)
    assert threads() == []
    del batches


@pytest.mark.parametrize("garbage", ["unfreeze", "freeze"])
@pytest.mark.parametrize("seconds", [0, 0.3], ids=["fast", "slow"])
def test_a_program_that_ends_with_a_generator_open(seconds: float, garbage: str):
    """Also one that has told Python not to look for garbage in what is imported, so that it is cleared later."""
    program = f"""
import gc, itertools, time, torch, fdp
gc.{garbage}()

def load():
    for i in itertools.count():
        time.sleep({seconds} * (i > 0))
        yield torch.full((4,), float(i))

batches = fdp.prefetch(load(), fdp.virtual_devices(2))
next(batches)
print("done")
"""
    done = run_program(program, WAIT * 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- DataLoader


def rows_of(batches: Any) -> list[list[float]]:
    return [fdp.gather(batch)[0].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(workers: int):
    def load(seed: int) -> DataLoader[Any]:
        torch.manual_seed(seed)
        context = "fork" if workers else None
        data = TensorDataset(torch.arange(23.0))
        return DataLoader(data, 5, shuffle=True, num_workers=workers, multiprocessing_context=context)

    plain = [batch[0].tolist() for batch in load(0)]
    after = torch.rand(1)
    assert rows_of(fdp.prefetch(load(0), SLOTS)) == plain
    assert torch.equal(torch.rand(1), after)  # as many draws from the default generator
    assert rows_of(fdp.prefetch(load(1), SLOTS)) != plain
    for _ in fdp.prefetch(load(0), SLOTS):
        break


def test_a_loader_twice():
    load = DataLoader(TensorDataset(torch.arange(6.0)), 4)
    for _ in range(2):
        assert rows_of(fdp.prefetch(load, SLOTS)) == [[0, 1, 2, 3], [4, 5]]


def test_the_first_batch_draws_in_the_callers_thread():
    where: list[int] = []

    def load() -> Iterator[Tensor]:
        for _ in range(3):
            where.append(threading.get_ident())
            yield torch.rand(4)

    torch.manual_seed(0)
    want = torch.rand(4)
    torch.manual_seed(0)
    batches = fdp.prefetch(load(), SLOTS)
    assert torch.equal(fdp.gather(next(batches)), want)
    list(batches)
    assert where[0] == threading.get_ident()
    assert where[1] == where[2] != where[0]


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu")], ids=range(4)
)
def test_modes_of_the_caller_hold_in_the_thread(mode: Callable[[], Any]):
    def state() -> Any:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    seen: list[Any] = []

    def load() -> Iterator[Tensor]:
        for _ in range(3):
            seen.append(state())
            yield torch.ones(3)

    with mode():
        list(fdp.prefetch(load(), SLOTS))
        assert seen == [state()] * 3


# ---- messages


NOT_BATCHES = "expected batches to iterate over, got "
REFUSED: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    *(
        ([], SLOTS, {"size": size}, ValueError, f"size must be a positive number of batches, got {size!r}")
        for size in (0, -1, 1.5, True, None, "2")
    ),
    (3, SLOTS, {}, TypeError, f"{NOT_BATCHES}int"),
    (TensorDataset(torch.ones(3)), SLOTS, {}, TypeError, f"{NOT_BATCHES}TensorDataset"),
    ("abc", SLOTS, {}, TypeError, f"{NOT_BATCHES}str"),
    ({"x": torch.ones(3)}, SLOTS, {}, TypeError, r".*got dict; \[batch\] is a list of one batch"),
    (fdp.scatter(torch.ones(3), SLOTS), SLOTS, {}, TypeError, r".*got Sharded; \[batch\] is a list of one batch"),
    ([], ["nowhere"], {}, ValueError, "'nowhere' is no device that torch knows"),
    ([], [], {}, ValueError, "devices is empty"),
    ([], SLOTS, {"weights": [1, 2]}, ValueError, "2 weights for 3 slots"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_mistakes_are_told_at_once(case: int):
    batches, devices, options, error, message = REFUSED[case]
    with pytest.raises(error, match=f"prefetch: {message}"):
        fdp.prefetch(batches, devices, **options)


def test_a_batch_that_is_split_already():
    batch = fdp.scatter(torch.ones(3), SLOTS)
    with pytest.raises(TypeError, match="scatter: the tree is a Sharded already"):
        next(fdp.prefetch([batch], SLOTS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_told():
    batches = fdp.prefetch(iter(numbers(9, 2).split(3)), fdp.virtual_devices(2))
    next(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        child = os.fork()
    if child == 0:
        try:
            next(batches)
        except RuntimeError as error:
            os._exit(7 if "another process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(batches)) == 2
