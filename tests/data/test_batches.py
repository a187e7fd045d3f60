"""`Batches`: which rows are the batch of a step."""

import copy
import pickle
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fdp


def rows_of(batches: fdp.Batches, steps: Iterable[int]) -> list[list[int]]:
    return [batches[step].tolist() for step in steps]


def test_the_order_is_that_of_a_permutation_of_the_seed_and_the_epoch():
    """What a program could compute itself."""
    for n in (7, 2000):
        orders = [torch.randperm(n, generator=torch.Generator().manual_seed(fdp.fold_in(5, epoch))) for epoch in (0, 3)]
        batches = fdp.Batches(n, n, seed=5)
        assert torch.equal(batches[0], orders[0])
        assert torch.equal(batches[3], orders[1])


def test_these_rows_in_all_versions_of_torch():
    """If torch changes its `randperm`, no training can be resumed over that change: the docstring has to say so."""
    assert rows_of(fdp.Batches(10, 4, seed=0), [0, 1, 2, 3, 3_000_000]) == GOLDEN


GOLDEN = [[2, 1, 7, 8], [6, 0, 3, 5], [9, 4], [1, 9, 7, 5], [0, 4, 5, 1]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_returned_may_be_written_to(shuffle: bool):
    batches = fdp.Batches(6, 3, shuffle=shuffle)
    rows = batches[0]
    assert (rows.dtype, rows.device.type) == (torch.int64, "cpu")
    before = rows.tolist()
    rows.zero_()
    assert batches[0].tolist() == before


def test_without_shuffling():
    assert rows_of(fdp.Batches(5, 2, shuffle=False), range(4)) == [[0, 1], [2, 3], [4], [0, 1]]


def test_short_last_batches():
    dropped = fdp.Batches(5, 2, drop_last=True, shuffle=False)
    assert len(dropped) == dropped.per_epoch == 2
    assert len(fdp.Batches(5, 2)) == 3
    assert rows_of(dropped, range(3)) == [[0, 1], [2, 3], [0, 1]]
    assert rows_of(fdp.Batches(3, 10, shuffle=False), range(2)) == [[0, 1, 2]] * 2
    assert fdp.Batches(3, 3, drop_last=True).per_epoch == 1


def test_the_program_around_it_makes_no_difference():
    want = rows_of(fdp.Batches(23, 6), range(8))
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    state = torch.get_rng_state()
    try:
        with torch.inference_mode():
            batches = fdp.Batches(23, 6)
            assert rows_of(batches, range(8)) == want
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert not batches[0].is_inference()


def test_threads_see_the_same_rows():
    batches = fdp.Batches(500, 100)
    want = rows_of(fdp.Batches(500, 100), range(40))
    found: dict[int, list[list[int]]] = {}

    def look(number: int) -> None:
        order = range(40) if number % 2 else range(39, -1, -1)
        rows = rows_of(batches, order)
        found[number] = rows if number % 2 else rows[::-1]

    threads = [threading.Thread(target=look, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [want] * 4


def test_it_is_a_value():
    batches = fdp.Batches(23, 6, seed=3)
    assert repr(batches) == "Batches(n=23, batch_size=6, seed=3, shuffle=True, drop_last=False)"
    others = [fdp.Batches(24, 6, seed=3), fdp.Batches(23, 6), fdp.Batches(23, 6, seed=3, shuffle=False)]
    assert all(batches != other for other in others)
    batches[0]
    for again in (fdp.Batches(23, 6, seed=3), pickle.loads(pickle.dumps(batches)), copy.deepcopy(batches)):
        assert again == batches
        assert hash(again) == hash(batches)
        assert torch.equal(again[5], batches[5])
    assert len(pickle.dumps(batches)) < 500  # no order is sent along
    with pytest.raises(AttributeError, match="cannot assign to field 'seed'"):
        batches.seed = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_in_a_tree_it_is_a_leaf():
    batches = fdp.Batches(23, 6)
    batches[0]
    found = fdp.gather(fdp.scatter({"x": torch.ones(4), "batches": batches}, ["cpu", "cpu"]))["batches"]
    assert found is batches


def test_numbers_of_any_kind():
    batches = fdp.Batches(np.int64(23), np.int32(6), seed=np.uint8(3))  # pyright: ignore[reportArgumentType]
    assert batches == fdp.Batches(23, 6, seed=3)
    assert type(batches.n) is int
    assert torch.equal(batches[np.int64(2)], batches[2])  # pyright: ignore[reportArgumentType]
    assert torch.equal(batches[torch.tensor(2)], batches[2])  # pyright: ignore[reportArgumentType]
    assert fdp.Batches(4, 2, seed=-(2**70))[2**70].shape == (2,)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (-1, ValueError, "Batches: step must be at least 0, got -1"),
        (True, TypeError, "Batches: step must be the number of one step, from 0 on, got bool True"),
        (1.0, TypeError, "Batches: step must be .* got float 1.0"),
        (slice(2), TypeError, "Batches: step must be .* got slice"),
        ((0, 1), TypeError, "Batches: step must be .* got tuple"),
        (torch.tensor(True), TypeError, "Batches: step must be .* got Tensor"),
        (torch.arange(2), TypeError, "Batches: step must be .* got Tensor"),
    ],
)
def test_steps_that_are_none(step: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=f"^{message}"):
        fdp.Batches(5, 2)[step]


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((0, 2), {}, ValueError, "Batches: n must be at least 1, got 0"),
    ((-3, 2), {}, ValueError, "Batches: n must be at least 1, got -3"),
    ((5, 0), {}, ValueError, "Batches: batch_size must be at least 1, got 0"),
    (
        (5.0, 2),
        {},
        TypeError,
        r"Batches: n must be the number of rows; of a dataset pass len\(dataset\), got float 5.0",
    ),
    (([1, 2], 2), {}, TypeError, r"Batches: n must be .* pass len\(dataset\), got list"),
    ((torch.ones(5), 2), {}, TypeError, r"Batches: n must be .* pass len\(dataset\), got Tensor"),
    ((5, None), {}, TypeError, "Batches: batch_size must be a number of rows, got NoneType None"),
    ((5, 2), {"seed": None}, TypeError, "Batches: seed must be a whole number, got NoneType None"),
    ((5, 2), {"seed": 0.5}, TypeError, "Batches: seed must be a whole number, got float 0.5"),
    ((5, 6), {"drop_last": True}, ValueError, "Batches: 5 rows are less than one batch of 6, and drop_last=True drops"),
    ((5, 2, 0), {}, TypeError, "takes 3 positional arguments"),
    ((5, 2), {"shuffle": "no"}, TypeError, "Batches: shuffle must be True or False, got 'no'"),
]


@pytest.mark.parametrize("case", range(len(ARGUMENTS)))
def test_arguments_that_fit_nothing(case: int):
    args, options, error, message = ARGUMENTS[case]
    with pytest.raises(error, match=message):
        fdp.Batches(*args, **options)


def test_there_is_no_last_one():
    """A loop over all would never end."""
    batches: Any = fdp.Batches(5, 2)
    with pytest.raises(TypeError, match=r"a Batches has no end, so it is not iterable; batches\[step\] are the rows"):
        list(batches)


def test_inside_of_functions_that_are_transformed_or_only_looked_at():
    """What is kept of an epoch is of use outside too."""
    x = torch.randn(23, dtype=torch.float64)

    def total(_: None, w: Tensor) -> Tensor:
        return w * x[batches[0]].sum()

    want = x[fdp.Batches(23, 6)[0]].sum()
    for around in (
        lambda w: fdp.explain(total, None, w, fdp.virtual_devices(2)),
        torch.vmap(lambda w: total(None, w)),
        lambda w: fdp.dp_apply(total, None, w, fdp.virtual_devices(2), seed=0),
    ):
        batches = fdp.Batches(23, 6)
        around(torch.ones(2))
        torch.testing.assert_close(total(None, torch.ones(())), want)
