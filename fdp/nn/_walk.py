"""One walk over a tree of modules: its parts, and what a clone of it would share with it."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, final

import torch.fx
from torch import Tensor, nn

from fdp.nn._reachable import is_clone, refuse_clone
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
    constants: list[str]  # attributes made of numbers and strings
    others: list[str]
    has_hooks: bool


@final
class Sight:
    """What is behind attributes: other modules, containers, and values that a clone would share with the module."""

    def __init__(self, meet: Callable[[nn.Module, str], object], *, may_hold_clones: bool) -> None:
        self._meet, self._may_hold_clones = meet, may_hold_clones
        self.shared: list[tuple[str, Any, bool]] = []  # path, value, whether forward may have put it there
        self._boxes: dict[int, Any] = {}

    def see(self, part: ModulePart, state: Attributes) -> None:
        """Look into the attributes of a part, and at its hooks."""
        for key in part.others:
            self._see(state[key], join(part.path, key), False)
        for key in HOOKS if part.has_hooks else ():
            for hook in state[key].values():
                self._see(hook, join(part.path, key), False)

    def _see(self, value: Any, path: str, inside: bool) -> None:
        kind = type(value)
        if kind in ATOMS or issubclass(kind, Tensor) or id(value) in self._boxes:
            return
        if issubclass(kind, nn.Module):  # by class: a weak proxy says that it is an instance
            if inside and self._may_hold_clones:
                refuse_clone(value, path)
            self._meet(value, path)
        elif (parts := parts_of(value)) is not None:
            self._boxes[id(value)] = value
            for key, each in parts:
                self._see(each, join(path, key), inside or kind in BOXES)
        else:
            self._boxes[id(value)] = value
            self.shared.append((path, value, inside and self._may_hold_clones))

    def boxes(self) -> set[int]:
        """The containers that a clone has of its own, by id; not those that are mere settings."""
        return {key for key, box in self._boxes.items() if type(box) in BOXES and not is_setting(box)}


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
        self.names: dict[str, int] = {}  # also the others of a tensor that is tied
        self.modules: list[nn.Module] = []
        self.parts: list[ModulePart] = []
        self._known: dict[int, int] = {}
        self._paths: list[str] = []
        self._links: list[Any] = []
        self.registered, self.is_whole = 0, False
        self.reason: str | None = None
        sight = Sight(self._module, may_hold_clones=not is_clone(module))
        try:
            self._module(module, "")
            self.registered = len(self.modules)
            while len(self.parts) < len(self.modules):
                state = vars(self.modules[len(self.parts)]).copy()
                self.parts.append(self._part(len(self.parts), state))
                sight.see(self.parts[-1], state)
            self.is_whole = True
        except (RecursionError, TypeError, KeyError) as error:
            self.reason = f"its parts cannot be listed ({type(error).__name__}: {error})"
        self.places = [self._first[number] for number in sorted(self._first)]
        if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _NAMING):
            self.reason = self.reason or f"{type(module).__name__} names its tensors itself"

    def _module(self, module: nn.Module, path: str) -> int:
        if id(module) in self._known:
            return self._known[id(module)]
        kind = type(module)
        # Slots or a builtin base hold what is not in `__dict__`; `__del__` would run for the clone as well.
        if kind.__basicsize__ != nn.Module.__basicsize__ or hasattr(kind, "__del__"):
            self.reason = f"{kind.__name__} has __slots__ or __del__"
        if issubclass(kind, torch.jit.ScriptModule | nn.DataParallel):
            raise TypeError(f"{path or 'it'} is a {kind.__name__}")
        number = self._known[id(module)] = len(self.modules)
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
                if not self.registered:
                    self.names[join(self._paths[part], key)] = number
            slots.append((key, number))
        return slots

    def _part(self, number: int, state: Attributes) -> ModulePart:
        constants, others = list[str](), list[str]()
        for key, value in state.items():
            # The code of a graph module was made of its graph.
            if key not in _OF_EACH and type(value) not in ATOMS and not isinstance(value, torch.fx.Graph):
                (constants if is_constant(value) else others).append(key)
        attributes = [(key, type(value)) for key, value in state.items()]
        has_hooks = any(state[key] for key in HOOKS)
        children, params, buffers = self._links[number]
        return ModulePart(self._paths[number], children, params, buffers, attributes, constants, others, has_hooks)


_NAMING = ("named_parameters", "named_buffers", "_named_members", "named_modules")


def join(path: str, key: object) -> str:
    """The path of what is in another."""
    return f"{path}.{key}" if path else str(key)


def ids_of(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Those of modules, and of what they keep their attributes and tensors in."""
    states = list(map(vars, modules))
    return frozenset().union(*(map(id, each) for each in (modules, states, *map(registries, states))))
