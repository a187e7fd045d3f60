"""`Batches.loader`: rows, collated, with augmentation that knows the step and the row only."""

import multiprocessing
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

import fdp
from tests.common.comparing import assert_same_tree
from tests.distributed.pool import prepared

BATCHES = fdp.Batches(23, 6, seed=1)
FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}


class Drawn(Dataset[Any]):
    """Rows with all that a dataset may draw."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, row: int) -> Any:
        return row, torch.rand(2), torch.randn(()), random.random(), np.random.rand()


class AtOnce(Drawn):
    """The same, and several rows at once, which draw something else."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        torch.rand(())
        return [self[row] for row in rows]


@pytest.fixture(scope="module")
def drawn() -> list[Any]:
    """What an undisturbed run in one process has, ten steps long."""
    return list(BATCHES.loader(Drawn(), steps=10))


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, list(keys), rest


# ---- rows


def test_rows_are_those_of_the_steps():
    x = torch.arange(23.0)
    loader = BATCHES.loader(TensorDataset(x, -x), start=2, steps=4)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 4
    for _ in range(2):  # each iteration begins again
        found = list(loader)
        assert_same_tree(found, [(x[BATCHES[step]], -x[BATCHES[step]]) for step in range(2, 6)])


def test_without_an_end():
    loader = BATCHES.loader(torch.arange(23))
    found = [next(rows) for rows in [iter(loader)] for _ in range(9)]
    assert_same_tree(found, [BATCHES[step] for step in range(9)])
    with pytest.raises(
        TypeError, match=r"this loader has no end, so it has no len; pass steps=\.\.\. to Batches\.loader"
    ):
        len(loader)
    assert list(BATCHES.loader(torch.arange(23), steps=0)) == []


# ---- random numbers


def test_a_sample_is_drawn_from_a_seed_of_its_step_and_row(drawn: list[Any]):
    rows, uniform, normal, *_ = drawn[7]
    for i, row in enumerate(rows.tolist()):
        torch.manual_seed(fdp.fold_in(fdp.fold_in(fdp.fold_in(1, -1), 7), row))
        assert torch.equal(uniform[i], torch.rand(2))
        assert torch.equal(normal[i], torch.randn(()))
    for values in zip(*drawn, strict=True):
        assert len(torch.cat([value.reshape(len(value), -1) for value in values]).unique(dim=0)) >= 23
    assert len(set(torch.cat([batch[4] for batch in drawn]).tolist())) == sum(len(batch[0]) for batch in drawn)


@pytest.mark.parametrize("kind", [Drawn, AtOnce, lambda: Subset(Drawn(), range(23))], ids=["one", "at-once", "subset"])
@pytest.mark.parametrize("start", [0, 5])
def test_draws_do_not_depend_on_workers_or_on_the_start(start: int, kind: Callable[[], Any], drawn: list[Any]):
    torch.manual_seed(start)
    for options in ({}, FORKED):
        assert_same_tree(list(BATCHES.loader(kind(), None, start, 5, **options)), drawn[start : start + 5])


def test_workers_that_are_spawned_and_persist(drawn: list[Any]):
    """They are sent the dataset by pickling."""
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3, "multiprocessing_context": prepared()}
    loader = BATCHES.loader(AtOnce(), start=1, steps=3, num_workers=1, **options)
    for _ in range(2):
        assert_same_tree(list(loader), drawn[1:4])


def test_generators_are_as_before():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    before = generators()
    for options in ({}, FORKED):
        for _ in BATCHES.loader(Drawn(), steps=3, **options):
            assert generators() == before
    assert generators() == before


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt("Ctrl-C")], ids=["error", "interrupt"])
def test_generators_are_as_before_after_a_failure(error: BaseException):
    class Breaks(Drawn):
        def __getitem__(self, row: int) -> Any:
            if row == BATCHES[1][3]:
                raise error
            return super().__getitem__(row)

    before = generators()
    rows = iter(BATCHES.loader(Breaks(), steps=3))
    next(rows)
    with pytest.raises(type(error), match=str(error)) as caught:
        next(rows)
    assert generators() == before
    if isinstance(error, Exception):
        assert caught.value.__notes__ == [f"in row {BATCHES[1][3]} of step 1"]
    assert next(rows)[0].tolist() == BATCHES[2].tolist()  # whoever catches it may go on
    with pytest.raises(StopIteration, match=r"^$"):
        next(rows)


