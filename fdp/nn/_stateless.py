"""A private clone of a module that is called in its place, bound to other tensors each time."""

import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import getitem, is_
from typing import Any, final

from torch import Tensor, nn

from fdp._trees import torch_private
from fdp._trees.untraced import leave_alone
from fdp.nn._clone import (
    OF_PARAMETERS,
    REGISTRIES,
    Walk,
    has_gained_objects,
    holds_parameters,
    items,
    join_path,
    refill,
    same,
)
from fdp.nn._reachable import ATOMS, of_library
from fdp.nn._slots import TensorSlots

_set_state: Callable[[nn.Module, dict[str, Any]], None] = vars(nn.Module)["__dict__"].__set__  # not Module.__setattr__


@final
class Skeleton:
    """A clone of a module, to call with other tensors than the module's, by one thread at a time.

    `trusted` says that calling the clone is calling the module: nothing that the two share leads back to the module.
    Unless `cyclic`, a skeleton does not keep its module alive. If it `shares`, what a call puts into lists, dicts and
    sets of the module is in those of the module at once; containers with modules in them are never shared.
    `slots` are its parameters and buffers.
    """

    def __init__(self, module: nn.Module, *, shares: bool = True) -> None:
        walk = Walk(module, shares=shares)
        self._is_safe = walk.trusted and not walk.is_reached_from(walk.shared)
        self.cyclic = walk.cyclic or not self._is_safe or walk.is_reached_from(walk.unread)
        self.root = walk.root if self._is_safe else nn.Module()
        self._class = type(module)
        self._children = [original for original, _ in walk.modules[1:]]
        self._child_classes = list(map(type, self._children))
        self._clones = [clone for _, clone in walk.modules]
        self.ids = frozenset(map(id, self._clones))
        self.original_ids = frozenset(id(original) for original, _ in walk.modules)
        self._tensors = walk.tensors
        self._keep(walk)
        registered = set(map(id, module.modules()))
        self._registries = [(id(owner) in registered, kind, box.seen, box.clone) for owner, kind, box in walk.slots]
        self._watch(walk)
        self._place(module)
        self._fillable = walk.fillable() if self._is_safe else []
        self.reset()
        self._parts = [*self._clones, *self._own, *(box.clone for box in walk.boxes if not box.seen)]
        del walk
        self._counts = list(map(sys.getrefcount, self._parts))

    def _keep(self, walk: "Walk") -> None:
        """What module and clone hold while nothing runs, in flat lists that C code can compare."""
        quiet = [box for box in walk.registries if box.seen]
        full = walk.states + quiet + [box for box in walk.boxes if box.seen]
        empty = [box for box in walk.registries + walk.boxes if not box.seen]
        states = len(walk.states)
        common = [*full, *walk.common.values()]  # these at the end have no place in the lists that follow
        self._paths = [box.path for box in common]
        self._full, self._seen = [box.original for box in common], [box.seen for box in common]
        self._own, self._idle = [box.clone for box in full[states:]], [box.clone.copy() for box in full]
        self._idle_states, self._idle_own = self._idle[:states], self._idle[states:]
        self._quiet, self._idle_quiet = self._own[: len(quiet)], self._idle_own[: len(quiet)]
        self._empty, self._blank = [box.original for box in empty], [box.clone for box in empty]

    def _watch(self, walk: "Walk") -> None:
        """The entries of which equality does not tell whether they are the same, in what the clone has copies of."""
        states = {id(vars(module)): of_library(type(module).__module__) for module, _ in walk.modules}
        watched = [
            (original, seen, key)
            for original, seen, _ in zip(self._full, self._seen, self._idle, strict=False)
            for key, value in items(seen)
            if not _equal_is_same(value, states.get(id(original), False))
            and not (key in REGISTRIES and id(original) in states)
        ]
        self._at, self._seen_at = [at for at, _, _ in watched], [seen for _, seen, _ in watched]
        self._keys = [key for _, _, key in watched]
        self._values = list(map(getitem, self._seen_at, self._keys))

    def _place(self, module: nn.Module) -> None:
        """Find the names of the tensors."""
        self.slots = TensorSlots(module, self.pairs(module), self._registries)
        named = self.slots.params.keys() | self.slots.buffers.keys()
        self._plain = {path: tensor for path, tensor in self._tensors.items() if id(tensor) not in self.slots.ids}
        # A subclass may name what is in no registry.
        self.trusted = self._is_safe and named == set(self.slots.names)

    def is_current(self, module: nn.Module) -> bool:
        """Whether this is what the module is now. Numbers, strings and tensors that were set anew are taken over."""
        if type(module) is not self._class or list(map(type, self._children)) != self._child_classes:
            return False
        if any(self._empty):
            return False
        try:
            # Identity first: `==` takes 1 for True, and on tensors it is an operation.
            equal = all(map(is_, map(getitem, self._at, self._keys), self._values)) and self._full == self._seen
        except Exception:  # a key is gone, or an `==` does not compare: something has changed
            equal = False
        return equal or self._take_over(module)

    def _take_over(self, module: nn.Module) -> bool:
        tensors = False
        for path, original, seen, idle in zip(self._paths, self._full, self._seen, self._all_idle(), strict=False):
            if idle is None:
                if has_gained_objects(original, seen):
                    return False
                refill(seen, original.copy())
                continue
            if same(original, seen):
                continue
            if not isinstance(original, dict) or original.keys() != seen.keys():
                return False
            for key in [key for key, value in seen.items() if original[key] is not value]:
                value = original[key]
                if not _is_alike(value, seen[key]):
                    return False
                seen[key] = idle[key] = value
                if isinstance(value, Tensor):
                    self._tensors[join_path(path, key)], tensors = value, True
        self._values = list(map(getitem, self._seen_at, self._keys))
        if tensors:
            self._place(module)  # other tensors may be tied
        self.reset()
        return True

    def pairs(self, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Each module inside the module, itself first, and its clone."""
        return list(zip([module, *self._children], self._clones, strict=False))  # no clone of a scripted module

    def states(self) -> list[dict[str, Any]]:
        """The `__dict__` of each module of the clone."""
        return list(map(vars, self._clones))

    def fillable(self) -> Iterator[tuple[Any, Any]]:
        """Where the clone has containers that it shares with the module and that forward may fill: holder and key."""
        for holder, key in self._fillable:
            yield vars(holder) if isinstance(holder, nn.Module) else holder, key

    def versions(self) -> dict[str, int]:
        """How often each tensor that is neither a parameter nor a buffer was written in place, by its path."""
        return {path: torch_private.version(x) for path, x in self._plain.items() if not x.is_inference()}

    def is_held(self) -> bool:
        """Whether something else refers to a part of the clone, such as a checkpoint that will run it again."""
        return list(map(sys.getrefcount, self._parts)) != self._counts

    def reset(self) -> None:
        """Forget what a call has bound and written."""
        self.slots.release()
        any(map(_set_state, self._clones, map(dict.copy, self._idle_states)))
        first = len(self._quiet)
        if any(self._blank) or self._quiet != self._idle_quiet:
            first = 0
            for box in self._blank:
                box.clear()
        for own, idle in zip(self._own[first:], self._idle_own[first:], strict=True):
            if not same(own, idle):
                refill(own, idle)

    def _all_idle(self) -> Iterator[Any]:
        """What each container has while nothing runs, None for those that are the module's own."""
        return chain(self._idle, repeat(None))

    def write_back(self, module: nn.Module, names: Container[str]) -> None:
        """Write to the module what the last call has written to the clone, but for what is under the bound names."""
        bound = self.slots.take_out(names)
        states = self.states()
        if not self._is_untouched(states):
            self._write(module, [*states, *self._own, *self._blank])
        self.translate(module)
        for slot, key, now in bound:
            slot[key] = now

    def _is_untouched(self, states: list[dict[str, Any]]) -> bool:
        idle = self._idle_states
        return (
            list(map(len, states)) == list(map(len, idle))
            and all(map(is_, _all_values(states), _all_values(idle)))
            and not any(self._blank)
            and all(map(same, self._own, self._idle_own))
        )

    def _write(self, module: nn.Module, own: list[Any]) -> None:
        to = self._full[: len(self._idle)] + self._empty
        originals = dict(zip(map(id, own), to, strict=True)) | self._originals(module)
        for original, now, idle in zip(to, own, chain(self._idle, repeat({})), strict=False):
            if same(now, idle):
                continue
            if isinstance(now, dict):
                for key in idle.keys() - now.keys():
                    original.pop(key, None)
                fresh = {key: value for key, value in now.items() if key not in idle or idle[key] is not value}
                fresh = {key: value for key, value in fresh.items() if key not in OF_PARAMETERS}
                original.update(_translate(fresh, originals))
            else:
                refill(original, _translate(list(now), originals))

    def lost(self) -> list[str]:
        """Containers with modules in them, which are the clone's own, that the last call has written to."""
        first, quiet = len(self._idle_states), len(self._quiet)
        boxes = zip(self._paths[first:], self._own, self._idle_own, strict=False)
        return [path for path, own, idle in list(boxes)[quiet:] if not same(own, idle) and not holds_parameters(path)]

    def translate(self, module: nn.Module) -> None:
        """Where a call has put a clone into a container of the module's, put what it is a clone of."""
        count = len(self._idle)
        for box, seen in zip(self._full[count:], self._seen[count:], strict=True):
            if has_gained_objects(box, seen):
                found = box.copy() if isinstance(box, dict) else list(box)
                now = _translate(found, self._originals(module))
                if not same(now, found):
                    refill(box, now)
                    self.cyclic = True  # it may be the module

    def _originals(self, module: nn.Module) -> dict[int, Any]:
        return dict(zip(map(id, self._clones), [module, *self._children], strict=True))

    def restore(self) -> None:
        """Undo what a call of the module itself has written to it."""
        for original, seen in zip(self._full, self._seen, strict=True):
            if not same(original, seen):
                refill(original, seen)
        for original in self._empty:
            original.clear()


def _translate(value: Any, originals: Mapping[int, Any]) -> Any:
    """The value with clones replaced by what they are clones of."""
    if id(value) in originals:
        return originals[id(value)]
    if type(value) is dict:
        return {_translate(key, originals): _translate(item, originals) for key, item in value.items()}
    if type(value) in (list, tuple):
        parts = [_translate(item, originals) for item in value]
        return value if all(map(is_, parts, value)) else type(value)(parts)
    if type(value) is types.MethodType and id(value.__self__) in originals:
        return types.MethodType(value.__func__, originals[id(value.__self__)])
    return value


def _equal_is_same(value: Any, in_library: bool) -> bool:
    """Whether what equals the value can only be the value, or for the code of a library might as well be."""
    if in_library and (type(value) in ATOMS or type(value) is tuple):
        return True
    return isinstance(value, str) or type(value).__eq__ is object.__eq__


def _is_alike(value: Any, before: Any) -> bool:
    """Whether one may stand in a clone in place of the other."""
    both_tensors = isinstance(value, Tensor) and isinstance(before, Tensor)
    return both_tensors or (type(value) is type(before) and type(value) in ATOMS)


def _all_values(boxes: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, boxes))


leave_alone(globals())
