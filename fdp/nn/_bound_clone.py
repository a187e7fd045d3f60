"""A private clone of a module that is called in its place, bound to other tensors each time."""

import sys
from collections.abc import Container
from typing import Any, final

from torch import Tensor, nn

from fdp._transforms.own_statistics import may_take_own, takes_own
from fdp._trees import torch_private
from fdp.nn._clone import Walk, items, join_path
from fdp.nn._contents import Contents
from fdp.nn._reachable import may_lead_to
from fdp.nn._tensor_slots import TensorSlots


@final
class Skeleton:
    """A clone of a module, to call with other tensors than the module's, by one thread at a time.

    `trusted` says that calling the clone is calling the module: nothing that the two share leads back to the module.
    Unless `cyclic`, a skeleton does not keep its module alive. `slots` are its parameters and buffers.
    `is_kept` says that forward has put something that leads to the clone into a container of the module.
    `has_own_statistics` says that several slots do not compute what one device does.
    """

    def __init__(self, module: nn.Module, *, shares: bool = False) -> None:
        walk = Walk(module, shares=shares)
        self._is_safe = walk.trusted and not walk.is_reached_from(walk.shared)
        self.cyclic = walk.cyclic or not self._is_safe or walk.is_reached_from(walk.unread)
        self.root = walk.root if self._is_safe else nn.Module()
        self._kinds, self._children = [type(part) for part, _ in walk.modules], [part for part, _ in walk.modules[1:]]
        self._clones = [clone for _, clone in walk.modules]
        self.ids = frozenset(map(id, self._clones))
        self.original_ids = frozenset(id(part) for part, _ in walk.modules)
        self.contents = Contents(walk)
        registered = set(map(id, module.modules()))
        self._registries = [(id(owner) in registered, kind, box) for owner, kind, box in walk.slots]
        self._tensors = walk.tensors
        self._place(module)
        self.reset()
        boxes = [*walk.states, *(box for box in walk.registries if box.seen), *walk.containers]
        self._parts = [*self._clones, *(box.own for box in boxes)]
        self._marks: dict[str, Any] = {}
        self.is_kept = False
        self.has_buffers = any(kind == "_buffers" and box.seen for _, kind, box in self._registries)
        del walk, boxes
        self._counts = list(map(sys.getrefcount, self._parts))

    def _place(self, module: nn.Module) -> None:
        """Find the names of the tensors."""
        self.slots = TensorSlots(module, self.pairs(module), self._registries)
        named = self.slots.params.keys() | self.slots.buffers.keys()
        self._plain = {path: tensor for path, tensor in self._tensors.items() if id(tensor) not in self.slots.ids}
        # A subclass may name what is in no registry.
        self.trusted = self._is_safe and named == set(self.slots.names)
        parts = (module, *self._children)
        self.has_own_statistics = any(may_take_own(part) and takes_own(part) for part in parts)

    def is_current(self, module: nn.Module) -> bool:
        """Whether this is what the module is now. Numbers, strings and tensors that were set anew are taken over."""
        if [type(module), *map(type, self._children)] != self._kinds:
            return False
        return self.contents.are_current() or self._take_over(module)

    def _take_over(self, module: nn.Module) -> bool:
        changes = self.contents.take_over()
        if changes is None:
            return False
        for path, (before, now) in changes.items():
            for key, _ in items(before):
                self._tensors.pop(join_path(path, key), None)
            self._tensors |= {join_path(path, key): value for key, value in items(now) if isinstance(value, Tensor)}
        self._place(module)  # other tensors may be tied
        self.reset()
        return True

    def pairs(self, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Each module inside the module, itself first, and its clone."""
        return list(zip([module, *self._children], self._clones, strict=False))  # no clone of a scripted module

    def has(self, kind: type[nn.Module]) -> bool:
        """Whether there is a module of a class inside."""
        return any(issubclass(each, kind) for each in self._kinds)

    def mark(self, marks: dict[str, Any]) -> None:
        """Have these attributes in each module of the clone, in this call and later ones."""
        if self._marks is not marks:
            self._marks = marks
            self.contents.mark(marks)

    def versions(self) -> dict[str, int]:
        """How often each tensor that is neither a parameter nor a buffer was written in place, by its path."""
        return {path: torch_private.version(x) for path, x in self._plain.items() if not x.is_inference()}

    def is_held(self) -> bool:
        """Whether something else refers to a part of the clone, such as a checkpoint that will run it again."""
        return list(map(sys.getrefcount, self._parts)) != self._counts

    def reset(self) -> None:
        """Forget what a call has bound and written."""
        self.slots.release()
        self.contents.reset()

    def write_back(self, module: nn.Module, names: Container[str] | None = None) -> None:
        """Do to the containers of the module what the last call has done to those of the clone.

        Given the bound names, do so to its attributes and registries too, but for what is under them.
        """
        bound = [] if names is None else self.slots.take_out(names)
        others = self.contents.write_back(
            lambda: {id(clone): part for part, clone in self.pairs(module)}, attributes=names is not None
        )
        self.cyclic |= bool(others)  # what was written may be the module
        self.is_kept |= bool(others) and may_lead_to(others, self.ids)
        for slot, key, now in bound:
            slot[key] = now

    def catch_up(self, module: nn.Module) -> None:
        """Have in the clone's containers what has come into those of the module meanwhile."""
        self.contents.catch_up(lambda: {id(part): clone for part, clone in self.pairs(module)})