def add_noise(samples: list[Any]) -> Tensor:
    return torch.tensor([row for row, *_ in samples]) + torch.rand(len(samples), dtype=torch.float64)


def test_what_a_collate_fn_draws_does_not_depend_on_workers_or_on_the_start():
    found = list(BATCHES.loader(Drawn(), steps=6, collate_fn=add_noise))
    for options in ({}, FORKED):
        assert_same_tree(list(BATCHES.loader(Drawn(), start=2, steps=4, collate_fn=add_noise, **options)), found[2:])
    assert [batch.long().tolist() for batch in found] == [BATCHES[step].tolist() for step in range(6)]
    assert len(set(torch.cat([batch % 1 for batch in found]).tolist())) == sum(map(len, found))


def test_calls_of_fdp_inside_a_dataset():
    """Draws with a seed, in threads too, need the lock that is held while rows are loaded."""

    class Calls(Drawn):
        def __getitem__(self, row: int) -> Any:
            x = torch.full((4,), float(row))
            options: Any = {"seed": row, "executor": "threads"}
            return fdp.dp_apply(lambda _, x: x + torch.rand(()), None, x, fdp.virtual_devices(2), **options)

    def load() -> None:
        done.append(list(BATCHES.loader(Calls(), steps=2)))

    done: list[Any] = []
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(30)
    assert [len(batch) for batch in done[0]] == [6, 6]


def test_the_default_device_makes_no_difference(drawn: list[Any]):
    rows = [(row, 0.5) for row in range(23)]
    want = list(BATCHES.loader(rows, steps=2))
    torch.set_default_device("meta")
    try:
        for options in ({}, FORKED):
            assert_same_tree(list(BATCHES.loader(rows, steps=2, **options)), want)
    finally:
        torch.set_default_device(None)


# ---- threads and processes


def test_prefetch_of_a_loader_with_workers():
    slots = fdp.virtual_devices(2)
    loader = BATCHES.loader(Drawn(), steps=4, **FORKED)
    for sharded, batch in zip(fdp.prefetch(loader, slots), BATCHES.loader(Drawn(), steps=4), strict=True):
        assert_same_tree(fdp.gather(sharded), batch)


def test_prefetch_of_a_loader_without_workers_is_refused():
    """Its thread would draw from the generators that the training draws from."""
    ahead = fdp.prefetch(BATCHES.loader(Drawn(), steps=4), fdp.virtual_devices(2))
    next(ahead)
    with pytest.raises(
        RuntimeError, match=r"with num_workers=0 rows are loaded in the thread .* Pass num_workers=1 to"
    ):
        next(ahead)


def test_workers_end_with_the_loop():
    before = multiprocessing.active_children()
    for _ in BATCHES.loader(Drawn(), **FORKED):
        assert len(multiprocessing.active_children()) == len(before) + 2
        break
    assert multiprocessing.active_children() == before


def check_worker(number: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset.dataset, Drawn)


def test_options_of_the_loader(drawn: list[Any]):
    loader = BATCHES.loader(Drawn(), steps=2, timeout=30, worker_init_fn=check_worker, in_order=True, **FORKED)
    assert_same_tree(list(loader), drawn[:2])
    assert isinstance(loader.dataset, Dataset)
    assert isinstance(loader.dataset.dataset, Drawn)  # pyright: ignore[reportAttributeAccessIssue]


# ---- collating


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Item:
    x: Any
    label: Any


