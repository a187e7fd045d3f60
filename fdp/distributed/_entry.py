"""How a call begins in all processes of a mesh, or fails in all."""

import contextlib
import contextvars
import threading
from collections.abc import Iterator

from fdp._placement.slot import AXES
from fdp.distributed._processes import Processes
from fdp.distributed._session import Tag, meet


class Beginning:
    """Whether a call has begun in all processes."""

    is_over = False


BEGINNING: contextvars.ContextVar[Beginning | None] = contextvars.ContextVar("fdp_beginning", default=None)


@contextlib.contextmanager
def beginning(others: Processes, where: str) -> Iterator[None]:
    """Around the beginning of a call: what fails before it has begun in all processes fails in all."""
    others.check(where)
    around = BEGINNING.get()
    if around is not None and not around.is_over:  # the same call
        yield
        return
    own = Beginning()
    inside = bool(AXES.get())
    owns = others.caller is None and not inside
    if not inside:
        if not owns and others.caller != threading.get_ident():
            raise RuntimeError(f"{where}: another thread is in a call on this mesh. One call at a time: use a lock")
        others.calls += 1
    token = BEGINNING.set(own)
    try:
        if owns:
            others.caller = threading.get_ident()
        yield
    except BaseException as error:
        if not own.is_over:
            meet(others.comm, Tag(where), failure=error)()
        raise
    finally:
        BEGINNING.reset(token)
        if owns:
            others.caller = None


def begin(processes: Processes, tag: Tag) -> None:
    """Begin a call in all processes that nothing has to be known of."""
    beginning = BEGINNING.get()
    if beginning is not None:
        beginning.is_over = True
    meet(processes.comm, tag)()
