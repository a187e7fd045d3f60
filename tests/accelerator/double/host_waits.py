"""How often the host waits for a device: each time it asks for a value, or copies to or from it."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fdp

ASKS = {
    "aten::_local_scalar_dense": "item",
    "aten::equal": "equal",
    "aten::is_nonzero": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "nonzero",
}
"""Operations whose result the host needs before it can go on."""

_ROOM = f"{Path(fdp.__file__).parent}/"
_LOGS: list[Counter[str]] = []


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often the host waits meanwhile, in any thread, by what for and where: `item in _transforms/counts.py:90`."""
    log = Counter[str]()
    _LOGS.append(log)
    try:
        yield log
    finally:
        _LOGS[:] = [other for other in _LOGS if other is not log]


def count(what: str) -> None:
    """The host waits."""
    if _LOGS:
        text = f"{what} in {_place()}"
        for log in list(_LOGS):
            log[text] += 1


def _place() -> str:
    """The line of fdp that is nearest, or "the function" if that called torch itself."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOM) and not name.startswith(f"{_ROOM}testing/"):
            return f"{name.removeprefix(_ROOM)}:{frame.f_lineno}"
        if not name.startswith((_ROOM, _TORCH, _HERE)):
            return "the function"
        frame = frame.f_back
    return "the function"


_HERE = f"{Path(__file__).parent}/"
_TORCH = f"{Path(sys.modules['torch'].__file__ or '').parent}/"
