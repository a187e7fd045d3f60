"""The recipes of the how-to pages give the numbers of one device, on any slots and processes, and for any rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fdp
from tests.distributed import recipes
from tests.distributed.pool import Pool

SLOTS = (1, 2, 3, 8)
FULL = ([8, 11], [9, 8, 40])  # every slot has rows
ON_MESHES = [1, 2, (1, 3)]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def here(slots: int, fn: Any, *args: Any) -> Any:
    with fdp.distributed.init(devices=fdp.virtual_devices(slots)) as mesh:
        return fn(mesh, *args)


def total(slots: int | tuple[int, ...]) -> int:
    return sum(slots) if isinstance(slots, tuple) else 2 * slots


@pytest.mark.parametrize("rows", [[8, 7, 9], [1, 5, 41], [3]], ids=str)
def test_zero_is_the_whole_optimizer(rows: list[int]):
    for slots in SLOTS:
        same(here(slots, recipes.zero, rows), recipes.zero_on_one_device(rows))


def state_of_zero(mesh: Any) -> tuple[list[int], int]:
    _, state = recipes.recipe("zero").train(mesh, recipes.batches([4]), recipes.start())
    return [part["m"].numel() for part in state.shards], fdp.gather(state, 0, across=True)["v"].numel()


def test_zero_keeps_each_state_once(two: Pool):
    count = sum(p.numel() for p in recipes.start().values())
    assert here(5, state_of_zero) == ([5, 5, 4, 4, 4], count)
    assert two(state_of_zero, (1, 2)) == [([8], count), ([7, 7], count)]


@pytest.mark.parametrize("slots", ON_MESHES, ids=str)
def test_zero_on_two_processes(two: Pool, slots: Any):
    for rows in ([8, 7, 9], [1, 5]):
        for found in two(recipes.zero, slots, rows):
            same(found, recipes.zero_on_one_device(rows))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rows", [[8, 7, 9], [1, 5, 41]], ids=str)
def test_local_sgd_is_a_mean_of_copies(rows: list[int], steps: int):
    for slots in SLOTS:
        same(here(slots, recipes.local_sgd, rows, steps), recipes.local_sgd_by_hand(rows, steps, slots))


@pytest.mark.parametrize("rows", [[8, 7, 9], [1, 5, 41]], ids=str)
def test_local_sgd_with_one_step_is_sgd(rows: list[int]):
    for slots in SLOTS:
        same(here(slots, recipes.local_sgd, rows, 1), recipes.local_sgd_by_hand(rows, 1, 1))


@pytest.mark.parametrize("rows", FULL, ids=str)
def test_diloco_is_torchs_optimizers_on_copies(rows: list[int]):
    for slots in SLOTS:
        same(here(slots, recipes.diloco, rows, 3), recipes.diloco_by_hand(rows, 3, slots))


@pytest.mark.parametrize("slots", ON_MESHES, ids=str)
def test_local_steps_on_two_processes(two: Pool, slots: Any):
    for found in two(recipes.local_sgd, slots, [8, 11], 3):
        same(found, recipes.local_sgd_by_hand([8, 11], 3, total(slots)))
    for found in two(recipes.diloco, slots, [8, 11], 3):
        same(found, recipes.diloco_by_hand([8, 11], 3, total(slots)))


def test_diloco_without_rows_for_a_slot_is_an_error(two: Pool):
    with pytest.raises(ValueError, match="slots"):
        here(4, recipes.diloco, [3], 2)
    for failure in two.outcomes(recipes.diloco, 2, [3], 2):
        assert "slots" in failure.message


def state_of_diloco(mesh: Any) -> Any:
    local_sgd, params = recipes.recipe("local_sgd"), fdp.replicate(recipes.start(), mesh)
    state, momentum = fdp.parallel_apply(local_sgd.begin, params)
    shards = fdp.scatter(mesh.local(recipes.batches([9], 2)[0], in_dims=1), mesh, 1)
    state = fdp.parallel_apply(local_sgd.diloco_round, params, state, momentum, shards)[1]
    return fdp.gather(state, "list", across=True)


def test_the_inner_state_of_all_slots_can_be_gathered(two: Pool):
    expected = here(3, state_of_diloco)
    assert expected["number"] == [2, 2, 2]
    assert len(expected["m"]["w"]) == 3
    for found in two(state_of_diloco, (1, 2)):
        same(found, expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_a_moving_average_is_that_of_one_device(two: Pool, decay: float):
    for rows in ([8, 7, 9], [1, 5, 41]):
        expected = recipes.average_by_formula(rows, decay)
        for slots in SLOTS:
            same(here(slots, recipes.average, rows, decay), expected)
        first, second = two(recipes.average, (1, 3), rows, decay)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        same(first, expected)


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_early_stopping_is_that_of_one_device(two: Pool, patience: int):
    rows: Sequence[int] = [8, 1, 5, 41, 2, 2, 2, 2, 2, 2, 2, 2]
    expected = recipes.stopping_on_one_device(rows, patience)
    assert expected[0] < len(rows)
    for slots in SLOTS:
        same(here(slots, recipes.stopping, rows, patience), expected)
    for found in two(recipes.stopping, (2, 1), rows, patience):
        same(found, expected)


def test_early_stopping_takes_a_nan_for_no_improvement():
    watched, nothing = recipes.recipe("early_stopping").watched, {"best": 1.0, "params": 1, "late": 0}
    watch, is_over = watched(nothing, float("nan"), 2, patience=0)
    assert (watch, is_over) == ({"best": 1.0, "params": 1, "late": 1}, True)
    assert watched(nothing, 0.95, 2, least=0.1)[0]["params"] == 1
    assert watched(nothing, 0.85, 2, least=0.1) == ({"best": 0.85, "params": 2, "late": 0}, False)
