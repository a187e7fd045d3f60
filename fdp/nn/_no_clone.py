"""Why no clone can stand for a module: it is refused then, or called in place."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fdp.nn._reachable import LruCache


def is_foreign(module: nn.Module) -> bool:
    """Whether it is no module in Python whose parts can be replaced."""
    return isinstance(module, torch.jit.ScriptModule | nn.DataParallel)


def why_no_clone(module: nn.Module, path: str) -> str | None:
    """What is wrong with a module by itself."""
    kind = type(module)
    if is_foreign(module):
        what = "a DataParallel" if issubclass(kind, nn.DataParallel) else "scripted or traced"
        return f"{repr(path) if path else 'it'} is {what}: pass the Python module"
    # Slots or a builtin base hold what is not in `__dict__`; `__del__` would run for the clone as well.
    if kind.__basicsize__ != nn.Module.__basicsize__ or hasattr(kind, "__del__"):
        return f"{kind.__name__} has __slots__ or __del__"
    if vars(module)["_backward_hooks"] and not module._is_full_backward_hook:  # it refers to its module weakly
        return f"{kind.__name__} has a hook of register_backward_hook: register_full_backward_hook"
    return None


def why_no_clone_of_classes(of_classes: Iterable[tuple[str, Any]]) -> str | None:
    """What is wrong with the members of classes: a cache keeps each instance that it is called with."""
    cached = [path for path, each in of_classes if isinstance(each, LruCache)]
    return f"{cached[0]} has a cache" if cached else None
