"""Loaders of `Batches` in several processes: each has its rows, some have none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, assert_same_tree
from tests.distributed.pool import Pool

BATCHES = fdp.Batches(10, 3, seed=2)  # the last batch of an epoch has one row


class Noisy:
    """Pairs, with noise."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return row + torch.rand(2, dtype=torch.float64), row


def sample_of(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "names": "all"}


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((F.dropout(x, 0.3) @ w - y) ** 2).mean()


def train(mesh: Any, start: int, steps: int, w: Tensor, ahead: bool = False) -> Any:
    """The losses of some steps, the parameters after them, and the rows of this process."""
    losses, rows = [], []
    loader = BATCHES.loader(Noisy(), mesh, start, steps)
    for batch in fdp.prefetch(list(loader), mesh, keep_empty=True) if ahead else loader:
        x, y = batch.unzip() if isinstance(batch, fdp.Sharded) else batch
        rows.append(y if isinstance(y, Tensor) else fdp.gather(y))
        seed = fdp.fold_in(2, start + len(losses))
        value, grad = fdp.value_and_grad(loss, devices=mesh, seed=seed, randomness="rows")(w, x, y)
        losses, w = [*losses, value], w - 0.001 * grad
    return losses, w, rows


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("slots", [(1, 1), (3, 1)])
def test_a_training_has_the_losses_of_one_process(two: Pool, slots: tuple[int, int], ahead: bool):
    w = torch.ones(2, dtype=torch.float64)
    losses, w_after, _ = alone(0, 5, w)
    found = two(train, slots, 0, 5, w, ahead)
    for other_losses, other_w, _ in found:
        assert_close_tree((other_losses, other_w), (losses, w_after))
    for step, parts in enumerate(zip(*(own for *_, own in found), strict=True)):
        assert torch.equal(torch.cat(parts), BATCHES[step])
    assert [len(part) for part in found[1][2]][3] == 0  # and it has taken part


def alone(start: int, steps: int, w: Tensor) -> Any:
    with fdp.distributed.init(devices="cpu") as mesh:
        return train(mesh, start, steps, w)


def test_a_training_goes_on_in_several_processes(two: Pool):
    w = torch.ones(2, dtype=torch.float64)
    undisturbed, w_after, _ = alone(0, 9, w)
    first, w_between, _ = alone(0, 4, w)
    for losses, w_elsewhere, _ in two(train, (1, 3), 4, 5, w_between):
        assert_close_tree(([*first, *losses], w_elsewhere), (undisturbed, w_after))
    assert len({loss.item() for loss in undisturbed}) == 9


def one_row(mesh: Any, collate_fn: Any) -> Any:
    try:
        return next(iter(BATCHES.loader(Noisy(), mesh, 3, 1, collate_fn=collate_fn)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def columns(samples: list[Any]) -> Tensor:
    return torch.stack([x for x, _ in samples], 1)


def test_batches_of_no_rows(two: Pool):
    first, second = two(one_row, 1, None)
    assert_same_tree(first, one_row(None, None))
    assert_same_tree(second, (first[0][:0], first[1][:0]))
    first, second = two(one_row, 1, sample_of)
    assert_same_tree(first, one_row(None, sample_of))
    assert_same_tree(second, {"x": first["x"][:0], "names": "all"})


def test_a_batch_of_no_rows_that_cannot_be_made(two: Pool):
    _, error = two(one_row, 1, columns)
    assert error.startswith(
        "ValueError: Batches.loader: this process has no rows at this step, and a batch of none can"
    )
    assert "one row gave shape (2, 1), two rows (2, 2). Pass Batches drop_last=True or a larger batch_size" in error