SAMPLES: dict[str, tuple[Callable[[int], Any], Callable[[Tensor], Any]]] = {
    "pair": (lambda i: (torch.tensor([i, i]), i), lambda rows: (torch.stack([rows, rows], 1), rows)),
    "tensor": (lambda i: torch.tensor(i), lambda rows: rows),
    "number": (lambda i: i / 2, lambda rows: rows.double() / 2),
    "name": (lambda i: (f"row {i}", i), lambda rows: ([f"row {i}" for i in rows], rows)),
    "array": (lambda i: (np.float32(i), np.array([i])), lambda rows: (rows.float(), rows[:, None])),
    "namedtuple": (lambda i: Point(i, (i, i)), lambda rows: Point(rows, (rows, rows))),
    "dataclass": (lambda i: Item(i, None), lambda rows: Item(rows, None)),
    "dict": (lambda i: {"a": (i, [i]), "b": None}, lambda rows: {"a": (rows, [rows]), "b": None}),
    "list": (lambda i: [i, i], lambda rows: [rows, rows]),
    "empty": (lambda i: (i, ()), lambda rows: (rows, ())),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_is_a_tree_like_a_sample(kind: str):
    sample, batch = SAMPLES[kind]
    loader = BATCHES.loader([sample(i) for i in range(23)], start=3, steps=1)
    assert_same_tree(list(loader), [batch(BATCHES[3])])


@pytest.mark.parametrize(
    ("sample", "note"),
    [
        (lambda i: {"x": torch.ones(i)}, r"^as sample\['x'\] of 6 rows; a collate_fn may join them in another way"),
        (lambda i: (i, object()), r"^as sample\[1\] of 6 rows"),
    ],
    ids=["sizes", "object"],
)
def test_samples_that_cannot_be_joined(sample: Callable[[int], Any], note: str):
    with pytest.raises((RuntimeError, TypeError), match=r"equal size|must contain tensors") as caught:
        list(BATCHES.loader([sample(i) for i in range(23)], steps=1))
    assert any(map(re.match, [note] * 3, caught.value.__notes__))


def test_samples_of_different_structure():
    rows = [(i,) if i == BATCHES[0][2] else (i, i) for i in range(23)]
    with pytest.raises(ValueError, match="collate: the samples of a batch have different structures: "):
        list(BATCHES.loader(rows, steps=1))


# ---- what is refused


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class WithoutLength(Dataset[int]):
    def __getitem__(self, row: int) -> int:
        return row


class OnlyAtOnce:
    def __len__(self) -> int:
        return 23

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


ONE_BY_ONE = "expected a dataset with __len__ and __getitem__, got "
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "iterable": (Stream(), {}, TypeError, "Stream gives samples in an order of its own, .* Pass a dataset with"),
    "generator": ((i for i in range(23)), {}, TypeError, "generator gives samples in an order of its"),
    "tensors": (
        *((torch.ones(23), torch.ones(23)), {}, ValueError),
        r"the dataset has 2 rows, and these are batches of n=23\. Of tensors make a TensorDataset, or take x\[batches",
    ),
    "set": (set(range(23)), {}, TypeError, "expected a dataset with .* got set"),
    "no length": (WithoutLength(), {}, TypeError, f"{ONE_BY_ONE}WithoutLength"),
    "only several rows at once": (OnlyAtOnce(), {}, TypeError, f"{ONE_BY_ONE}OnlyAtOnce"),
    "length": (range(20), {}, ValueError, "the dataset has 20 rows, and these are batches of n=23"),
    "batch_size": (range(23), {"batch_size": 6}, TypeError, r"no batch_size.* Pass it to Batches\(n, b"),
    "shuffle": (range(23), {"shuffle": True}, TypeError, r"no shuffle: .* Batches\(n, batch_size, shuf"),
    "drop_last": (range(23), {"drop_last": True}, TypeError, "no drop_last: .* drop_last"),
    "sampler": (range(23), {"sampler": [1]}, TypeError, "no sampler: .* use torch's DataLoader, with"),
    "batch_sampler": (range(23), {"batch_sampler": [[1]]}, TypeError, "no batch_sampler: .* mesh.local"),
    "generator=": (range(23), {"generator": torch.Generator()}, TypeError, "no generator: .* comes from the seed"),
    "in_order": (range(23), {"in_order": False}, TypeError, "in_order=False would take steps in an"),
    "unknown": (range(23), {"workers": 2}, TypeError, "unexpected keyword argument 'workers'"),
    "mesh": (
        *(range(23), {"mesh": fdp.virtual_devices(2)}, TypeError),
        r"mesh must be a mesh of fdp.distributed.init, got tuple\. In one process leave it out",
    ),
    "start": (range(23), {"start": -1}, ValueError, "Batches.loader: start must be at least 0, got -1"),
    "steps": (range(23), {"steps": 1.5}, TypeError, "Batches.loader: steps must be a number of steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    dataset, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        BATCHES.loader(dataset, **options)
