"""Law L16: with `randomness="rows"` each row draws what it draws on one device."""

import re
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fdp
from property_tests.draws import DRAWS, MOVES, Step
from property_tests.strategies import executors, slot_counts, weights

W = torch.linspace(-1, 1, 64, dtype=torch.float64).sin().reshape(8, 8)


def rows(count: int) -> Tensor:
    return torch.linspace(0, 40, count * 48, dtype=torch.float64).cos().reshape(count, 6, 8)


def program(names: list[str]) -> Step:
    """These steps, one after the other; none makes numbers large."""

    def run(w: Tensor, x: Tensor) -> Tensor:
        for name in names:
            x = torch.tanh(DRAWS[name](w, x))
        return x

    return run


def programs() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=3)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@given(programs(), slot_counts(), st.integers(1, 14), st.integers(1, 3), st.integers(-5, 5), executors(), st.data())
def test_l16_gradients(
    names: list[str], slots: int, count: int, pieces: int, seed: int, executor: Any, data: st.DataObject
):
    run = program(names)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return run(w, x).square().mean()

    options: dict[str, Any] = {"seed": seed, "randomness": "rows"}
    want = fdp.value_and_grad(loss, devices="cpu", **options)(W, rows(count))
    split = {"devices": fdp.virtual_devices(slots), "weights": data.draw(weights(slots)), "microbatches": pieces}
    close(fdp.value_and_grad(loss, executor=executor, **split, **options)(W, rows(count)), want)


@given(st.sampled_from(sorted(set(DRAWS) - {"checkpoint"})), slot_counts(), st.integers(1, 14), executors())
def test_l16_values_and_a_backward_afterwards(name: str, slots: int, count: int, executor: Any):
    found = []
    for devices in ("cpu", fdp.virtual_devices(slots)):
        w = W.clone().requires_grad_()
        out = fdp.dp_apply(DRAWS[name], w, rows(count), devices, seed=3, randomness="rows", executor=executor)
        gradient = torch.autograd.grad(out.sum(), w, allow_unused=True)[0] if out.requires_grad else None
        found.append((out, gradient))
    close(*found)


@given(
    st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=2),
    st.sampled_from(sorted(set(DRAWS) - {"checkpoint"})),
    slot_counts(),
    st.integers(1, 14),
)
def test_l16_rows_that_move_are_right_or_refused(moves: list[str], name: str, slots: int, count: int):
    step = DRAWS[name]
    for move in moves:
        step = MOVES[move](step)
    found = []
    for devices in ("cpu", fdp.virtual_devices(slots)):
        try:
            found.append(fdp.dp_apply(step, W, rows(count), devices, seed=3, randomness="rows"))
        except RuntimeError as error:
            if re.search(r"(refused, not followed|Put the rows first)\. .*draw the noise for the", str(error)) is None:
                raise
            found.append(None)
    close(*found)
