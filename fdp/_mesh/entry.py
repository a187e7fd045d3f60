"""How a call begins in all processes of a mesh, or fails in all."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fdp._mesh.communicator import Place
from fdp._mesh.processes import Located, Processes, Spread, processes_of
from fdp._placement.slot import AXES


class Beginning:
    """Whether a call has begun in all processes."""

    is_over = False


BEGINNING: contextvars.ContextVar[Beginning | None] = contextvars.ContextVar("fdp_beginning", default=None)


def begins(where: str, devices: Any, held: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
    """Around a call that may be on a mesh: what fails before it has begun in all processes fails in all."""
    if isinstance(devices, Spread):
        return _announced(lambda: processes_of(devices, where), where)
    found = [x.processes for x in held if isinstance(x, Located) and x.processes is not None]
    return _announced(lambda: found[0], where) if found else contextlib.nullcontext()


@contextlib.contextmanager
def _announced(find: Callable[[], Processes | None], where: str) -> Iterator[None]:
    around = BEGINNING.get()
    if around is not None and not around.is_over:  # the same call
        yield
        return
    beginning = Beginning()
    others = find()
    owns = others is not None and others.caller is None and not AXES.get()
    if others is not None and not AXES.get():
        if not owns and others.caller != threading.get_ident():
            raise RuntimeError(f"{where}: another thread is in a call on this mesh. One call at a time: use a lock")
        others.calls += 1
    token = BEGINNING.set(beginning)
    try:
        if owns and others is not None:
            others.caller = threading.get_ident()
        yield
    except BaseException as error:
        others = others or find()
        if not beginning.is_over and others is not None:
            others.wire.agree(Place(where), failure=error)
        raise
    finally:
        BEGINNING.reset(token)
        if owns and others is not None:
            others.caller = None


def begin(processes: Processes, place: Place) -> None:
    """Begin a call in all processes that nothing has to be known of."""
    beginning = BEGINNING.get()
    if beginning is not None:
        beginning.is_over = True
    processes.wire.agree(place)
