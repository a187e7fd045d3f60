"""New buffers that `functional` returned while a function ran: they are known again, by identity, in its result."""

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

Returned: TypeAlias = weakref.WeakValueDictionary[int, torch.Tensor]
_RETURNED: contextvars.ContextVar[Returned | None] = contextvars.ContextVar("fdp_returned", default=None)


@contextlib.contextmanager
def noting() -> Iterator[Returned]:
    """As a context: what is returned in it is in the result, by id."""
    returned: Returned = weakref.WeakValueDictionary()
    token = _RETURNED.set(returned)
    try:
        yield returned
    finally:
        _RETURNED.reset(token)


def note(buffers: Iterable[torch.Tensor]) -> None:
    """Remember new buffers, if somebody asks for them."""
    returned = _RETURNED.get()
    if returned is not None:
        returned.update({id(buffer): buffer for buffer in buffers})
