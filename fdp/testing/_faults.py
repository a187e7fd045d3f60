"""Faults on purpose: a slot that fails, to see what the rest of a program does about it."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Literal

from fdp._placement.slot import Slot
from fdp._placement.transfer_log import Watch, watched


@dataclasses.dataclass
class Fault:
    """What `fail_slot` yields: `fired` is how often the error was raised so far."""

    fired: int = 0


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
        TypeError: `error` is no exception, or a class that takes more than a message.
        ValueError: `slot` is no int or negative, or `when` is neither of the two.
    """
    if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
        raise ValueError(f"fail_slot: slot must be an int, 0 or more, got {slot!r}")
    if when not in ("before", "after"):
        raise ValueError(f"fail_slot: when must be 'before' or 'after', got {when!r}")
    _made(error, slot)  # now, rather than in a shard
    return _failing(_Failing((slot, axis_name, when), error, times))


class _Failing(Watch):
    """Lets a slot of an axis fail, before or after it runs."""

    def __init__(self, where: tuple[int, str, str], error: object, times: int | None) -> None:
        super().__init__()
        self._where, self._error, self._times = where, error, times
        self.fault, self._lock = Fault(), threading.Lock()

    def on_shard(self, slot: Slot, when: str) -> None:
        if (slot.index, slot.axis_name, when) != self._where:
            return
        with self._lock:  # shards may run side by side
            if self._times is not None and self.fault.fired >= self._times:
                return
            self.fault.fired += 1
        raise _made(self._error, slot.index)


@contextlib.contextmanager
def _failing(watch: _Failing) -> Iterator[Fault]:
    with watched(watch):
        yield watch.fault


def _made(error: object, slot: int) -> BaseException:
    if isinstance(error, BaseException):
        return error.with_traceback(None)  # else it would grow each time
    if not (isinstance(error, type) and issubclass(error, BaseException)):
        raise TypeError(f"fail_slot: error must be an exception or a class of exceptions, got {error!r}")
    return error(f"slot {slot} failed because of fdp.testing.fail_slot")
