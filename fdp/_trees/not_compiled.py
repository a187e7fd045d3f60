"""Code that torch.compile is to leave alone where it has given up on the call around it and goes on inside."""

import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from fdp._trees import torch_private

Function = TypeVar("Function", bound=Callable[..., Any])

# The code itself is not compiled; what it calls may be, such as the layers of a user's module. The decorator
# `torch.compiler.disable` would say the same at every call, and import the whole compiler.
_SKIP = torch_private.FrameExecStrategy(torch_private.FrameAction.SKIP, torch_private.FrameAction.DEFAULT)
_SKIP_ALL = torch_private.FrameExecStrategy(torch_private.FrameAction.SKIP, torch_private.FrameAction.SKIP)


def leave_alone(package: str, but: Collection[str]) -> None:
    """Mark all functions and classes that the modules of a package define, `but` for some, by their names."""
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and f"{module.__name__}.{name}" not in but:
                for function in vars(value).values() if isinstance(value, type) else [value]:
                    for code in _codes(getattr(inspect.unwrap(function), "__code__", None)):
                        torch_private.set_code_exec_strategy(code, _SKIP)


def leave_all_alone(function: types.FunctionType) -> None:
    """Mark a function and all that it calls, but for what is compiled by itself."""
    torch_private.set_code_exec_strategy(function.__code__, _SKIP_ALL)


def constant_while_compiling(function: Function) -> Function:
    """Mark a function as one to call when a graph is made, as `torch.compiler.assume_constant_result` does."""
    vars(function)["_dynamo_marked_constant"] = True  # the decorator sets the same and imports the whole compiler
    return function


def _codes(code: Any) -> Iterator[types.CodeType]:
    """A function's code and that of the functions and comprehensions inside it."""
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)
