"""Where processes meet: before any data goes, each says where it is, and whether it has failed.

So nobody waits for one who does not come, and all are at the same place again afterwards.
"""

import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from fdp._placement.slot import text_of
from fdp._trees.listing import differing
from fdp.distributed._communicator import Communicator, Elsewhere


class Tag(NamedTuple):
    """Where a process is: the name of what it does, and what of it has to be the same everywhere, or None."""

    name: str
    same: str | None = None
    say: Callable[[], str] = str


class Added(NamedTuple):
    """Tensors that are summed over all processes while they meet; those that are `ours` may be overwritten."""

    tensors: Sequence[Tensor]
    ours: Sequence[bool]


class Answer(NamedTuple):
    """The numbers of every process, and the sums of what they have added."""

    numbers: list[list[int]]
    sums: list[Tensor]


_NOTHING = Answer([], [])


def meet(
    comm: Communicator,
    tag: Tag,
    numbers: Sequence[int] = (),
    failure: BaseException | None = None,
    added: Added | None = None,
) -> Callable[[], Answer]:
    """Begin to meet the other processes, each with a few numbers; what is returned waits for them.

    All are at the same place, or all raise `Elsewhere`. One that has failed gets no answer: it has an error of its own.
    Who adds does not wait for the others to say that they do. One that does not, since it has failed or is elsewhere,
    reads that in their headers, and takes part with zeros.
    """
    digest = 0 if tag.same is None else zlib.crc32(f"{tag.name} {tag.same}".encode())
    own = [zlib.crc32(tag.name.encode()), digest, failure is not None, added is not None]
    header = comm.begin_header([*own, *numbers], tag.name)
    sums = None if added is None else comm.begin_sums(added.tensors, tag.name, added.ours)

    def finish() -> Answer:
        rows = header()
        name, digests, failed, adds = (set(column) for column in list(zip(*rows, strict=True))[:4])
        found = [] if sums is None else sums()
        if sums is None and any(adds) and comm.owed is not None:
            comm.sums(comm.owed(), tag.name)
        if not any(failed) and len(name) == len(adds) == 1 and len(digests - {0}) <= 1:
            return Answer([row[4 : 4 + len(numbers)] for row in rows], found)
        _raise_for(comm, tag, failure)
        return _NOTHING

    return finish


def _raise_for(comm: Communicator, tag: Tag, failure: BaseException | None) -> None:
    """Exchange what has gone wrong; raise it, unless it has in this process."""
    how = None if failure is None else f"has raised {type(failure).__name__}: {text_of(failure)}"
    trace = "" if failure is None else "".join(traceback.format_exception(failure))
    said = comm.objects((tag.name, tag.say(), how, trace), tag.name)
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
        self, tag: Tag, numbers: Sequence[int] = (), failure: BaseException | None = None, added: Added | None = None
    ) -> Callable[[], Answer]:
        """`meet`, unless it is over: then the others do not wait any more."""
        if self.is_over:
            raise Elsewhere(f"{tag.name}: {self._error or 'another process has failed before'}")
        self.is_over = True
        wait = meet(self.comm, tag, numbers, failure, added)

        def finish() -> Answer:
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
        return self.begin(tag, numbers)().numbers

    def end(
        self, tag: Tag, error: BaseException | None, numbers: Sequence[int] = (), added: Added | None = None
    ) -> tuple[BaseException | None, Answer]:
        """Tell the others how it went. Why this process has to fail if it has not, and the answer."""
        if self.is_over and error is not None:
            return None, _NOTHING
        try:
            return None, self.begin(tag, numbers, error, added)()
        except Exception as elsewhere:
            return elsewhere, _NOTHING
