"""L17: the rows that all processes take at a step are `batches[step]`, and starting at a step equals coming to it."""

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdp
from property_tests.places import cpu_only

pytestmark = cpu_only


def place(rank: int, slots: Sequence[int]) -> fdp.distributed.Mesh:
    """A mesh as one of its processes has it. There are no others: who divides rows needs to know nothing of them."""
    mesh = fdp.distributed.init(devices=fdp.virtual_devices(slots[rank]))
    mesh.rank, mesh.slots = rank, tuple(slots)
    return mesh


class Noisy:
    """Rows with what is drawn for them. `at_once` several rows, which hides where one begins."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        return row, torch.rand(2), random.random(), np.random.normal()


class NoisyAtOnce(Noisy):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Order(NamedTuple):
    """An order of data, and where a run begins in it."""

    batches: fdp.Batches
    start: int
    steps: int


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Batch sizes around the number of rows; starts in the first epochs, at their edges, and far away."""
    n = draw(st.integers(1, 30))
    drop_last = draw(st.booleans())
    sizes = {1, 2, n // 2, n - 1, n, n + 1, 2 * n}
    batch_size = draw(st.sampled_from([size for size in sorted(sizes) if 1 <= size <= (n if drop_last else 2 * n)]))
    seed = draw(st.integers(-(2**65), 2**65))
    batches = fdp.Batches(n, batch_size, seed=seed, shuffle=draw(st.booleans()), drop_last=drop_last)
    edge = batches.per_epoch
    return Order(
        batches, draw(st.sampled_from([0, 1, edge - 1, edge, edge + 1, 3 * edge, 10**12])), draw(st.integers(1, 4))
    )


slots = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(orders())
def test_an_epoch_is_every_row_once(order: Order):
    batches = order.batches
    epoch = order.start // batches.per_epoch * batches.per_epoch
    rows = [batches[step].tolist() for step in range(epoch, epoch + batches.per_epoch)]
    taken = [row for each in rows for row in each]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(batches.n))
    assert len(taken) == (batches.n - batches.n % batches.batch_size if batches.drop_last else batches.n)
    assert {len(each) for each in rows[:-1]} <= {batches.batch_size}
    again = fdp.Batches(
        batches.n, batches.batch_size, seed=batches.seed, shuffle=batches.shuffle, drop_last=batches.drop_last
    )
    assert again[order.start].tolist() == rows[order.start - epoch]  # the last first: nothing depends on the way there


@given(orders(), slots, st.sampled_from([Noisy, NoisyAtOnce]))
def test_the_rows_of_all_processes_are_those_of_the_step(order: Order, slots: list[int], kind: type[Noisy]):
    """With what was drawn for each, in the order of the processes."""
    batches, start, steps = order
    data = Noisy(batches.n)
    whole = list(batches.loader(data, start=start, steps=steps))
    processes = [batches.loader(kind(batches.n), place(rank, slots), start, steps) for rank in range(len(slots))]
    for step, want, *parts in zip(range(start, start + steps), whole, *processes, strict=True):
        assert torch.equal(want[0], batches[step])
        for column, own in zip(want, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(own), column)


@given(orders(), st.integers(0, 5))
def test_starting_at_a_step_equals_coming_to_it(order: Order, ahead: int):
    batches, start, steps = order
    undisturbed = batches.loader(NoisyAtOnce(batches.n), start=max(0, start - ahead))
    came = islice(undisturbed, min(start, ahead), min(start, ahead) + steps)
    for want, found in zip(came, batches.loader(Noisy(batches.n), start=start, steps=steps), strict=True):
        assert all(map(torch.equal, want, found))
