"""The modules of a tree, and what is in their attributes."""

from collections import OrderedDict
from collections.abc import Container
from typing import Any, TypeAlias

from torch import Tensor, nn

from fdp.nn._copier import Copier
from fdp.nn._no_clone import is_foreign, why_no_clone
from fdp.nn._reachable import is_settled
from fdp.nn._values import is_constant

Attributes: TypeAlias = dict[str, Any]
"""Those of a module, its registries among them."""

REGISTRIES = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# What every module has, or has been prepared with by torch.ao, and no forward asks for.
_OF_EACH = frozenset(vars(nn.Module())).difference(HOOKS, FLAGS).union(["qconfig"])
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
        self.registered = 0
        self.reason: str | None = None
        try:
            self._add(module, "")
            self.registered = len(self.all)
            copier = Copier({}, self._add)
            for part, path in zip(self.all, self.paths, strict=False):  # more come meanwhile
                state = vars(part).copy()
                for key in odd_keys(state):
                    copier.copy(state[key], join(path, key))
        except (RecursionError, TypeError) as error:
            self.reason = f"its parts cannot be listed ({type(error).__name__}: {error})"
            self.all, self.paths, self.numbers, self.registered = [], [], {}, 0

    def _add(self, module: nn.Module, path: str) -> nn.Module:
        self.reason = self.reason or why_no_clone(module, path)
        if is_foreign(module):
            return module
        if id(module) not in self.numbers:
            self.numbers[id(module)] = len(self.all)
            self.all.append(module)
            self.paths.append(path)
            for key, child in vars(module)["_modules"].copy().items():
                if child is not None:
                    self._add(child, join(path, key))
        return module


def beginning(state: Attributes, odd: Container[str]) -> tuple[Attributes, list[str]]:
    """What each clone of a module begins with, and the other attributes that it shares with the module."""
    begin, shared = {**state, **_REPLACED}, list[str]()
    for key, value in begin.items():
        if key in OF_STATE and not value:
            begin[key] = _NO_HOOKS
        elif key not in _REPLACED and not is_constant(value):
            begin[key] = None
            shared += [key] * (key not in odd)
    return begin, shared


def odd_keys(state: Attributes) -> list[str]:
    """The attributes that may refer to modules and tensors, and hooks if there are any."""
    return [key for key, value in state.items() if key not in _OF_EACH and not _is_plain(key, value)]


def _is_plain(key: str, value: Any) -> bool:
    if key in HOOKS or key in FLAGS:
        return not value
    return is_constant(value) or (not isinstance(value, Tensor) and is_settled(value))


def join(path: str, key: object) -> str:
    """The path of what is in another."""
    return f"{path}.{key}" if path else str(key)
