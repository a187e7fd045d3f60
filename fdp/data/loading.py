"""Rows of a dataset, loaded by step: what the sampler of a DataLoader names, and what its workers do with it.

What holds at any time:

- The sampler runs where the loader is iterated over. Which rows are whose is decided there, and no worker sees a mesh.
- A worker gets a `Share`: the number of the step and rows. What it draws depends on these and the seed, and not on what
  the worker has loaded before.
- Without workers, rows are loaded in the thread that began the iteration, and in no other: generators have other seeds
  meanwhile, in the whole process. That thread waits, so what it draws itself is not disturbed. Others that draw with a
  seed of fdp's wait for the lock (`sample_seeds`).
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fdp._execution.fold_in import fold_in
from fdp._trees.types import Tree
from fdp.data.collate import Collate, collate_none
from fdp.data.sample_seeds import keeping_generators, seed_generators

Thread = tuple[int, int]


class Share(NamedTuple):
    """What one process loads at a step. Where it has no rows, `spare` is one to see what rows look like."""

    step: int
    rows: list[int]
    spare: int
    thread: Thread  # that iterates, with its process


def _this_thread() -> Thread:
    return os.getpid(), threading.get_ident()


@final
class Steps(Sampler[Share]):
    """The share of this process of each step, from `start` on."""

    def __init__(
        self, rows_at: Callable[[int], Tensor], own: Callable[[Tensor], Tensor], start: int, steps: int | None
    ) -> None:
        self._rows_at, self._own = rows_at, own
        self._start, self._steps = start, steps

    def __iter__(self) -> Iterator[Share]:
        numbers = itertools.count(self._start)
        # Not a generator, which an interrupt would end as if there were no more steps.
        return map(partial(self._share, _this_thread()), itertools.islice(numbers, self._steps))

    def _share(self, thread: Thread, step: int) -> Share:
        rows = self._rows_at(step)
        return Share(step, self._own(rows).tolist(), int(rows[0]), thread)

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("this loader has no end, so it has no len; pass steps=... to Batches.loader")
        return self._steps


@final
class LoadedRows(Dataset[Tree]):
    """The batches of a dataset, by share. Workers get a copy of it.

    Attributes:
        dataset: That of the user.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int) -> None:
        self.dataset = dataset
        self._collate, self._seed = collate_fn, seed

    def __getitem__(self, share: Share) -> Tree:
        process, thread = _this_thread()
        if process == share.thread[0] and thread != share.thread[1]:
            raise RuntimeError(
                "Batches.loader: with num_workers=0 rows are loaded in the thread that began the iteration, and this "
                "is another one, such as prefetch's: what it draws would mix with what your thread draws. Pass "
                "num_workers=1 to loader"
            )
        return keeping_generators(partial(self._batch, share))

    def _batch(self, share: Share) -> Tree:
        seed = fold_in(self._seed, share.step)
        if not share.rows:
            return collate_none(self._collate, self._sample(share.step, share.spare, seed))
        samples = [self._sample(share.step, row, seed) for row in share.rows]
        seed_generators(fold_in(fold_in(seed, -1), share.rows[0]))
        return self._collate(samples)

    def _sample(self, step: int, row: int, seed: int) -> Tree:
        seed_generators(fold_in(seed, row))
        try:
            return self.dataset[row]
        except Exception as error:
            error.add_note(f"in row {row} of step {step}")
            raise


@final
class RowLoader(DataLoader[Tree]):
    """A DataLoader of loaded rows. It takes no number from the generator of the program."""

    def __init__(self, rows: LoadedRows, steps: Steps, options: dict[str, Any]) -> None:
        own = torch.Generator("cpu")  # what the seeds of workers are drawn from
        super().__init__(rows, batch_size=None, sampler=steps, collate_fn=_unchanged, generator=own, **options)

    def __iter__(self) -> Any:
        with torch.device("cpu"):  # torch draws that seed on the default device, whatever the generator is of
            return super().__iter__()


def _unchanged(batch: Tree) -> Tree:
    return batch
