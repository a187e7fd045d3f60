"""The containers of a module beside those of its clone, with what was in both between calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, final

from torch import Tensor, nn

from fdp._execution.alone import be_alone
from fdp._trees.untraced import leave_alone
from fdp.nn._clone import REGISTRIES, Box, Walk, is_setting, refill, same, translate
from fdp.nn._merge import merge
from fdp.nn._reachable import ATOMS, content, of_library

_set_state: Callable[[nn.Module, dict[str, Any]], None] = vars(nn.Module)["__dict__"].__set__  # not Module.__setattr__
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})  # recurrent modules make them of what is bound


@final
class Contents:
    """The attributes, registries and other containers of the modules of a walk.

    Lists of them that C code can compare stand beside the boxes: most calls change nothing.
    """

    def __init__(self, walk: Walk) -> None:
        boxes = [*walk.registries, *walk.containers]
        self._states, self._containers = walk.states, walk.containers
        self._empty = [box for box in boxes if not box.seen]
        self._registries = [box for box in walk.registries if box.seen and isinstance(box.seen, dict)]
        self._full = [box for box in walk.registries if box.seen and not isinstance(box.seen, dict)]
        self._full += [box for box in walk.containers if box.seen]
        self._in_library = [of_library(type(module).__module__) for module, _ in walk.modules]
        self._now = [box.original for box in walk.states + self._registries]
        self._nothing, self._blank = [box.original for box in self._empty], [box.own for box in self._empty]
        self._clones, self._attributes = [box.own for box in walk.states], [box.idle for box in walk.states]
        self._own, self._quiet = [box.own for box in self._registries], [box.idle for box in self._registries]

    def look(self) -> None:
        """Remember what is in the boxes."""
        libraries = chain(self._in_library, repeat(None))
        self._expected = list(map(_expect, self._states + self._registries, libraries))
        self._idle = _Dicts(self._attributes)

    def are_current(self) -> bool:
        """Whether the module's are as they were. Identity is asked for where an `==` would take 1 for True."""
        try:
            untouched = self._expected == self._now and not any(self._nothing)
            return untouched and (not self._full or all(same(box.original, box.seen) for box in self._full))
        except Exception:  # an `==` does not compare
            return False

    def take_over(self) -> dict[str, tuple[Any, Any]] | None:
        """Have in the clone what is new in the module's: before and now by path, None if a clone cannot follow."""
        if any(self._nothing):
            return None
        changes: dict[str, tuple[Any, Any]] = {}
        for box in self._states + self._registries + self._full:
            if same(box.original, box.seen):
                continue
            now = box.original.copy()  # other threads may write to it
            if not _may_take_over(box.seen, now):
                return None
            changes[box.path] = box.seen.copy(), now
            _follow(box, now, {})
        return changes

    def restore(self) -> None:
        """Undo what a call of the module itself has written to the module's."""
        for box in self._states + self._registries + self._full + self._empty:
            if not same(box.original, box.seen):
                refill(box.original, box.seen)

    def reset(self) -> None:
        """Undo what a call of the clone has written to the clone's."""
        any(map(_set_state, self._clones, map(dict.copy, self._attributes)))
        if not self._are_quiet():
            for box, own in self._both():
                if not same(own, box.idle):
                    refill(own, box.idle)

    def _are_quiet(self) -> bool:
        """Whether all but the attributes of the clone are as they were."""
        # In registries there are modules, functions and marks: what is equal is the same.
        untouched = self._own == self._quiet and not any(self._blank)
        return untouched and (not self._full or all(same(box.own, box.idle) for box in self._full))

    def write_back(self, originals: Callable[[], dict[int, Any]], *, attributes: bool) -> bool:
        """Do to the module's what a call has done to the clone's. Was all of it numbers, strings and tensors?

        Without attributes and registries if only containers are asked for.
        """
        if attributes and self._idle.are_in(list(map(vars, self._clones))) and self._are_quiet():
            return True
        both = self._both() if attributes else ((box, box.own) for box in self._containers)
        changed = [(box, own) for box, own in both if not _is_of_parameters(box) and not same(own, box.idle)]
        if changed and attributes:
            be_alone()  # others beside this would not see it, nor this what they have written
        table = originals() | {id(own): box.original for box, own in self._both()} if changed else {}
        plain = True
        for box, own in changed:
            now = _carry(own, table, box.idle, box.seen)
            plain &= _are_plain(_not_in(box.seen, now))
            merge(box.original, box.seen, now)
        return plain

    def are_filled(self) -> bool:
        """Whether a call has changed a list, dict or set of the clone."""
        return any(not same(box.own, box.idle) for box in self._containers if not _is_of_parameters(box))

    def catch_up(self, clones: Callable[[], dict[int, Any]]) -> None:
        """Have in the clone's containers what has come into the module's since."""
        changed = [box for box in self._containers if not same(box.original, box.seen)]
        table = clones() | {id(box.original): own for box, own in self._both()} if changed else {}
        for box in changed:
            _follow(box, box.original.copy(), table)
            refill(box.own, box.idle)

    def _both(self) -> Iterator[tuple[Box, Any]]:
        """Each box with the clone's container."""
        yield from zip(self._states, map(vars, self._clones), strict=True)
        for box in self._registries + self._full + self._empty:
            yield box, box.own


