"""One walk over a tree of modules: its parts, and what a clone of it would share with it."""

from collections.abc import Mapping
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, final

import torch.fx
from torch import Tensor, nn

from fdp.nn._reachable import LruCache, is_clone, members, refuse_clone, way_back
from fdp.nn._values import ATOMS, BOXES, is_constant, is_setting, parts_of

Attributes: TypeAlias = dict[str, Any]
"""Those of a module, its registries among them."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_TENSORS = ("_parameters", "_buffers")
registries = itemgetter("_modules", *HOOKS, *OF_TENSORS)
_OF_EACH = frozenset(vars(nn.Module()))  # what every module has


class ModulePart(NamedTuple):
    """A module of the tree. What is in its registries is given by key and number: of a part, or of a tensor."""

    path: str
    children: list[tuple[str, int]]
    params: list[tuple[str, int]]
    buffers: list[tuple[str, int]]
    attributes: list[tuple[str, type]]
    shared: list[tuple[str, Any]]  # attributes that a clone has as they are
    own: list[str]  # attributes of which a clone has its own, since tensors or modules may be in them
    has_hooks: bool


@final
class Walk:
    """The parts of a module, the registered ones first. `reason` says why no clone can stand for the module."""

    def __init__(self, module: nn.Module) -> None:
        named = [("_parameters", dict(module.named_parameters())), ("_buffers", dict(module.named_buffers()))]
        self.params, self.buffers = (list(tensors) for _, tensors in named)
        keys = [(registry, id(tensor)) for registry, tensors in named for tensor in tensors.values()]
        self._numbers = {key: number for number, key in enumerate(keys, 1)}
        self.has_both_kinds = len({tensor for _, tensor in keys}) < len(keys)  # a tensor that is parameter and buffer
        self._first: dict[int, tuple[int, str, str]] = {}
        self.modules: list[nn.Module] = []
        self.parts: list[ModulePart] = []
        self.known: dict[int, Any] = {}  # by id: numbers of modules, and what a clone has as it is
        self.shared: list[tuple[str, Any]] = []
        self._paths: list[str] = []
        self._links: list[Any] = []
        self._boxes: dict[int, Any] = {}
        self._is_clone = is_clone(module)
        self.reason: str | None = None
        self.registered, self.is_whole = 0, False
        try:
            self._module(module, "")
            self.registered = len(self.modules)
            while len(self.parts) < len(self.modules):
                self.parts.append(self._part(len(self.parts)))
            self.is_whole = True
        except (RecursionError, TypeError, KeyError) as error:
            self.reason = f"its parts cannot be listed ({type(error).__name__}: {error})"
        self.places = [self._first[number] for number in sorted(self._first)]
        lacking = [name for i, name in enumerate([*self.params, *self.buffers], 1) if i not in self._first]
        if lacking:
            self.reason = self.reason or f"it names {lacking}, which no registry has"
        self.reason = self.reason or self._way_back()

    def _module(self, module: nn.Module, path: str) -> int:
        if id(module) in self.known:
            return self.known[id(module)]
        kind = type(module)
        # Slots or a builtin base hold what is not in `__dict__`; `__del__` would run for the clone as well.
        if kind.__basicsize__ != nn.Module.__basicsize__ or hasattr(kind, "__del__"):
            self.reason = f"{kind.__name__} has __slots__ or __del__"
        if issubclass(kind, torch.jit.ScriptModule | nn.DataParallel):
            raise TypeError(f"{path or 'it'} is a {kind.__name__}")
        number = self.known[id(module)] = len(self.modules)
        self.modules.append(module)
        self._paths.append(path)
        self._links.append(None)
        state = vars(module).copy()
        slots = [self._slots(number, registry, state[registry]) for registry in OF_TENSORS]
        children = [
            (key, -1 if child is None else self._module(child, join(path, key)))
            for key, child in state["_modules"].items()
        ]
        self._links[number] = children, *slots
        return number

    def _slots(self, part: int, registry: str, held: Mapping[str, Any]) -> list[tuple[str, int]]:
        """The keys of a registry, each with the number of its tensor."""
        slots: list[tuple[str, int]] = []
        for key, tensor in held.items():
            number = 0
            if tensor is not None:
                number = self._numbers.setdefault((registry, id(tensor)), len(self._numbers) + 1)
                self._first.setdefault(number, (part, registry, key))
            slots.append((key, number))
        return slots

    def _part(self, number: int) -> ModulePart:
        """A part with its attributes, which may lead to more modules."""
        path, state = self._paths[number], vars(self.modules[number]).copy()
        own, shared = list[str](), list[tuple[str, Any]]()
        for key in state.keys() - _OF_EACH:
            value = state[key]
            if type(value) in ATOMS or isinstance(value, torch.fx.Graph):  # the code was made of that
                continue
            translated = issubclass(type(value), Tensor | nn.Module) or parts_of(value) is not None
            own.append(key) if translated and not is_constant(value) else shared.append((key, value))
            self._value(value, join(path, key))
        for key in HOOKS:
            for hook in state[key].values():
                self._value(hook, join(path, key))
        attributes = [(key, type(value)) for key, value in state.items()]
        children, params, buffers = self._links[number]
        return ModulePart(path, children, params, buffers, attributes, shared, own, any(state[key] for key in HOOKS))

    def _value(self, value: Any, path: str) -> None:
        if type(value) in ATOMS or isinstance(value, Tensor) or id(value) in self.known or id(value) in self._boxes:
            return
        if issubclass(type(value), nn.Module):  # a weak proxy says that it is an instance
            if not self._is_clone:
                refuse_clone(value, path)
            self._module(value, path)
        elif (parts := parts_of(value)) is not None:
            self._boxes[id(value)] = value
            for key, part in parts:
                self._value(part, join(path, key))
        else:
            self.shared.append((path, value))
            self.known[id(value)] = value

    def _way_back(self) -> str | None:
        """Whether something that a clone would share may lead back to the module."""
        states = list(map(vars, self.modules))
        boxes = {key for key, box in self._boxes.items() if type(box) in BOXES and not is_setting(box)}
        targets = boxes.union(*(map(id, each) for each in (self.modules, states, *map(registries, states))))
        found = [(kind, each) for kind in {type(part) for part in self.modules} for each in members(kind)]
        cached = next((kind for kind, each in found if isinstance(each, LruCache)), None)
        if cached is not None:  # it keeps every instance that was called
            return f"a method of {cached.__name__} has a cache"
        held = chain(self.shared, ((f"the class {kind.__name__}", each) for kind, each in found))
        path = way_back(held, targets, may_hold_clones=not self._is_clone)
        return None if path is None else f"{path} leads back to it, or may do so"


def join(path: str, key: object) -> str:
    """The path of what is in another."""
    return f"{path}.{key}" if path else str(key)
