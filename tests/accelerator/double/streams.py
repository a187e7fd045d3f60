"""Streams on which nothing runs late, but where it is an error not to wait.

Each stream has a vector clock: how far it has come, and how far each other stream had come when it last waited for it.
A storage notes who wrote to it last, and who has read since. An operation on a stream needs what it reads to have been
written before, as its clock says, and what it writes to have been read.

The host has one clock for all threads: what it has waited for is over, whoever waited.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType

from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor

Key = tuple[int, int]  # the index of a device, and the number of a stream there
Clock = dict[Key, int]

_LOCK = threading.RLock()
_CLOCKS: dict[Key, Clock] = {}
_HOST: Clock = {}
_NUMBERS = itertools.count(1)
_KIND = DeviceType.PrivateUse1.value


class Unordered(RuntimeError):
    """An operation did not wait for another that it needs."""


class Event:
    """A place in a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: "Stream | None" = None) -> None:
        with _LOCK:
            self.clock = dict(_clock(_key(stream or current_stream())))

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        with _LOCK:
            _merge(_HOST, self.clock)


class Stream(torch.Stream):
    """A stream of a virtual device; a new one each time, but for number 0."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> "Stream":
        number = next(_NUMBERS) if number is None else number
        index = virtual.index_of(device)
        made: Any = super().__new__(cls, stream_id=number, device_index=index, device_type=_KIND)
        return made

    def wait_stream(self, other: Any) -> None:
        with _LOCK:
            _merge(_clock(_key(self)), _clock(_key(other)))

    def wait_event(self, event: Any) -> None:
        with _LOCK:
            _merge(_clock(_key(self)), event.clock)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        with _LOCK:
            _merge(_HOST, _clock(_key(self)))

    def query(self) -> bool:
        return True

    def __enter__(self) -> Any:
        _HERE.before.append((virtual.current_device(), current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        index, before = _HERE.before.pop()
        set_stream(before)
        virtual.set_device(index)


class _Here(threading.local):
    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}
        self.before: list[tuple[int, Stream]] = []


_HERE = _Here()


def current_stream(device: Any = None) -> Stream:
    """That of this thread."""
    index = virtual.index_of(device)
    return _HERE.current.get(index) or Stream(index, number=0)


def set_stream(stream: Any) -> None:
    """Make it the current one, and its device too, as on CUDA."""
    virtual.set_device(stream.device_index)
    _HERE.current[stream.device_index] = stream


def stream(stream: Stream) -> Stream:
    """As a context: the current one, as `torch.cuda.stream` has it."""
    return stream


def synchronize(device: Any = None) -> None:
    """The host waits for all streams of a device."""
    index = virtual.index_of(device)
    with _LOCK:
        for key, clock in _CLOCKS.items():
            if key[0] == index:
                _merge(_HOST, clock)


# ---- who has written and read


class Notes:
    """Of a storage: the last writer, and readers since."""

    def __init__(self) -> None:
        self.writer: tuple[Key, int, str] | None = None
        self.readers: dict[Key, tuple[int, str]] = {}


def reads(name: str, tensors: Iterable[VirtualTensor]) -> None:
    """An operation reads, on the current streams."""
    with _LOCK:
        for tensor in tensors:
            key, clock = _step(tensor)
            notes = _notes(tensor)
            _check(name, "reads", key, clock, notes.writer)
            notes.readers[key] = (clock[key], name)


def writes(name: str, tensors: Iterable[VirtualTensor]) -> None:
    """An operation writes, on the current streams."""
    with _LOCK:
        for tensor in tensors:
            key, clock = _step(tensor)
            notes = _notes(tensor)
            _check(name, "writes to", key, clock, notes.writer)
            for reader, (at, other) in notes.readers.items():
                _check(name, "writes to", key, clock, (reader, at, other))
            notes.writer, notes.readers = (key, clock[key], name), {}


def host_waits(device: torch.device) -> None:
    """The host waits for the current stream of a device."""
    with _LOCK:
        _merge(_HOST, _clock(_key(current_stream(device))))


def both_wait(one: torch.device, other: torch.device) -> None:
    """The current streams of two devices wait for each other, as around a copy from one GPU to another."""
    with _LOCK:
        a, b = _clock(_key(current_stream(one))), _clock(_key(current_stream(other)))
        _merge(a, b)
        _merge(b, a)


@contextlib.contextmanager
def all_wait() -> Iterator[None]:
    """Before and after, all streams wait for each other, as those of a backward do for what its nodes need."""
    try:
        _all_wait()
        yield
    finally:
        _all_wait()


def _all_wait() -> None:
    with _LOCK:
        latest: Clock = {}
        for clock in _CLOCKS.values():
            _merge(latest, clock)
        for clock in _CLOCKS.values():
            clock.update(latest)


def _step(tensor: VirtualTensor) -> tuple[Key, Clock]:
    key = _key(current_stream(tensor.device))
    clock = _clock(key)
    _merge(clock, _HOST)
    clock[key] += 1
    return key, clock


def _notes(tensor: VirtualTensor) -> Notes:
    storage = _storage(tensor.host)
    notes = getattr(storage, "notes", None)
    if notes is None:
        notes = storage.notes = Notes()
    return notes


def _check(name: str, does: str, key: Key, clock: Clock, other: tuple[Key, int, str] | None) -> None:
    if other is not None and clock.get(other[0], 0) < other[1]:
        raise Unordered(
            f"{name}: stream {key[1]} of virtual:{key[0]} {does} what {other[2]} used on stream {other[0][1]} of "
            f"virtual:{other[0][0]}, and has not waited for it"
        )


def _key(stream: Any) -> Key:
    return stream.device_index, stream.stream_id


def _clock(key: Key) -> Clock:
    return _CLOCKS.setdefault(key, {key: 0})


def _merge(clock: Clock, other: Clock) -> None:
    for key, at in other.items():
        if clock.get(key, 0) < at:
            clock[key] = at


def install() -> None:
    """Let torch and the device module know of streams."""
    core: Any = torch._C
    module: Any = virtual
    core._accelerator_getStream = current_stream
    core._accelerator_setStream = set_stream
    core._accelerator_synchronizeDevice = synchronize
    for thing in (Stream, Event, current_stream, set_stream, stream, synchronize):
        setattr(module, thing.__name__, thing)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, device=None: _pinned(self.clone())
    tensor.is_pinned = lambda self, device=None: self.layout is torch.strided and hasattr(_storage(self), _PINNED)


_PINNED = "noted_as_pinned"


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """There is no memory of that kind: it is noted."""
    setattr(_storage(tensor), _PINNED, True)
    return tensor


def _storage(tensor: torch.Tensor) -> Any:
    """The same object for all tensors with this memory."""
    return tensor.untyped_storage()
