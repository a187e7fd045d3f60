"""One walk over a module: clones of its modules and containers, and whether anything else leads back to it."""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdp._trees.untraced import leave_alone
from fdp.nn._reachable import ATOMS, LruCache, content, may_lead_to, members

_MUTABLE = frozenset({dict, OrderedDict, defaultdict, list, set, deque})

# What every module has of its own; a forward never reads the ones about state dicts.
REGISTRIES = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set))
_NOT_IN_FORWARD = frozenset(key for key in REGISTRIES if "state_dict" in key)
_BACKWARD_HOOKS = frozenset({"_backward_hooks", "_backward_pre_hooks"})

OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})  # recurrent modules make them of what is bound


class Box(NamedTuple):
    """A mutable container and the clone's own: the `__dict__` of a module, one of its registries, a list attribute."""

    original: Any
    seen: Any  # what was in it
    clone: Any
    path: str


class Walk:
    """One walk over a module: a clone of it, and what was met on the way.

    If the clone `shares`, it has the containers of the module that need no clone because no module is in them.
    """

    def __init__(self, module: nn.Module, *, shares: bool) -> None:
        self.clones: dict[int, Any] = {}  # by the id of the original
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        self.states: list[Box] = []
        self.registries: list[Box] = []
        self.boxes: list[Box] = []
        self.common: dict[int, Box] = {}  # those that module and clone share
        self.slots: list[tuple[nn.Module, str, Box]] = []
        self.tensors: dict[str, Tensor] = {}
        self.shared: list[Any] = []
        # Kept, but of no concern to forward. The properties of a parametrized module close over it.
        self.unread: list[Any] = [made for made in vars(type(module)).values() if isinstance(made, property)]
        self.trusted, self.cyclic = True, False
        self._module, self._shares = module, shares
        try:
            self.root = self._clone(module, "")
        except Exception:  # deeper than the stack, or a key that has no hash before it is complete
            self.root, self.trusted = module, False
        self._share_classes()

    def _clone(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS or id(value) in self.common:
            return value
        if id(value) in self.clones:
            self.cyclic |= value is self._module
            return self.clones[id(value)]
        if issubclass(kind, Tensor):
            self.tensors[path] = value
            return value
        if issubclass(kind, nn.Module):
            return self._clone_module(value, path)
        if kind in _MUTABLE:
            return self._clone_container(value, path)
        if kind in (tuple, frozenset):
            parts = [self._clone(part, join_path(path, i)) for i, part in enumerate(value)]
            return value if all(map(is_, parts, value)) else kind(parts)
        if kind is types.MethodType:
            owner = self._clone(value.__self__, path)
            self.shared.append(value.__func__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        self.shared.append(value)
        return value

    def _clone_module(self, module: nn.Module, path: str) -> nn.Module:
        kind = type(module)
        if issubclass(kind, torch.jit.ScriptModule):
            self.trusted = False
            return module
        # Slots or a builtin base hold what is not in `__dict__`; `__del__` would run for the clone as well.
        plain = kind.__basicsize__ == nn.Module.__basicsize__ and not hasattr(kind, "__del__")
        self.trusted &= plain and not issubclass(kind, nn.DataParallel)
        clone = object.__new__(kind if plain else nn.Module)
        self.clones[id(module)] = clone
        self.modules.append((module, clone))
        seen = vars(module).copy()
        self.states.append(Box(vars(module), seen, vars(clone), path))
        for key, value in seen.items():
            vars(clone)[key] = self._clone_attribute(module, key, value, path)
        return clone

    def _clone_attribute(self, module: nn.Module, key: str, value: Any, path: str) -> Any:
        if key in _NOT_IN_FORWARD or isinstance(value, torch.fx.Graph):  # the code was generated from the graph
            self.unread.append(value)
            return value
        if key not in REGISTRIES or type(value) not in _MUTABLE:
            return self._clone(value, join_path(path, key))
        # Backward hooks get the module after the call, when the clone may already serve another.
        self.trusted &= not (key in _BACKWARD_HOOKS and value)
        box = self._clone_box(value, path, self.registries)
        if key in ("_parameters", "_buffers"):
            self.slots.append((module, key, box))
        return box.clone

    def _clone_container(self, value: Any, path: str) -> Any:
        box = self._clone_box(value, path, self.boxes)
        if not self._shares or holds_parameters(path) or not same(box.clone, box.seen):
            return box.clone
        self.boxes.pop()  # those of what is in it have gone the same way
        del self.clones[id(value)]
        self.common[id(value)] = box
        return value

    def _clone_box(self, value: Any, path: str, boxes: list[Box]) -> Box:
        seen, clone = value.copy(), value.copy()
        clone.clear()
        self.clones[id(value)] = clone
        if isinstance(value, defaultdict):
            self.shared.append(value.default_factory)
        boxes.append(box := Box(value, seen, clone, path))
        if isinstance(seen, dict):
            for key, item in seen.items():
                clone[self._clone(key, path)] = self._clone(item, join_path(path, key))
        else:
            refill(clone, [self._clone(item, join_path(path, i)) for i, item in enumerate(seen)])
        return box

    def fillable(self) -> list[tuple[Any, Any]]:
        """Where clones hold common containers that a forward may fill: in modules, and in containers of the clone."""
        found: list[tuple[Any, Any]] = []
        for _, clone in self.modules:
            own = {key: value for key, value in vars(clone).items() if key not in REGISTRIES | OF_PARAMETERS}
            found += [(clone, key) for key, value in own.items() if self._holds_common(value)]
        for box in self.boxes:
            found += [(box.clone, key) for key, value in items(box.clone) if self._holds_common(value)]
        return found

    def is_reached_from(self, values: list[Any]) -> bool:
        """Whether these may lead to a part of the module: to a module, or to a container that is more than settings."""
        boxes = [*self.boxes, *self.common.values()]
        own = self.clones.keys() | self.common.keys()
        return bool(values) and may_lead_to(values, own - {id(box.original) for box in boxes if _is_setting(box.seen)})

    def _holds_common(self, value: Any) -> bool:
        return any(map(self._holds_common, value)) if type(value) is tuple else id(value) in self.common

    def _share_classes(self) -> None:
        """What the user's own classes know is shared too."""
        found = [member for kind in {type(module) for module, _ in self.modules} for member in members(kind)]
        # A cache on a method keeps every instance that was called.
        self.trusted &= not any(isinstance(member, LruCache) for member in found)
        self.shared += found


def holds_parameters(path: str) -> bool:
    """Whether the container at a path is one that a recurrent module fills with what is bound."""
    return path.rpartition(".")[2] in OF_PARAMETERS


def same(now: Any, before: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(now) != len(before):
        return False
    if isinstance(now, set):  # without an order
        return set(map(id, now)) == set(map(id, before))
    return all(map(is_, now, before)) and (not isinstance(now, dict) or all(map(is_, now.values(), before.values())))


def has_gained_objects(now: Any, before: Any) -> bool:
    """Whether a container has more than it had that is not made of numbers, strings and tensors alone."""
    known = set(map(id, content(before)))
    return not all(_is_plain(part) for part in content(now) if id(part) not in known)


def _is_setting(value: Any) -> bool:
    """Whether a value is made of numbers and strings, and not an empty container that waits for something."""
    if type(value) in _MUTABLE or type(value) in (tuple, frozenset):
        return len(value) > 0 and all(map(_is_setting, content(value)))
    return type(value) in ATOMS


def items(box: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a container: those of a set have no place."""
    if isinstance(box, dict):
        return box.items()
    return () if isinstance(box, set) else enumerate(box)


def _is_plain(value: Any) -> bool:
    if type(value) in _MUTABLE or type(value) in (tuple, frozenset):
        return all(map(_is_plain, content(value)))
    return type(value) in ATOMS or isinstance(value, Tensor)


def refill(box: Any, content: Any) -> None:
    if isinstance(box, dict):
        for key in box.keys() - content.keys():
            del box[key]
    if not isinstance(box, dict) or list(box) != list(content):  # if it can be helped, never empty for other threads
        box.clear()
    box.extend(content) if isinstance(box, list | deque) else box.update(content)


def join_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


leave_alone(globals())
