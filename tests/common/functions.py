"""Functions as fdp has not seen them yet."""

import random
import types
from typing import Any


def anew(fn: Any) -> Any:
    """The same function, of which nothing is known."""
    code = fn.__code__.replace(co_firstlineno=random.randrange(1, 10**6))
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
