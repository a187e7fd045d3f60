"""What several calls have done to copies of a list, dict or set, done to itself."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from fdp.nn._clone import refill, same

_KINDS = frozenset({dict, OrderedDict, defaultdict, list, deque, set})


def merge(box: Any, before: Any, now: Any) -> None:
    if same(now, before):
        return
    if isinstance(box, set):
        box -= before - now
        box |= now - before
    elif isinstance(box, dict):
        for key in before.keys() - now.keys():
            box.pop(key, None)
        _update(box, dict(before), now)
    elif (added := _appended(before, now)) is not None:
        box.extend(added)
    elif len(before) == len(now) == len(box):
        _update(box, dict(enumerate(before)), dict(enumerate(now)))
    else:
        refill(box, now)


def _update(box: Any, before: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Set what has changed; of several values the last one stays, as in a dict that all share."""
    for key, value in now.items():
        if key in before and before[key] is value:
            continue
        current = box.get(key) if isinstance(box, dict) else box[key]
        if key not in before and type(value) is type(current) and type(value) in _KINDS and value is not current:
            merge(current, type(current)(), value)  # another replica has begun it
        else:
            box[key] = value


def _appended(before: Any, now: Sequence[Any]) -> Sequence[Any] | None:
    """What was put behind what was there, None if something else was done. A deque that is full loses its first."""
    held = list(before)
    if len(now) >= len(held) and all(map(is_, held, now)):
        return list(now)[len(held) :]
    if isinstance(before, deque) and len(now) == before.maxlen:
        gone = next(i for i in range(len(held) + 1) if all(map(is_, held[i:], now)))
        return list(now)[len(held) - gone :]
    return None
