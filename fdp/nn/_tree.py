"""A tree of modules as it is now: its modules, what refers to what, and its tensors by number."""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fdp.nn._copier import Copier
from fdp.nn._reachable import OF_CLONE, is_clone, is_settled, refuse_clone
from fdp.nn._values import is_constant

Attributes: TypeAlias = dict[str, Any]
"""Those of a module, its registries among them."""

REGISTRIES = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_OF_EACH = frozenset(vars(nn.Module())).difference(HOOKS, FLAGS)  # what every module has, and no forward asks for
OF_STATE = tuple(key for key in _OF_EACH if key.endswith("_hooks"))


class _NoHooks(OrderedDict[Any, Any]):
    """The hooks of clones without any, one for all of them: to make some takes longer than the rest of a clone."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError(
            "forward registers a hook on a module that is called with other tensors, and the clone that runs goes with "
            "the call. Register the hook before: every later call has it"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, ()


_NO_HOOKS = _NoHooks()
_REPLACED = {
    **dict.fromkeys((*REGISTRIES, "_non_persistent_buffers_set")),
    **dict.fromkeys((*HOOKS, *FLAGS), _NO_HOOKS),
}


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
            what = "a DataParallel" if issubclass(kind, nn.DataParallel) else "scripted or traced"
            self.reason = self.reason or f"{repr(path) if path else 'it'} is {what}: pass the Python module"
            return
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
    """What a recipe is made of. The last two follow one another through the registries of all modules."""

    odd: list[list[str]]
    """The attributes of each module that may refer to modules and tensors."""
    keys: list[tuple[tuple[str, ...], ...]]
    """Those of the registries of each module. Equal ones are one object: a call comes to fewer."""
    places: list[tuple[int, str, str]]
    """Module, registry and key of each tensor, from number 1: parameters, buffers, and those that have no name."""
    children: list[Any]
    """By number: -1 is none, and None is a module that was not there."""
    tensors: list[int]
    """By number: none is 0, and a tensor that is tied has one number."""
    plain: list[tuple[Attributes, list[str]]]
    """What every clone of each module begins with, and the other attributes that it shares with the module."""


def note(states: Sequence[Attributes], numbers: Mapping[int, int], registered: int) -> Note:
    """What the modules of a tree are like now; the first ones are `registered`."""
    held = [[state[name].copy() for name in REGISTRIES] for state in states]  # at once: other threads may write
    known, places = {id(None): 0}, list[tuple[int, str, str]]()
    order = [(i, which) for which in (1, 2) for i in range(registered)]
    order += [(i, which) for i in range(registered, len(states)) for which in (1, 2)]
    for i, which in order:
        for key, tensor in held[i][which].items():
            if known.setdefault(id(tensor), len(known)) > len(places):
                places.append((i, REGISTRIES[which], key))
    kept, keys = dict[Any, Any](), [tuple(map(tuple, of_each)) for of_each in held]
    children = [-1 if child is None else numbers.get(id(child)) for modules, *_ in held for child in modules.values()]
    tensors = [known[id(tensor)] for _, *both in held for registry in both for tensor in registry.values()]
    keys = [kept.setdefault(of_each, of_each) for of_each in keys]
    odd, plain = list(map(odd_keys, states)), list[Any]()
    for found in map(_plain, states, odd):
        plain.append(kept.setdefault((*found[0], *map(id, found[0].values()), *found[1]), found))
    return Note(odd, keys, places, children, tensors, plain)


def _plain(state: Attributes, odd: Container[str]) -> tuple[Attributes, list[str]]:
    begin, shared = {**state, **_REPLACED, OF_CLONE: True}, list[str]()
    for key, value in begin.items():
        if key in OF_STATE and not value:
            begin[key] = _NO_HOOKS
        elif key not in _REPLACED and not is_constant(value):
            begin[key] = None
            shared += [key] * (key not in odd)
    return begin, shared


def odd_keys(state: Attributes) -> list[str]:
    """The attributes that may refer to modules and tensors, and hooks if there are any."""
    return [key for key, value in state.copy().items() if key not in _OF_EACH and not _is_plain(key, value)]


def _is_plain(key: str, value: Any) -> bool:
    if key in HOOKS or key in FLAGS:
        return not value
    return is_constant(value) or (not isinstance(value, Tensor) and is_settled(value))


def join(path: str, key: object) -> str:
    """The path of what is in another."""
    return f"{path}.{key}" if path else str(key)
