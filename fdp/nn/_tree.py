"""A tree of modules as it is now: its modules, what refers to what, and its tensors by number."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fdp.nn._copier import Copier
from fdp.nn._reachable import is_clone, is_settled, refuse_clone
from fdp.nn._values import is_constant

Attributes: TypeAlias = dict[str, Any]
"""Those of a module, its registries among them."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
OF_TENSORS = ("_parameters", "_buffers")
_OF_EACH = frozenset(vars(nn.Module())).difference(HOOKS, FLAGS)  # what every module has, and no forward asks for


class Modules:
    """The modules of a tree, the registered ones first. `reason` says why no clone can stand for the first."""

    def __init__(self, module: nn.Module) -> None:
        self.all: list[nn.Module] = []
        self.paths: list[str] = []
        self.numbers: dict[int, int] = {}
        self.reason: str | None = None
        self._refuses = not is_clone(module)
        self.registered = 0
        try:
            self._walk(module)
        except (RecursionError, TypeError, KeyError) as error:
            self.reason = f"its parts cannot be listed ({type(error).__name__}: {error})"
            self.all, self.paths, self.numbers, self.registered = [], [], {}, 0

    def _walk(self, module: nn.Module) -> None:
        self._add(module, "")
        self.registered = len(self.all)
        copier = Copier({}, self._met)
        for number, part in enumerate(self.all):  # more come meanwhile
            state = vars(part).copy()
            for key in odd_keys(state):
                copier.copy(state[key], join(self.paths[number], key))

    def _met(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) not in self.numbers and self._refuses:
            refuse_clone(module, path)
        self._add(module, path)
        return module

    def _add(self, module: nn.Module, path: str) -> None:
        kind = type(module)
        if issubclass(kind, torch.jit.ScriptModule | nn.DataParallel):
            raise TypeError(f"{path or 'it'} is a {kind.__name__}")
        # Slots or a builtin base hold what is not in `__dict__`; `__del__` would run for the clone as well.
        if kind.__basicsize__ != nn.Module.__basicsize__ or hasattr(kind, "__del__"):
            self.reason = f"{kind.__name__} has __slots__ or __del__"
        if self.numbers.setdefault(id(module), len(self.all)) < len(self.all):
            return
        self.all.append(module)
        self.paths.append(path)
        for key, child in vars(module)["_modules"].copy().items():
            if child is not None:
                self._add(child, join(path, key))


class Note(NamedTuple):
    """What of a module a recipe is made of."""

    odd: list[str]
    """Attributes that may refer to modules and tensors."""
    children: list[tuple[str, Any]]
    """By number: -1 is none, and None is a module that was not there."""


def note(state: Attributes, numbers: Mapping[int, int]) -> Note:
    """What a module is like now."""
    children = state["_modules"].copy().items()
    return Note(odd_keys(state), [(key, -1 if child is None else numbers.get(id(child))) for key, child in children])


def odd_keys(state: Attributes) -> list[str]:
    """The attributes that may refer to modules and tensors, and hooks if there are any."""
    return [key for key, value in state.copy().items() if key not in _OF_EACH and not _is_plain(key, value)]


def _is_plain(key: str, value: Any) -> bool:
    if key in HOOKS or key in FLAGS:
        return not value
    return is_constant(value) or (not isinstance(value, Tensor) and is_settled(value))


class Numbers(NamedTuple):
    """The tensors of a tree by number: none is 0, then parameters, buffers, and those that have no name."""

    places: list[tuple[int, str, str]]
    """Module, registry and key of each, from number 1."""
    slots: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]]
    """The keys of the two registries of each module, with the number of the tensor."""


def numbered(states: Sequence[Attributes], registered: int) -> Numbers:
    """Number the tensors. A tensor that is tied has one number."""
    numbers, places = {id(None): 0}, list[tuple[int, str, str]]()
    slots: list[Any] = [([], []) for _ in states]
    order = [(i, which) for which in (0, 1) for i in range(registered)]
    order += [(i, which) for i in range(registered, len(states)) for which in (0, 1)]
    for i, which in order:
        for key, tensor in states[i][OF_TENSORS[which]].copy().items():
            number = numbers.setdefault(id(tensor), len(numbers))
            slots[i][which].append((key, number))
            if number > len(places):
                places.append((i, OF_TENSORS[which], key))
    return Numbers(places, slots)


def join(path: str, key: object) -> str:
    """The path of what is in another."""
    return f"{path}.{key}" if path else str(key)
