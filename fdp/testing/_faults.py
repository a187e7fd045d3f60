"""Faults on purpose: a slot that fails, to see what the rest of a program does about it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from fdp._placement.slot import ON_SHARD, Slot


class Fault:
    """What `fail_slot` yields: `fired` is how often the error was raised so far."""

    def __init__(self) -> None:
        self.fired = 0
        self._lock = threading.Lock()

    def _fire(self, times: int | None) -> bool:
        with self._lock:  # shards may run side by side
            if times is not None and self.fired >= times:
                return False
            self.fired += 1
            return True

    def __repr__(self) -> str:
        return f"Fault(fired={self.fired})"


def fail_slot(
    slot: int,
    error: BaseException | type[BaseException] = RuntimeError,
    *,
    when: Literal["before", "after"] = "before",
    axis_name: str = "data",
    times: int | None = None,
) -> contextlib.AbstractContextManager[Fault]:
    """Make a slot fail in every mapped call inside the `with` block, whatever its function does.

    Inside, `dp_apply(f, p, x, devices)` behaves as with an `f` that raises `error` on slot `slot` and nowhere else.

    >>> import fdp, torch
    >>> from fdp.testing import fail_slot
    >>> with fail_slot(1, TimeoutError("the device is gone")) as fault:
    ...     try:
    ...         fdp.dp_apply(torch.mul, torch.tensor(2.0), torch.ones(4), fdp.virtual_devices(2))
    ...     except TimeoutError as error:
    ...         print(error, error.__notes__)
    the device is gone ['in shard 1 of 2, rows 2:4, on cpu']
    >>> fault.fired
    1

    Contexts nest, and then each of their slots fails. Calls inside `torch.compile` are not reached.

    Args:
        slot: Its number among the slots that have rows, from 0; what `fdp` calls "shard 1 of 2". Calls with fewer slots
            do not fail: assert `fault.fired`.
        error: An exception, which is raised itself, or a class, which is raised with a message.
        when: `"before"` the function runs, or `"after"` it has run on that slot.
        axis_name: Calls with this `axis_name` fail, also those inside others.
        times: Fail this often, then no more: to test that a program tries again. By default always.

    Returns:
        A context manager that yields a `Fault`.

    Raises:
        TypeError: `error` is no exception, or a class that takes more than a message; other arguments of wrong types.
        ValueError: `slot` is negative, `times` is less than 1, or `when` is neither of the two.
    """
    if isinstance(slot, bool) or not isinstance(slot, int):
        raise TypeError(f"fail_slot: slot must be an int, got {slot!r}")
    if slot < 0:
        raise ValueError(f"fail_slot: slot must be 0 or more, got {slot}")
    if when not in ("before", "after"):
        raise ValueError(f"fail_slot: when must be 'before' or 'after', got {when!r}")
    if not isinstance(axis_name, str):
        raise TypeError(f"fail_slot: axis_name must be a str, got {axis_name!r}")
    if times is not None and (isinstance(times, bool) or not isinstance(times, int)):
        raise TypeError(f"fail_slot: times must be None or an int, got {times!r}")
    if times is not None and times < 1:
        raise ValueError(f"fail_slot: times must be 1 or more, got {times}")
    _made(error, slot)  # now, rather than in a shard
    return _failing(slot, error, when, axis_name, times)


@contextlib.contextmanager
def _failing(
    slot: int, error: BaseException | type[BaseException], when: str, axis_name: str, times: int | None
) -> Iterator[Fault]:
    fault, outer = Fault(), ON_SHARD.get()

    def watch(place: Slot, moment: str) -> None:
        if outer is not None:
            outer(place, moment)
        if (place.index, place.axis_name, moment) == (slot, axis_name, when) and fault._fire(times):
            raise _made(error, slot)

    token = ON_SHARD.set(watch)
    try:
        yield fault
    finally:
        ON_SHARD.reset(token)


def _made(error: object, slot: int) -> BaseException:
    if isinstance(error, BaseException):
        return error.with_traceback(None)  # else it would grow each time
    if not (isinstance(error, type) and issubclass(error, BaseException)):
        raise TypeError(f"fail_slot: error must be an exception or a class of exceptions, got {error!r}")
    try:
        return error(f"slot {slot} failed because of fdp.testing.fail_slot")
    except TypeError as problem:
        raise TypeError(f"fail_slot: {error.__name__} takes more than a message; pass an instance of it") from problem
