"""The processes of a mesh, and the part that each has in a call."""

import abc
import contextlib
import contextvars
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from fdp._context import AXES
from fdp._wire import Again, Place, Talk, Wire


@final
class Processes:
    """All processes of a mesh: how many slots each has, and how they talk."""

    def __init__(self, wire: Wire, slots: Sequence[int]) -> None:
        self.wire, self.slots = wire, tuple(slots)
        self._wires: dict[tuple[int, ...], Wire | None] = {wire.ranks: wire}
        self._is_closed = False
        self.calls = 0
        """How many calls this process has begun: the others have begun as many."""
        self.caller: int | None = None
        """The thread that is in a call."""

    def check(self, where: str) -> None:
        """The mesh is still there."""
        if self._is_closed or not dist.is_initialized():
            raise RuntimeError(f"{where}: the mesh is closed; fdp.distributed.init makes another")

    def close(self) -> None:
        """Nobody talks any more."""
        self._is_closed = True
        for wire in self._wires.values():
            if wire is not None and wire is not self.wire and dist.is_initialized():
                dist.destroy_process_group(wire.group)

    def among(self, ranks: tuple[int, ...]) -> Wire | None:
        """A wire between some of the processes, made by all of them together; None if this one is not among them."""
        if ranks not in self._wires:
            self._wires[ranks] = self.wire.narrowed(ranks)
        return self._wires[ranks]

    def __reduce__(self) -> NoReturn:
        raise TypeError("what is on a mesh of several processes cannot be pickled; pickle its .shards")


class Spread(Sequence[torch.device]):
    """Devices of this process, one a slot, beside those of other processes. None: there are no others."""

    @property
    @abc.abstractmethod
    def processes(self) -> Processes | None: ...


def processes_of(devices: Any, where: str) -> Processes | None:
    """Those that a user's devices are spread over, None if this process is alone."""
    processes = devices.processes if isinstance(devices, Spread) else None
    if processes is not None:
        processes.check(where)
    return processes


@final
class Across:
    """A call on a mesh: which processes have shards, and what comes before those of this one.

    That is known when the others have begun the call too, and waited for when it is first needed. As a context: around
    what a process does by itself. If that fails, the others are told, and fail too.
    """

    def __init__(
        self,
        processes: Processes,
        where: str,
        same: Any,
        rows: Sequence[int],
        *,
        apart: bool = False,
        say: Callable[[], str] = str,
    ) -> None:
        beginning = _BEGINNING.get()
        if beginning is not None:
            beginning.is_over = True
        self.number = 0 if AXES.get() else processes.calls  # calls inside others have no order
        same = self.number, same
        self.processes, self._place = processes, Place(f"the end of {where}")
        self.everybody = Talk(processes.wire)
        self._has_rows = len(rows) > 0
        numbers = [apart, len(rows), *rows] + [0] * (max(processes.slots) - len(rows))

        def said() -> str:
            return f"call {self.number}\n{say() or same[1]}"

        self._begun: Callable[[], list[list[int]]] | None = self.everybody.begin(
            Place(where, repr(same), said), numbers
        )
        self._answer: _All | Exception | None = None
        self._zeros: Callable[[], list[Tensor]] | None = None
        self._added: tuple[Sequence[Tensor], Sequence[bool]] | None = None
        self.has_met = False  # before the end
        self.sums: list[Tensor] | None = None
        """Those of what was `added`."""

    @property
    def _all(self) -> "_All":
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            try:
                self._answer = self._begin()
            except Exception as error:  # the others are asked once
                self._answer = error
                raise
        return self._answer

    def _begin(self) -> "_All":
        assert self._begun is not None
        begun, self._begun = self._begun, None  # it refers to this object, and to the connections
        table = begun()
        counts = [row[1] for row in table]
        if not any(counts):  # no rows at all are one empty shard
            counts[0] = 1
        found = _All(
            counts, [row[2 : 2 + n] for row, n in zip(table, counts, strict=True)], all(row[0] for row in table)
        )
        # Before anything else is said, since all processes make the group together.
        wire = self.processes.among(found.ranks) if 1 < len(found.ranks) < len(counts) else None
        self._talk = self.everybody if found.is_whole else None if wire is None else Talk(wire)
        return found

    @property
    def counts(self) -> list[int]:
        """The shards of each process."""
        return self._all.counts

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that have shards."""
        return self._all.ranks

    @property
    def count(self) -> int:
        """All shards."""
        return sum(self.counts)

    @property
    def offset(self) -> int:
        """The shards of the processes before."""
        return sum(self.counts[: self.processes.wire.rank])

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(map(sum, self._all.rows))

    @property
    def before(self) -> int:
        """The rows of the processes before."""
        return sum(map(sum, self._all.rows[: self.processes.wire.rank]))

    @property
    def is_whole(self) -> bool:
        """Whether all processes have shards."""
        return self._all.is_whole

    @property
    def is_active(self) -> bool:
        """Whether this one has."""
        return self._has_rows or self.counts[self.processes.wire.rank] > 0

    @property
    def is_apart(self) -> bool:
        """Whether nobody meets the others before the end, as far as all processes know."""
        return self._all.is_apart

    @property
    def talk(self) -> Talk | None:
        """With those that have shards, None if there are no others."""
        return self._talk if self._all else None

    def total(self, number: float, name: str) -> float:
        """The sum of a number of every process."""
        assert self._all
        self.everybody.agree(Place(name))
        return self.everybody.wire.sums([torch.tensor(number, dtype=torch.float64)], name)[0].item()

    def ends_with(self, place: Place) -> None:
        """What has to be the same in all processes at the end."""
        self._place = place

    @property
    def adds_at_end(self) -> bool:
        """Whether all processes add up at the end what they know to be the same in all, without asking."""
        return self._zeros is not None and self.is_apart and self.is_whole

    def may_add(self, zeros: Callable[[], list[Tensor]]) -> None:
        """At the end tensors like these will be added up, the first a number, if nobody meets the others before."""
        self._zeros = zeros

    def add(self, tensors: Sequence[Tensor], ours: Sequence[bool]) -> None:
        """Add these up at the end; those that are `ours` may be overwritten."""
        self._added = tensors, ours

    def again(self, where: str) -> "contextlib.AbstractContextManager[object]":
        """As a context: another run of those that have met, such as their backward."""
        return _Again(self.talk, Place(where)) if self.has_met and self.talk is not None else contextlib.nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Meet at the end: first those that have shards, then all."""
        try:
            whole = self.is_whole
        except Exception:
            if error is None:
                raise
            return  # nobody waits for this one
        elsewhere: BaseException | None = None
        if not whole and self.talk is not None:
            elsewhere = _told(self.talk, self._place, error)
        first = elsewhere
        elsewhere = self._end(error or first) or first
        if elsewhere is not None and (error is None or isinstance(error, Again)):
            raise elsewhere

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Meet all, and add up at the same time what is known to be the same in all."""
        if self._zeros is None or not self.adds_at_end:
            return _told(self.everybody, self._place, error)
        if self.everybody.is_over:
            return None
        (first, *rest), ours = self._added if self._added is not None and error is None else (self._zeros(), ())
        finish = self.everybody.begin(self._place, [_bits(first.item())], error)  # a message less than a sum of its own
        sums = self.everybody.wire.begin_sums(rest, self._place.name, ours[1:])
        numbers: list[list[int]] = []
        try:
            numbers = finish()
        except (Exception, Again) as elsewhere:
            return elsewhere
        finally:
            self.sums = [first.new_tensor(sum(_number(row[0]) for row in numbers)), *sums()]
        return None


def _bits(number: float) -> int:
    """A float as an int, to be sent among ints."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


