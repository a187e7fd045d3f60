"""Where processes meet: before any data goes, each says where it is, and whether it has failed.

So nobody waits for one who does not come, and all are at the same place again afterwards.
"""

import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from fdp._trees.listing import differing
from fdp._trees.tracebacks import text_of
from fdp.distributed._communicator import Communicator, Elsewhere


class Tag(NamedTuple):
    """Where a process is: the name of what it does, and what of it has to be the same everywhere, or None."""

    name: str
    same: str | None = None
    say: Callable[[], str] = str


def meet(
    comm: Communicator, tag: Tag, numbers: Sequence[int] = (), failure: BaseException | None = None
) -> Callable[[], list[list[int]]]:
    """Begin to meet the other processes, each with a few numbers; what is returned waits for those of all.

    All are at the same place, or all raise `Elsewhere`. One that has failed gets no numbers: its error is its own.
    """
    digest = 0 if tag.same is None else zlib.crc32(f"{tag.name} {tag.same}".encode())
    own = [zlib.crc32(tag.name.encode()), digest, failure is not None]
    header = comm.begin_header([*own, *numbers], tag.name)

    def finish() -> list[list[int]]:
        with comm.to_the_end():
            return compared(header())

    def compared(rows: list[list[int]]) -> list[list[int]]:
        name, digests, failed = (set(column) for column in list(zip(*rows, strict=True))[:3])
        if not any(failed) and len(name) == 1 and len(digests - {0}) <= 1:
            return [row[3 : 3 + len(numbers)] for row in rows]
        _raise_for(comm, tag, failure)
        return []

    return finish


def _raise_for(comm: Communicator, tag: Tag, failure: BaseException | None) -> None:
    """Exchange what has gone wrong; raise it, unless it has in this process."""
    how = None if failure is None else f"has raised {type(failure).__name__}: {text_of(failure)}"
    trace = "" if failure is None else "".join(traceback.format_exception(failure))
    own = tag.name, tag.say(), how, trace
    said = comm.objects(own, tag.name)
    if failure is not None:
        return
    error = Elsewhere(_explained(comm, tag, said))
    for rank, (*_, text) in zip(comm.ranks, said, strict=True):  # it may be ended before it has printed it
        if text:
            error.add_note(f"In process {rank}:\n{text.rstrip()}")
    raise error


def _explained(comm: Communicator, tag: Tag, said: Sequence[tuple[str, str, str | None, str]]) -> str:
    names, texts, hows, _ = zip(*said, strict=True)
    failed = [f"process {rank} {how}" for rank, how in zip(comm.ranks, hows, strict=True) if how]
    if failed:
        return f"{tag.name} in process {comm.rank} fails: {'; '.join(failed)}"
    if len(set(names)) > 1:
        each = ", ".join(f"{name} in process {rank}" for rank, name in zip(comm.ranks, names, strict=True))
        return f"the processes are at different places: {each}. All must do the same in the same order"
    each = differing(texts, [f"process {rank}" for rank in comm.ranks])
    return f"{tag.name}: the processes do not fit together: {each}"


@final
class Session:
    """What the processes of a communicator say in one call; it is over as soon as one of them has failed."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_over = False
        self._error: Exception | None = None

    def begin(
        self, tag: Tag, numbers: Sequence[int] = (), failure: BaseException | None = None
    ) -> Callable[[], list[list[int]]]:
        """`meet`, unless it is over: then the others do not wait any more."""
        if self.is_over:
            raise Elsewhere(f"{tag.name}: {self._error or 'another process has failed before'}")
        self.is_over = True
        wait = meet(self.comm, tag, numbers, failure)

        def finish() -> list[list[int]]:
            try:
                found = wait()
            except Exception as error:
                self._error = error
                raise
            self.is_over = failure is not None
            return found

        return finish

    def agree(self, tag: Tag, numbers: Sequence[int] = ()) -> list[list[int]]:
        """The numbers of every process, which are all here."""
        return self.begin(tag, numbers)()

    def end(self, tag: Tag, error: BaseException | None) -> BaseException | None:
        """Tell the others how it went: why this process has to fail, if it has not."""
        if self.is_over and error is not None:
            return None
        try:
            self.begin(tag, (), error)()
        except Exception as elsewhere:
            return elsewhere
        return None
