"""Who watches what calls do: the log of copies between devices, and what `explain` and tests want to know."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from fdp._placement.slot import Slot
from fdp._trees import torch_private


class Transfer(NamedTuple):
    """One tensor that was copied from a device to another.

    Attributes:
        path: Where it stands in the arguments or the result: `"inputs[0]['x']"`; for gradients, what they belong to.
        nbytes: Its size.
        source: The device that it was on.
        target: The device that it was copied to.
    """

    path: str
    nbytes: int
    source: torch.device
    target: torch.device


class Collective(NamedTuple):
    """One collective over all slots of a call.

    Attributes:
        name: `"psum"`, ...; that of the function that was called.
        tensors: How many tensors each slot brings.
        nbytes: The size of those of slot 0.
    """

    name: str
    tensors: int
    nbytes: int


class Watch:
    """Is told of what calls do in its context.

    Attributes:
        copies: Those between devices.
        collectives: What slots exchange.
        differences: What differs from one device: where they are wanted, they are no warnings.
    """

    def __init__(self, differences: list[str] | None = None) -> None:
        self.copies: list[Transfer] = []
        self.collectives: list[Collective] = []
        self.differences = differences

    def on_shard(self, slot: Slot, when: str) -> None:
        """A shard is about to run: `"before"`, or has run: `"after"`."""


# Shards run in copies of their caller's context, also in other threads: they see its watches and write to the same.
WATCHES: contextvars.ContextVar[tuple[Watch, ...]] = contextvars.ContextVar("fdp_watches", default=())


@contextlib.contextmanager
def watched(watch: Watch, *, alone: bool = False) -> Iterator[Watch]:
    """Have it told, `alone` or with those that are open around."""
    token = WATCHES.set((watch,) if alone else (*WATCHES.get(), watch))
    try:
        yield watch
    finally:
        WATCHES.reset(token)


def differences() -> list[str] | None:
    """Where to write down what differs from one device; None: in warnings."""
    return next((watch.differences for watch in WATCHES.get() if watch.differences is not None), None)


@contextlib.contextmanager
def transfers() -> Iterator[list[Transfer]]:
    """See every copy between devices that fdp makes.

    What the function itself copies is not among them, nor what autograd copies in a backward, but for what goes back
    through collectives, nor anything inside of `torch.compile`. Inside one another, both logs see a copy.

    Leaves of less than 64 KiB travel together, those of a dtype in one buffer. Each has a line of its own all the same.

    >>> import fdp, torch
    >>> with fdp.transfers() as log:
    ...     batch = fdp.scatter(torch.ones(2, 3), ["cpu", "meta"])
    >>> log
    [Transfer(path='tree', nbytes=12, source=device(type='cpu'), target=device(type='meta'))]
    >>> sum(transfer.nbytes for transfer in log)
    12

    Yields:
        A list that grows: of each copy the path, bytes, source and target.
    """
    with watched(Watch()) as watch:
        yield watch.copies


class Named(Protocol):
    """A flat tree whose leaves have names."""

    def path(self, index: int, /) -> str: ...


def report(tensor: torch.Tensor, target: torch.device, flat: Named, index: int) -> None:
    """Write to the open logs that a leaf is copied to another device; its path is found only if there are any."""
    if torch.compiler.is_dynamo_compiling():  # a traced function cannot read context variables
        return
    for watch in WATCHES.get():
        watch.copies.append(Transfer(flat.path(index), nbytes_of(tensor), tensor.device, target))


def report_collective(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Say that slots meet."""
    for watch in WATCHES.get():
        watch.collectives.append(Collective(name, len(tensors), sum(map(nbytes_of, tensors))))


def nbytes_of(tensor: torch.Tensor) -> int:
    """The size of what really moves: under `vmap` the whole batch."""
    while torch_private.is_functorch_wrapped_tensor(tensor):
        tensor = torch_private.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.element_size() * (tensor._nnz() if tensor.layout is not torch.strided else tensor.numel())