class _All(NamedTuple):
    counts: list[int]
    rows: list[list[int]]
    is_apart: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(i for i, count in enumerate(self.counts) if count)

    @property
    def is_whole(self) -> bool:
        return all(self.counts)


@final
class _Again:
    def __init__(self, talk: Talk, place: Place) -> None:
        talk.is_over = False
        self._talk, self._place = talk, place

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        elsewhere = _told(self._talk, self._place, error)
        if error is None and elsewhere is not None:
            raise elsewhere


def _told(talk: Talk, place: Place, error: BaseException | None) -> BaseException | None:
    """Tell the others how it went; why this process has to fail if it has not."""
    if talk.is_over and error is not None:
        return None
    try:
        talk.agree(place, failure=error)
    except (Exception, Again) as elsewhere:
        return elsewhere
    return None


def begins(where: str, devices: Any, held: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
    """Around a call that may be on a mesh: what fails before it has begun in all processes fails in all."""
    if isinstance(devices, Spread):
        return _announced(lambda: processes_of(devices, where), where)
    found = [x.processes for x in held if isinstance(getattr(x, "processes", None), Processes)]
    return _announced(lambda: found[0], where) if found else contextlib.nullcontext()


@contextlib.contextmanager
def _announced(find: Callable[[], Processes | None], where: str) -> Iterator[None]:
    around = _BEGINNING.get()
    if around is not None and not around.is_over:  # the same call
        yield
        return
    beginning = _Beginning()
    others = find()
    owns = others is not None and others.caller is None and not AXES.get()
    if others is not None and not AXES.get():
        if not owns and others.caller != threading.get_ident():
            raise RuntimeError(f"{where}: another thread is in a call on this mesh. One call at a time: use a lock")
        others.calls += 1
    token = _BEGINNING.set(beginning)
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
        _BEGINNING.reset(token)
        if owns and others is not None:
            others.caller = None


def begin(processes: Processes, place: Place) -> None:
    """Begin a call in all processes that nothing has to be known of."""
    beginning = _BEGINNING.get()
    if beginning is not None:
        beginning.is_over = True
    processes.wire.agree(place)


class _Beginning:
    """Whether a call has begun in all processes."""

    is_over = False


_BEGINNING: contextvars.ContextVar[_Beginning | None] = contextvars.ContextVar("fdp_beginning", default=None)
