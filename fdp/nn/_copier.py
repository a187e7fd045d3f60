"""Copies of what refers to modules and tensors, which refer to those of a clone."""

import functools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, final

from torch import Tensor, nn

from fdp.nn._values import ATOMS, BOXES, contents, has_atoms_only, is_setting, is_tuple


@final
class Copier:
    """Copies containers, bound methods and partials. All else is `shared`, but for tensors, which are `plain`.

    `of` are the modules and tensors of the clone by the ids of the module's; any other module that is `met` is an error
    or becomes known. If the clone `shares`, it has the containers in which there is nothing of the module.
    """

    def __init__(self, of: Mapping[int, Any], met: Callable[[nn.Module, str], Any], *, shares: bool = False) -> None:
        self._of, self._own, self._met, self._shares = dict(of), of.keys(), met, shares
        self.plain: list[tuple[str, Tensor]] = []
        self.shared: list[tuple[str, Any]] = []
        self._boxes: list[Any] = []

    def boxes(self) -> set[int]:
        """The containers that a clone has of its own, by id; not those that are mere settings."""
        return {id(box) for box in self._boxes if not is_setting(box)}

    def copy(self, value: Any, path: str) -> Any:
        """The clone's of a value of the module's."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self._of:
            return self._of[id(value)]
        if kind in BOXES:
            return self._box(value, path)
        if is_tuple(kind):
            parts = self._all(value, path)
            return value if all(map(is_, parts, value)) else kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        if kind is types.MethodType:
            owner = self.copy(value.__self__, path)
            self.shared.append((path, value.__func__))
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is functools.partial:
            return self._partial(value, path)
        if issubclass(kind, nn.Module):  # by class: a weak proxy says that it is an instance
            return self._met(value, path)
        (self.plain if issubclass(kind, Tensor) else self.shared).append((path, value))
        self._of[id(value)] = value
        return value

    def _all(self, values: Any, path: str) -> list[Any]:
        return [self.copy(value, f"{path}.{i}") for i, value in enumerate(values)]

    def _partial(self, value: functools.partial[Any], path: str) -> functools.partial[Any]:
        count, keys = len(value.args), [*value.keywords, *vars(value)]
        held = [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
        func, *parts = copied = self._all(held, path)
        if all(map(is_, copied, held)):
            return value
        named = list(zip(keys, parts[count:], strict=True))
        own = functools.partial(func, *parts[:count], **dict(named[: len(value.keywords)]))
        vars(own).update(named[len(value.keywords) :])
        return own

    def _box(self, box: Any, path: str) -> Any:
        own: Any = box.copy()  # at once: other threads may write to it
        self._of[id(box)] = own
        self._boxes.append(box)
        if isinstance(own, defaultdict):
            self.shared.append((path, own.default_factory))
        held = [] if has_atoms_only(own) else contents(own)
        parts = self._dict(own, path) if isinstance(own, dict) and held else self._all(held, path)
        if self._shares and all(map(is_, parts, held)) and self._own.isdisjoint(map(id, held)):
            self._of[id(box)] = own = box
        elif held:
            own.clear()
            half = len(parts) // 2
            pairs = zip(parts[:half], parts[half:], strict=True) if isinstance(own, dict) else parts
            (own.extend if isinstance(own, list | deque) else own.update)(pairs)
        return own

    def _dict(self, own: dict[Any, Any], path: str) -> list[Any]:
        paths = [f"{path}.{key}" for key in own]
        return [*map(self.copy, own, paths), *map(self.copy, own.values(), paths)]
