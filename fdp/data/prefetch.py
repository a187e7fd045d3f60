"""The next batches, loaded and moved while this one computes.

What holds at any time:

- The first batch is loaded in the thread of the caller. From then on one thread of its own iterates over the source,
  and nobody else does.
- Batches that are ready, or being loaded, are at most `size`: `_room` counts what is left, and is given back when a
  batch is taken out of `_ready`.
- What is raised comes through `_ready` in the place of a batch, and is the last thing there, as `_END` is.
- On GPUs the thread loads on streams of its own. They begin when those of the caller have done what they were given
  before, and the thread waits for them before it hands a batch on. The stream that takes the batch is written down in
  its memory (`record_stream`). The current device is that of the caller.

One thread at a time runs the generator, in the process that made it: in a forked child there is no thread that loads.
When it is closed it waits for the batch that is being loaded; when the interpreter ends, for some seconds. There are no
locks here: a semaphore, a queue, and a flag that is set before the semaphore is given back.
"""

import atexit
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, final

import torch

from fdp._execution.thread_state import ThreadState
from fdp._placement.devices import as_devices
from fdp._placement.partition import check_weights
from fdp._placement.scatter import scatter
from fdp._placement.sharded import Sharded, Slots
from fdp._trees.tree import map_tensors, tensors_in
from fdp._trees.types import Devices, Dims, Tree


def prefetch(
    batches: Iterable[Tree],
    devices: Devices,
    in_dims: Dims = 0,
    *,
    size: int = 2,
    weights: Sequence[float] | None = None,
    keep_empty: bool = False,
) -> Generator[Sharded, None, None]:
    """Split batches over slots, and load and move the next ones while this one is in use.

    `list(prefetch(batches, devices)) == [scatter(batch, devices) for batch in batches]`.

    >>> import fdp, torch
    >>> batches = torch.arange(6.0).split(3)
    >>> [batch.shards for batch in fdp.prefetch(batches, fdp.virtual_devices(2))]
    [(tensor([0., 1.]), tensor([2.])), (tensor([3., 4.]), tensor([5.]))]

    A thread iterates over `batches`; only the first is loaded in the caller's, so that samplers draw their seed there.
    Copies to GPUs go through pinned memory on streams of their own. These begin when your streams have done what they
    were given before the second batch: what you compute for the source later, wait for it there.

    What is raised while a batch is loaded or split is raised where that batch would have come. Leaving the loop early,
    by `break` or an exception, ends the thread, as `close()` does; both wait for the batch that it is loading.

    Transforms of the data that draw from torch's default generator do so in the thread, in between draws of the
    training loop: for numbers that repeat, give them a `torch.Generator`, or load rows by `Batches.loader`.

    Args:
        batches: Anything that can be iterated over, such as a DataLoader. It must not be used otherwise meanwhile.
        devices, in_dims, weights, keep_empty: As in `scatter`.
        size: How many batches are held ahead, at least 1. Each takes its memory on the devices.

    Returns:
        A generator of the batches in order, each a `Sharded`; `sharded.unzip()` takes pairs `(x, y)` apart.

    Raises:
        TypeError: Not iterable.
        ValueError: Bad devices, weights or size. What `scatter` raises comes with the batch.
    """
    slots = as_devices(devices, "prefetch")
    if weights is not None:
        weights = check_weights(weights, len(slots), "prefetch")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"prefetch: size must be a positive number of batches, got {size!r}")
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | Slots | str):
        one = "; [batch] is a list of one batch" if isinstance(batches, Mapping | Slots) else ""
        raise TypeError(f"prefetch: expected batches to iterate over, got {type(batches).__name__}{one}")

    def split(batch: Tree) -> Sharded:
        return scatter(batch, devices, in_dims, weights=weights, keep_empty=keep_empty)

    return _ahead(_Source(iter(batches), split, slots), size)


_END = object()


@final
class _Source:
    """Where batches come from, and what becomes of them."""

    def __init__(self, source: Iterator[Tree], split: Callable[[Tree], Sharded], slots: Sequence[torch.device]) -> None:
        self._source, self._split = source, split
        self.gpus = [device for device in dict.fromkeys(slots) if _stream_of(device) is not None]

    def next(self) -> Any:
        """The next batch on its devices, or `_END`."""
        batch = next(self._source, _END)
        if batch is _END:
            return _END
        return self._split(map_tensors(_pinned, batch) if self.gpus else batch)


def _stream_of(device: torch.device) -> Any:
    """What makes a stream there; None if there are none, as on the CPU and on MPS."""
    return None if device.type in ("cpu", "meta") else getattr(torch.get_device_module(device), "Stream", None)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a GPU can read by itself, while others compute."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor


def _ahead(batches: _Source, size: int) -> Generator[Sharded, None, None]:
    first = batches.next()
    if first is _END:
        return
    thread = _Thread(batches, size)
    try:
        yield first
        del first
        while True:
            found = thread.take()
            if found is _END:
                return
            for tensor in tensors_in(found.shards) if batches.gpus else ():
                for part in memory_of(tensor):  # it must not be given away before this thread's work is done
                    if part.device in batches.gpus:
                        part.record_stream(torch.accelerator.current_stream(part.device))
            yield found
            del found
    finally:
        thread.stop()


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor consists of: torch writes down streams for those only."""
    return [getattr(tensor, name)() for name in _PARTS[tensor.layout]] if tensor.layout in _PARTS else [tensor]


_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),  # without an underscore they refuse what is not coalesced
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
    torch.jagged: ("values", "offsets"),
}


@final
class _Thread:
    """Loads batches while there is room."""

    def __init__(self, batches: _Source, size: int) -> None:
        self._batches = batches
        self._state = ThreadState.of_caller(batches.gpus)
        self._room = threading.Semaphore(size)
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_over, self._process = False, os.getpid()
        self._patience: float | None = None
        context = contextvars.copy_context()
        # A daemon: a generator that nobody closes must not keep the interpreter from ending. See `_stop_all`.
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="fdp-prefetch", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    def take(self) -> Any:
        """The next batch, or what was raised in its place."""
        if os.getpid() != self._process:
            raise RuntimeError("prefetch: this generator is of another process, which has forked. Make one of your own")
        found, error = self._ready.get()
        self._room.release()
        if error is not None:
            try:
                raise error
            finally:
                del error  # no cycle
        return found

    def stop(self) -> None:
        """End the thread, after the batch that it is loading."""
        self._is_over = True
        self._room.release()
        if self._thread.is_alive():  # else it was waited for: at the end of a program `join` does not work any more
            self._thread.join(self._patience)

    def stop_soon(self) -> None:
        """End the thread, or give up if its batch takes longer than some seconds."""
        self._patience = 5
        self.stop()

    def _work(self) -> None:
        try:
            with self._state.restored():
                for device in self._batches.gpus:
                    stream = _stream_of(device)(device)
                    stream.wait_stream(torch.accelerator.current_stream(device))  # that of the caller
                    torch.accelerator.set_stream(stream)
                self._state.restore_device()  # it went with the stream
                while self._room.acquire() and not self._is_over:
                    found = self._batches.next()
                    for device in self._batches.gpus:  # what a loader computes there is complete when it is handed on
                        torch.accelerator.current_stream(device).synchronize()
                    self._ready.put((found, None))
                    if found is _END:
                        return
                    del found
        except BaseException as error:
            self._ready.put((None, error))


_RUNNING = weakref.WeakSet[_Thread]()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside torch when the interpreter ends would abort the process."""
    for thread in list(_RUNNING):
        thread.stop_soon()
