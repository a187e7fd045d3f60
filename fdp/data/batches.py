"""The order of the data as a pure function: which rows of a dataset are the batch of a step."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, SupportsIndex, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fdp._execution.fold_in import fold_in
from fdp._placement.peers import Spread
from fdp._trees.message_lists import quoted
from fdp._trees.registry import register_leaf
from fdp.data.collate import collate
from fdp.data.loading import LoadedRows, RowLoader, Steps


@final
@dataclasses.dataclass(frozen=True)
class Batches:
    """Which rows are the batch of a step: `batches[step]` for any step, without having gone through those before it.

    The batches of an epoch, joined, are all rows once. Whatever the number of processes, the rows that they load at a
    step are together `batches[step]`, and a loader that starts at a step goes on as one that has come to it.

    >>> import fdp
    >>> batches = fdp.Batches(5, 2, seed=0)
    >>> batches.per_epoch, [batches[step].tolist() for step in range(6)]
    (3, [[2, 3], [1, 4], [0], [1, 2], [4, 3], [0]])
    >>> fdp.Batches(5, 2, shuffle=False)[4]
    tensor([2, 3])

    A step may be any number from 0 on: step s is in epoch `s // batches.per_epoch`. There is no last one, so it is
    not iterable. To resume, a program needs the number of the step and nothing else.

    Each epoch has an order of its own, `torch.randperm` of a CPU generator with the seed `fold_in(seed, epoch)`. It is
    made when it is asked for, and the last two are kept, in 4 bytes a row. It does not depend on the generators,
    default device or default dtype of the program. torch promises the same `randperm` within one of its versions only;
    a test of fdp notices a version that has another.

    Two with equal arguments are equal. Any thread may use it.

    Args:
        n: How many rows there are: `len(dataset)`.
        batch_size: How many rows a batch of all processes together has.
        seed: Any integer.
        shuffle: False: the rows are in their own order, in each epoch.
        drop_last: Leave out the last batch of an epoch where it is shorter than the others.

    Raises:
        TypeError: Something else than whole numbers.
        ValueError: No rows, or a batch size below 1, or no whole batch under `drop_last`.
    """

    n: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        wanted = {
            "n": _whole("Batches", "n", self.n, 1, "the number of rows; of a dataset pass len(dataset)"),
            "batch_size": _whole("Batches", "batch_size", self.batch_size, 1, "a number of rows"),
            "seed": _whole("Batches", "seed", self.seed, None, "a whole number"),
        }
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Batches: {name} must be True or False, got {quoted(getattr(self, name))}")
        for name, value in wanted.items():
            object.__setattr__(self, name, value)
        if not self.per_epoch:
            raise ValueError(
                f"Batches: {self.n} rows are less than one batch of {self.batch_size}, and drop_last=True drops it. "
                "Pass drop_last=False or a smaller batch_size"
            )

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has; `len(batches)` is the same."""
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def __len__(self) -> int:
        return self.per_epoch

    def __getitem__(self, step: int) -> Tensor:
        """The rows of the batch of all processes, a new int64 tensor on the CPU."""
        step = _whole("Batches", "step", step, 0, "the number of one step, from 0 on")
        epoch, batch = divmod(step, self.per_epoch)
        first = batch * self.batch_size
        last = min(first + self.batch_size, self.n)
        if not self.shuffle:
            return torch.arange(first, last, dtype=torch.int64, device="cpu")
        return self._order(epoch)[first:last].to(torch.int64, copy=True)

    @functools.cached_property
    def _order(self) -> Callable[[int], Tensor]:
        """The rows of an epoch in their order; the last two are kept."""
        return functools.lru_cache(maxsize=2)(functools.partial(_permutation, self.n, self.seed))

    def __getstate__(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # without the orders

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a Batches has no end, so it is not iterable; batches[step] are the rows of a step, "
            "and batches.loader(dataset, start=..., steps=...) loads them"
        )

    def loader(
        self,
        dataset: Any,
        mesh: Spread | None = None,
        start: int = 0,
        steps: int | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """A DataLoader whose batches are this process's rows of `batches[start]`, `batches[start + 1]` and so on.

        Joined over all processes, batch i is the collated `[dataset[row] for row in batches[start + i]]`.

        >>> import fdp, torch
        >>> data = [(torch.tensor([row, row]), -row) for row in range(5)]
        >>> for x, y in fdp.Batches(5, 2, seed=0).loader(data, start=1, steps=2):
        ...     print(x[:, 0], y)
        tensor([1, 4]) tensor([-1, -4])
        tensor([0]) tensor([0])

        **Collating.** A batch is a tree like a sample, each leaf collated by torch's `default_collate`. So samples
        `(x, y)` become a tuple, which is two arguments to `dp_apply` and `*batch` to the gradient functions. What a
        `collate_fn` returns is left as it is.

        **Random numbers.** Each sample draws from generators with the seed
        `fold_in(fold_in(fold_in(seed, -1), step), row)`: torch's of the CPU, `random`, and `numpy.random`, which takes
        32 bits of it. So augmentation depends on the step and the row, and not on workers or processes. The generators
        of the program are afterwards as before. A dataset that wants a generator of its own makes a new one in each
        `__getitem__`, with a seed that it draws: `random.getrandbits(63)`. What a `collate_fn` draws is drawn for this
        process's rows together: it is the same for any workers and from any start, and another for another number of
        processes.

        Rows are taken one by one, by `dataset[row]`: what a `__getitems__` of all rows draws would depend on which rows
        a process has, so it is not called.

        **Processes.** All make it with the same arguments, and have equally many batches. A process without rows at a
        step gets a batch of no rows. To find out what that looks like it loads a row of another process; a `collate_fn`
        of your own must put rows in dim 0 for that. Rows are divided as `mesh.local` does without weights.

        Each iteration begins at `start` again.

        Args:
            dataset: What has `len(dataset) == n` and `dataset[row]`.
            mesh: The mesh of `fdp.distributed.init` that the batches are for. None: all rows.
            start: The first step.
            steps: How many; `len(loader)` is this number. None: without end, and without `len`.
            **options: Those of `torch.utils.data.DataLoader` that say how to load: `num_workers`, `collate_fn`,
                `pin_memory` and so on. With `num_workers=0` rows are loaded in the thread that began the iteration;
                other threads are not to draw meanwhile, unless in calls of fdp with a seed.

        Raises:
            TypeError: An iterable dataset, or something that is no mesh, or options of which rows and when.
            ValueError: A dataset of another length, a start below 0.
            RuntimeError: While loading: `num_workers=0` under `prefetch`, whose thread is another one.
        """
        where = "Batches.loader"
        if mesh is not None and not isinstance(mesh, Spread):
            raise TypeError(
                f"{where}: mesh must be a mesh of fdp.distributed.init, got {type(mesh).__name__}. In one process "
                "leave it out: the call that takes the batch splits it over its devices"
            )
        start = _whole(where, "start", start, 0, "the number of a step, from 0 on")
        if steps is not None:
            steps = _whole(where, "steps", steps, 0, "a number of steps, or None")
        _check_options(options)
        _check_dataset(dataset, self.n)
        own: Callable[[Tensor], Any] = (lambda rows: rows) if mesh is None else mesh.local
        collate_fn = options.pop("collate_fn", None) or collate
        rows = LoadedRows(dataset, collate_fn, fold_in(self.seed, -1))
        return RowLoader(rows, Steps(self.__getitem__, own, start, steps), options)


register_leaf(Batches)  # and not a tree of its numbers
Batches.__module__ = "fdp"  # where pickles find it


def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    """In a thread of its own, which has no modes or transforms: what is kept is to be of use outside of them too."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_draw_permutation, n, fold_in(seed, epoch)).result()


def _draw_permutation(n: int, seed: int) -> Tensor:
    # Half the bytes take half the time: rows are drawn from all over the memory.
    dtype = torch.int32 if n < 2**31 else torch.int64
    return torch.randperm(n, generator=torch.Generator("cpu").manual_seed(seed), dtype=dtype, device="cpu")


def _whole(where: str, name: str, value: Any, least: int | None, expected: str) -> int:
    """An argument as a whole number, which is at least `least`."""
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    try:
        number = None if is_bool or not isinstance(value, SupportsIndex) else operator.index(value)
    except TypeError:  # a tensor of several elements
        number = None
    if number is None:
        raise TypeError(f"{where}: {name} must be {expected}, got {type(value).__name__} {quoted(value)}")
    if least is not None and number < least:
        raise ValueError(f"{where}: {name} must be at least {least}, got {number}")
    return number


_OF_BATCHES = {
    "batch_size": "Pass it to Batches(n, batch_size)",
    "shuffle": "Pass it to Batches(n, batch_size, shuffle=...)",
    "drop_last": "Pass it to Batches(n, batch_size, drop_last=...)",
    "generator": "All that is drawn comes from the seed: Batches(n, batch_size, seed=...)",
    "sampler": "For another order use torch's DataLoader, with mesh.local for the rows of a process",
    "batch_sampler": "For another order use torch's DataLoader, with mesh.local for the rows of a process",
}


def _check_options(options: dict[str, Any]) -> None:
    for name, way_out in _OF_BATCHES.items():
        if name in options:
            raise TypeError(f"Batches.loader: it takes no {name}: Batches says which rows come when. {way_out}")
    if not options.get("in_order", True):
        raise TypeError("Batches.loader: in_order=False would take steps in an order of chance. Leave it out")


def _check_dataset(dataset: Any, n: int) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset | Iterator):
        raise TypeError(
            f"Batches.loader: {kind} gives samples in an order of its own, and Batches says which row comes when. "
            "Pass a dataset with __len__ and __getitem__"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"Batches.loader: expected a dataset with __len__ and __getitem__, got {kind}")
    if len(dataset) != n:
        hint = ". Of tensors make a TensorDataset, or take x[batches[step]]" * isinstance(dataset, tuple | dict)
        raise ValueError(f"Batches.loader: the dataset has {len(dataset)} rows, and these are batches of n={n}{hint}")
