"""Some processes and what goes between them, over torch.distributed: numbers, objects, sums, and their tensors."""

import contextlib
import datetime
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from fdp._placement.moves import bytes_of
from fdp._trees import torch_private
from fdp._trees.tracebacks import text_of
from fdp.distributed._buckets import Packing, kind_of
from fdp.distributed._notices import NOTICES, Notices
from fdp.distributed._underway import PendingOperation, has_been_left, leave_off
from fdp.distributed._waits import Wait


class Elsewhere(RuntimeError):
    """Raised where another process has failed, or has gone elsewhere."""

    def __reduce__(self) -> Any:
        return RuntimeError, self.args  # for those who load it, too


Elsewhere.__name__ = Elsewhere.__qualname__ = "RuntimeError"  # for users it is one
Elsewhere.__module__ = "builtins"


@final
class Communicator:
    """Some processes, by their ranks in the mesh, and the group in which they talk."""

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        width: int,
        timeout: datetime.timedelta,
        notices: Notices = NOTICES,
    ) -> None:
        self.group: Any = group
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.rank: int = rank
        self._width, self._timeout, self._notices = width, timeout, notices
        kinds = str(dist.get_backend_config(group))
        self._control = torch.device("cpu") if "cpu:" in kinds or "gloo" in kinds else torch.device("cuda")
        self._is_gloo = "gloo" in kinds
        self._missed: str | None = None  # who, once that has been asked

    def narrowed(self, ranks: tuple[int, ...]) -> "Communicator | None":
        """One between some of these processes, all of which make it together; None if this is none of them."""
        name, members = "new connections", [self._global(self.ranks.index(rank)) for rank in ranks]
        wait = Wait(name, self.rank, self._timeout, self._notices)
        with self._explained(name):
            group = wait.result_of(lambda: dist.new_group(members, self._timeout), f"process {self._others()}")
        return Communicator(group, ranks, self.rank, self._width, self._timeout) if self.rank in ranks else None

    @property
    def position(self) -> int:
        """Which of the processes this is."""
        return self.ranks.index(self.rank)

    def begin_header(self, numbers: Sequence[int], name: str) -> Callable[[], list[list[int]]]:
        """The numbers of every process. All headers have one size, or nobody could compare them."""
        assert len(numbers) <= self._width
        padded = [*numbers, *[0] * (self._width - len(numbers))]
        header = torch.tensor(padded, dtype=torch.int64, device=self._control)
        table = [torch.empty_like(header) for _ in self.ranks]
        wait = self._start(name, header, lambda: dist.all_gather(table, header, group=self.group, async_op=True))

        def finish() -> list[list[int]]:
            wait()
            return [row.tolist() for row in table]

        return finish

    def objects(self, value: Any, name: str) -> list[Any]:
        """The value of every process, pickled on the way."""
        with self.to_the_end():
            return self._objects(value, name)

    def _objects(self, value: Any, name: str) -> list[Any]:
        try:
            own = b"\1" + pickle.dumps(value)
        except Exception as error:  # the others are told, or they would wait
            own = b"\0" + f"{type(error).__name__}: {text_of(error)}".encode(errors="backslashreplace")
        with _untransformed():
            found = self._all_bytes(own, name)
        for rank, data in zip(self.ranks, found, strict=True):
            if not data[0]:
                problem = data[1:].decode()
                raise Elsewhere(f"{name}: what process {rank} has to say to the others cannot be pickled: {problem}")
        return [pickle.loads(data[1:]) for data in found]

    def _all_bytes(self, own: bytes, name: str) -> list[bytes]:
        """The bytes of every process, not none; `dist.all_gather_object` would need numpy."""
        sizes = self._gathered(torch.tensor([len(own)], device=self._control), name)
        room = max(int(size) for size in sizes)
        sent = torch.frombuffer(bytearray(own.ljust(room)), dtype=torch.uint8).to(self._control)
        arrived = self._gathered(sent, name)
        return [bytes_of(x.cpu())[: int(size)] for x, size in zip(arrived, sizes, strict=True)]

    def _gathered(self, tensor: Tensor, name: str) -> list[Tensor]:
        """Tensors of one shape and dtype."""
        found = [torch.empty_like(tensor) for _ in self.ranks]
        self._start(name, tensor, lambda: dist.all_gather(found, tensor, group=self.group, async_op=True))()
        return found

    def sums(
        self,
        tensors: Sequence[Tensor],
        name: str,
        ours: Sequence[bool] = (),
        dtypes: Sequence[torch.dtype | None] | None = None,
    ) -> list[Tensor]:
        """The sum over all processes, tensor by tensor, in memory of its own; for those that are `ours` in theirs.

        Real numbers may be sent as other `dtypes`.
        """
        packing = Packing([kind_of(x) for x in tensors], dtypes)
        flats = [packing.packed(k, tensors, ours or [False] * len(tensors)) for k in range(len(packing.buckets))]
        group: Any = self.group or dist.group.WORLD  # dist.all_reduce asks much of its arguments
        sent = [flat for flat in flats if flat.numel()]
        for wait in [self._start(name, flat, functools.partial(group.allreduce, [flat])) for flat in sent]:
            wait()
        return packing.unpacked(flats, tensors)

    def all(self, tensor: Tensor, name: str) -> list[Tensor]:
        """The tensor of every process; their shapes may differ, but not how many dimensions they have."""
        shape = torch.tensor(tensor.shape, dtype=torch.int64, device=self._control)
        shapes = self._gathered(shape, name) if tensor.ndim else [shape] * len(self.ranks)
        sizes = [torch.Size(x.tolist()) for x in shapes]
        room = max(size.numel() for size in sizes) * tensor.element_size()
        sent = torch.zeros(room, dtype=torch.uint8, device=tensor.device)
        own = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        sent[: own.numel()] = own
        arrived = self._gathered(sent, name)
        return [
            x[: size.numel() * tensor.element_size()].view(tensor.dtype).reshape(size)
            for x, size in zip(arrived, sizes, strict=True)
        ]

    def share(self, tensor: Tensor, position: int, name: str) -> None:
        """Overwrite the tensor, which is contiguous, by that of one of the processes."""
        data = tensor.view(-1).view(torch.uint8)
        source = self._global(position)
        self._start(name, data, lambda: dist.broadcast(data, source, group=self.group, async_op=True))()

    def _others(self) -> str:
        return ", ".join(str(rank) for rank in self.ranks if rank != self.rank)

    def _global(self, position: int) -> int:
        return position if self.group is None else dist.get_global_rank(self.group, position)

    def _start(self, name: str, tensor: Tensor, operation: Callable[[], Any]) -> Callable[[], None]:
        """Begin an operation on a tensor; what is returned waits for it."""
        if has_been_left(dist.group.WORLD):
            raise Elsewhere(
                f"{name}: Ctrl-C has ended a wait of process {self.rank} before, so it does not know where the others "
                "are. Restart the program. To save something at Ctrl-C, have a handler set a flag, and stop where all "
                "processes agree on it"
            )
        with self._explained(name):
            if tensor.device.type != "cpu" or not self._is_gloo:
                work = operation()
                return lambda: self._wait(name, work.wait)
            own = PendingOperation(operation, self.group, self.ranks, self.rank)
        return lambda: self._wait(name, lambda: own.wait(self._timeout, self._meanwhile(name, own)), own)

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Around what all processes do together: who leaves it by Ctrl-C is out of step, and must not go on.

        It would meet others with messages of other sizes, which end a process.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            leave_off(dist.group.WORLD)
            raise

    def _meanwhile(self, name: str, operation: PendingOperation) -> Callable[[], None]:
        """What is said where an operation is waited for long."""
        say = self._notices.begin()

        def text(seconds: float) -> str | None:
            late, limit = operation.late(self._timeout), self._timeout.total_seconds()
            waited = f"{name}: process {self.rank} has waited {seconds:.0f} s"
            return late and f"fdp: {waited} of at most {limit:g} s for {late}"

        return lambda: say(text)

    def _wait(self, name: str, wait: Callable[[], Any], operation: PendingOperation | None = None) -> None:
        with self._explained(name, operation):
            wait()

    @contextlib.contextmanager
    def _explained(self, name: str, operation: PendingOperation | None = None) -> Iterator[None]:
        try:
            with _untransformed(), self.to_the_end():
                yield
        except (RuntimeError, ValueError) as error:
            if self._missed is None and operation is not None:
                self._missed = operation.who(self._timeout)
            raise Elsewhere(
                f"{name}: process {self.rank} could not reach all of the others ({self._others()})"
                f"{self._missed or ''}. One has ended, or did not come within the {self._timeout.total_seconds():g} "
                f"seconds of fdp.distributed.init(timeout=...). torch.distributed says: {first_sentence(error)}"
            ) from error


def _untransformed() -> contextlib.AbstractContextManager[object]:
    """What is said has nothing to do with what is being transformed here."""
    return torch_private.without_transforms() if torch_private.is_transformed() else contextlib.nullcontext()


def first_sentence(error: BaseException) -> str:
    """What torch says, without its advice."""
    return (str(error).splitlines() or [""])[0].split(". This is")[0]
