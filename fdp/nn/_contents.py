"""The containers of a module beside those of its clone, with what was in both between calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from fdp._trees import torch_private
from fdp.nn._clone import Box, Walk, is_setting, refill, same, translate
from fdp.nn._merge import merge
from fdp.nn._reachable import ATOMS, content

OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")  # recurrent modules make them of what is bound


@final
class Contents:
    """The attributes, registries and other containers of the modules of a walk.

    Most calls change nothing, and that is seen without looking into the dicts that are not empty.
    """

    def __init__(self, walk: Walk) -> None:
        boxes = [*walk.registries, *walk.containers]
        self._states, self._containers, self._secondary = walk.states, walk.containers, walk.secondary
        self._empty = [box for box in boxes if not box.seen]
        self._registries = [box for box in walk.registries if box.seen and isinstance(box.seen, dict)]
        self._full = [box for box in walk.registries if box.seen and not isinstance(box.seen, dict)]
        self._full += [box for box in walk.containers if box.seen]
        # In the order of memory, which is read faster so. It is what takes most of the time.
        filled = sorted(walk.states + self._registries, key=lambda box: id(box.original))
        self._now, self._seen = [box.original for box in filled], _Dicts([box.seen for box in filled])
        self._nothing = sorted((box.original for box in self._empty), key=id)
        self._blank = sorted((box.own for box in self._empty), key=id)
        self._attributes, self._idle = [box.own for box in walk.states], _Dicts([box.idle for box in walk.states])
        self._own, self._quiet = [box.own for box in self._registries], [box.idle for box in self._registries]
        self._marks: dict[str, Any] = {}

    def mark(self, marks: dict[str, Any]) -> None:
        """Have these attributes in each module of the clone, now and after each `reset`."""
        self._marks = marks
        for box in self._states:
            box.idle.update(marks)
            box.own.update(marks)
        self._idle.renew()

    def are_current(self) -> bool:
        """Whether the module's are as they were."""
        untouched = not self._seen.changed(self._now) and not any(self._nothing)
        return untouched and (not self._full or all(same(box.original, box.seen) for box in self._full))

    def take_over(self) -> dict[str, tuple[Any, Any]] | None:
        """Have in the clone what is new in the module's: before and now by path, None if a clone cannot follow."""
        if any(self._nothing) or not all(same(box.original, box.seen) for box in self._secondary):
            return None
        for box in self._states:
            if not self._marks.keys().isdisjoint(box.seen):  # it has such attributes itself
                return None
            for key in self._marks:
                del box.idle[key]
        changes: dict[str, tuple[Any, Any]] = {}
        for box in self._states + self._registries + self._full:
            if same(box.original, box.seen):
                continue
            now = box.original.copy()  # other threads may write to it
            if not _may_take_over(box.seen, now):
                return None
            changes[box.path] = box.seen.copy(), now
            _follow(box, now, {})
        self._seen.renew()
        self.mark(self._marks)
        return changes

    def restore(self) -> None:
        """Undo what a call of the module itself has written to the module's."""
        for box in self._boxes():
            if not same(box.original, box.seen):
                refill(box.original, box.seen)

    def reset(self) -> None:
        """Undo what a call of the clone has written to the clone's."""
        for i in self._idle.changed(self._attributes):
            refill(self._attributes[i], self._states[i].idle)
        if not self._are_quiet():
            for box in self._boxes():
                if not same(box.own, box.idle):
                    refill(box.own, box.idle)

    def _are_quiet(self) -> bool:
        """Whether all but the attributes of the clone are as they were."""
        # In registries there are modules, functions and marks: what is equal is the same.
        untouched = self._own == self._quiet and not any(self._blank)
        return untouched and (not self._full or all(same(box.own, box.idle) for box in self._full))

    def write_back(self, originals: Callable[[], dict[int, Any]], *, attributes: bool) -> list[Any]:
        """Do to the module's what a call has done to the clone's. What of it is no number, string or tensor?

        Without attributes and registries if only containers are asked for.
        """
        if attributes and not self._idle.changed(self._attributes) and self._are_quiet():
            return []
        boxes = self._boxes() if attributes else self._containers
        changed = [box for box in boxes if not _is_of_parameters(box) and not same(box.own, box.idle)]
        table = originals() | {id(box.own): box.original for box in self._boxes()} if changed else {}
        others: list[Any] = []
        for box in changed:
            now = _carry(box.own, table, box.idle, box.seen)
            others += [value for value in _not_in(box.seen, now) if not _are_plain([value])]
            merge(box.original, box.seen, now)
        return others

    def are_filled(self) -> bool:
        """Whether a call has changed a list, dict or set of the clone."""
        return any(not same(box.own, box.idle) for box in self._containers if not _is_of_parameters(box))

    def catch_up(self, clones: Callable[[], dict[int, Any]]) -> None:
        """Have in the clone's containers what has come into the module's since."""
        changed = [box for box in self._containers if not same(box.original, box.seen)]
        table = clones() | {id(box.original): box.own for box in self._boxes()} if changed else {}
        for box in changed:
            _follow(box, box.original.copy(), table)
            refill(box.own, box.idle)

    def _boxes(self) -> list[Box]:
        return self._states + self._registries + self._full + self._empty + self._secondary


@final
class _Dicts:
    """What some dicts are to hold. One of which the version is that of the last look has not been written to since."""

    def __init__(self, expected: Sequence[dict[Any, Any]]) -> None:
        self._expected = expected
        self.renew()

    def renew(self) -> None:
        """Something else is expected from now on."""
        self._versions = [-1] * len(self._expected)

    def changed(self, dicts: Sequence[dict[Any, Any]]) -> list[int]:
        """Which dicts do not hold the expected objects under the expected keys."""
        versions = list(map(torch_private.dict_version, dicts))
        if versions == self._versions:
            return []
        written = [i for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then]
        found = [i for i in written if not same(dicts[i], self._expected[i])]
        if not found:
            self._versions = versions  # of before the look: other threads may have written since
        return found


def _is_of_parameters(box: Box) -> bool:
    return box.path.rpartition(".")[2] in OF_PARAMETERS


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
    skipped = {key: after[key] for key in OF_PARAMETERS if key in after}
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
