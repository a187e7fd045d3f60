"""One walk over a module: clones of its modules and containers, and whether anything else leads back to it."""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdp.nn._reachable import ATOMS, LruCache, content, may_lead_to, members

_MUTABLE = frozenset({dict, OrderedDict, defaultdict, list, set, deque})

# What every module has of its own; a forward never reads the ones about state dicts.
REGISTRIES = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set))
_NOT_IN_FORWARD = frozenset(key for key in REGISTRIES if "state_dict" in key)
# These say more about hooks and buffers that are in others, and change with those.
_SECONDARY = frozenset(key for key in REGISTRIES if key.endswith(("_with_kwargs", "_always_called", "_buffers_set")))
_BACKWARD_HOOKS = frozenset({"_backward_hooks", "_backward_pre_hooks"})


class Box(NamedTuple):
    """A mutable container and the clone's own: the `__dict__` of a module, one of its registries, a list attribute."""

    original: Any
    seen: Any  # what was in it when it was last looked at
    own: Any
    idle: Any  # what is in the clone's own between calls
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
        self.secondary: list[Box] = []  # registries that do not change alone
        self.containers: list[Box] = []
        self.slots: list[tuple[nn.Module, str, Box]] = []  # registries of tensors, and whose
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
        if kind in ATOMS:
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
        idle = seen.copy()
        self.states.append(Box(vars(module), seen, vars(clone), idle, path))
        for key, value in seen.items():
            idle[key] = self._clone_attribute(module, key, value, path)
        vars(clone).update(idle)
        return clone

    def _clone_attribute(self, module: nn.Module, key: str, value: Any, path: str) -> Any:
        if key in _NOT_IN_FORWARD or isinstance(value, torch.fx.Graph):  # the code was generated from the graph
            self.unread.append(value)
            return value
        if key not in REGISTRIES or type(value) not in _MUTABLE:
            return self._clone(value, join_path(path, key))
        # Backward hooks get the module after the call, when the clone may already serve another.
        self.trusted &= not (key in _BACKWARD_HOOKS and value)
        box = self._clone_box(value, path, self.secondary if key in _SECONDARY else self.registries)
        if key in ("_parameters", "_buffers"):
            self.slots.append((module, key, box))
        return box.own

    def _clone_container(self, value: Any, path: str) -> Any:
        box = self._clone_box(value, path, self.containers)
        if not self._shares or not same(box.idle, box.seen):
            return box.own
        self.containers.pop()  # those of what is in it have gone the same way
        self.clones[id(value)] = value
        return value

    def _clone_box(self, value: Any, path: str, boxes: list[Box]) -> Box:
        seen = value.copy()  # at once: other threads may write to it
        own, idle = seen.copy(), seen.copy()
        own.clear()
        self.clones[id(value)] = own
        if isinstance(value, defaultdict):
            self.shared.append(value.default_factory)
        boxes.append(box := Box(value, seen, own, idle, path))
        if isinstance(seen, dict):
            refill(idle, {self._clone(k, path): self._clone(item, join_path(path, k)) for k, item in seen.items()})
        else:
            refill(idle, [self._clone(item, join_path(path, i)) for i, item in enumerate(seen)])
        refill(own, idle)
        return box

    def is_reached_from(self, values: list[Any]) -> bool:
        """Whether these may lead to a part of the module: to a module, or to a container that is more than settings."""
        settings = {id(box.original) for box in self.containers if is_setting(box.seen)}
        return bool(values) and may_lead_to(values, self.clones.keys() - settings)

    def _share_classes(self) -> None:
        """What the user's own classes know is shared too."""
        found = [member for kind in {type(module) for module, _ in self.modules} for member in members(kind)]
        # A cache on a method keeps every instance that was called.
        self.trusted &= not any(isinstance(member, LruCache) for member in found)
        self.shared += found


def same(now: Any, before: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(now) != len(before):
        return False
    try:
        if isinstance(now, set):  # without an order
            return set(map(id, now)) == set(map(id, before))
        values = isinstance(now, dict)
        return all(map(is_, now, before)) and (not values or all(map(is_, now.values(), before.values())))
    except RuntimeError:  # another thread writes to it at this moment, which can be where Python has no lock
        return False


def is_setting(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a value is made of numbers and strings, and not an empty container that waits for something."""
    if type(value) in _MUTABLE or type(value) in (tuple, frozenset):
        inside = around | {id(value)}
        return len(value) > 0 and id(value) not in around and all(is_setting(each, inside) for each in content(value))
    return type(value) in ATOMS


def items(box: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a container: those of a set have no place."""
    if isinstance(box, dict):
        return box.items()
    return () if isinstance(box, set) else enumerate(box)


def translate(value: Any, table: Mapping[int, Any]) -> Any:
    """The value with what the table has, by id, in place of what is in it."""
    if id(value) in table:
        return table[id(value)]
    if type(value) is dict:
        made = {translate(key, table): translate(item, table) for key, item in value.items()}
        return value if same(made, value) else made
    if type(value) in (list, tuple, set):
        parts = [translate(item, table) for item in value]
        return value if all(map(is_, parts, value)) else type(value)(parts)
    if type(value) is types.MethodType and id(value.__self__) in table:
        return types.MethodType(value.__func__, table[id(value.__self__)])
    return value


def refill(box: Any, content: Any) -> None:
    if isinstance(box, dict):
        for key in box.keys() - content.keys():
            del box[key]
    if not isinstance(box, dict) or list(box) != list(content):  # if it can be helped, never empty for other threads
        box.clear()
    box.extend(content) if isinstance(box, list | deque) else box.update(content)


def join_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