@final
class _Dicts:
    """What is in some dicts, in lists that C code can compare with what others hold."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._sizes, self._keys = list(map(len, dicts)), [*chain.from_iterable(dicts)]
        self._values = [*chain.from_iterable(map(dict.values, dicts))]

    def are_in(self, dicts: Sequence[dict[Any, Any]]) -> bool:
        """Whether these hold the same objects under the same keys."""
        return (
            list(map(len, dicts)) == self._sizes
            and [*chain.from_iterable(dicts)] == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self._values))
        )


def _expect(box: Box, in_library: bool | None) -> dict[str, Any]:
    """What equals what was seen: the attributes of a module, by where its class is, or a registry."""
    expected = box.seen.copy()
    for key, value in box.seen.items():
        if not (in_library is not None and key in REGISTRIES) and not _equal_is_same(value, bool(in_library)):
            expected[key] = _Only(value)
    return expected


@final
class _Only:
    """Equals one object only."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other is self._value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _is_of_parameters(box: Box) -> bool:
    return box.path.rpartition(".")[2] in _OF_PARAMETERS


def _follow(box: Box, now: Any, clones: Mapping[int, Any]) -> None:
    refill(box.idle, _carry(now, clones, box.seen, box.idle))
    refill(box.seen, now)


def _carry(held: Any, table: Mapping[int, Any], before: Any, after: Any) -> Any:
    """What a container holds, by a table from one side to the other; what it held `before` is as it was `after`."""
    if not isinstance(held, set):  # without an order
        table = {**table, **dict(zip(map(id, content(before)), content(after), strict=True))}
    if not isinstance(held, dict):
        parts = [translate(value, table) for value in held]
        return set(parts) if isinstance(held, set) else parts
    skipped = {key: after[key] for key in _OF_PARAMETERS if key in after}
    return {translate(key, table): translate(value, table) for key, value in held.items()} | skipped


def _may_take_over(before: Any, now: Any) -> bool:
    """Whether what has changed is made of numbers, strings and tensors alone, and a clone can follow."""
    if is_setting(before) and not is_setting(now):
        return False  # the module may share it with something that is shared with the clone
    return _are_plain(_not_in(before, now) if isinstance(now, dict) else now) and _are_plain(_not_in(now, before))


def _not_in(known: Any, box: Any) -> list[Any]:
    """What one container has and another has not."""
    ids = set(map(id, content(known)))
    return [value for value in content(box) if id(value) not in ids]


def _are_plain(values: Any) -> bool:
    return all(type(value) in ATOMS or isinstance(value, Tensor) for value in values)


def _equal_is_same(value: Any, in_library: bool) -> bool:
    """Whether what equals the value can only be the value, or for the code of a library might as well be."""
    if in_library and (type(value) in ATOMS or type(value) is tuple):
        return True
    return isinstance(value, str) or type(value).__eq__ is object.__eq__


leave_alone(globals())
