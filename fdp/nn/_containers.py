"""Lists, dicts and sets of a module that its replicas fill side by side: each has its own until all are done."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, final

from fdp.nn._clone import refill, same
from fdp.nn._stateless import Skeleton

_MAPPINGS = (dict, OrderedDict, defaultdict)
_KINDS = frozenset({*_MAPPINGS, list, deque, set})


@final
class Separated:
    """Containers that replicas share, as they were, and the copy that each replica has of them."""

    def __init__(self, skeletons: Sequence[Skeleton]) -> None:
        self._places: list[tuple[Any, Any, Any, Any]] = []
        self._copies: list[dict[int, tuple[Any, Any]]] = []  # of each replica, by the id of the original
        for skeleton in skeletons:
            memo: dict[int, tuple[Any, Any]] = {}
            for holder, key in skeleton.fillable():
                shared = holder[key]
                holder[key] = own = _own(shared, memo)
                self._places.append((holder, key, shared, own))
            self._copies.append(memo)
        first = self._copies[0].values() if self._copies else ()
        self._before = {id(box): box.copy() for box, _ in first if type(box) in _KINDS}

    def merge(self) -> None:
        """Do to the module's containers what the replicas did to theirs, one replica after the other."""
        for memo in self._copies:
            originals = {id(own): box for box, own in memo.values()}
            for key, before in self._before.items():
                box, own = memo[key]
                if not same(own, before):
                    _merge(box, before, _with(own, originals))
        for holder, key, shared, own in self._places:  # what differs in a clone counts as written
            if isinstance(holder, dict) and key in holder and holder[key] is own:
                holder[key] = shared


def _own(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """The value with copies of all containers in it."""
    kind = type(value)
    if id(value) in memo:
        return memo[id(value)][1]
    if kind is tuple:
        parts = tuple(_own(part, memo) for part in value)
        if all(map(is_, parts, value)):
            return value
        memo[id(value)] = value, parts
        return parts
    if kind not in _KINDS:
        return value
    own = value.copy()
    memo[id(value)] = value, own
    if kind is not set and not _NESTING.isdisjoint(map(type, own.values() if kind in _MAPPINGS else own)):
        for key, part in list(own.items() if kind in _MAPPINGS else enumerate(own)):
            own[key] = _own(part, memo)
    return own


_NESTING = _KINDS | {tuple}


def _with(own: Any, originals: Mapping[int, Any]) -> Any:
    """The content of a copy, with the module's own containers in place of copies."""
    if isinstance(own, dict):
        return {key: originals.get(id(value), value) for key, value in own.items()}
    return own if isinstance(own, set) else [originals.get(id(value), value) for value in own]


def _merge(box: Any, before: Any, now: Any) -> None:
    if same(now, before):
        return
    if isinstance(box, set):
        box -= before - now
        box |= now - before
    elif isinstance(box, dict):
        for key in before.keys() - now.keys():
            box.pop(key, None)
        starts = getattr(before, "default_factory", None) is int
        _update(box, dict(before), now, 0 if starts else None)
    elif (added := _appended(before, now)) is not None:
        box.extend(added)
    elif len(before) == len(now) == len(box):
        _update(box, dict(enumerate(before)), dict(enumerate(now)), None)
    else:
        refill(box, now)


def _update(box: Any, before: Mapping[Any, Any], now: Mapping[Any, Any], start: Any) -> None:
    """Set what has changed. Integers count, and so add up; of other values the last one stays."""
    for key, value in now.items():
        old = before.get(key, start)
        if key in before and old is value:
            continue
        current = box.get(key, start) if isinstance(box, dict) else box[key]
        if type(value) is type(old) is type(current) is int:
            box[key] = current + value - old
        elif key not in before and type(value) is type(current) and type(value) in _KINDS and value is not current:
            _merge(current, type(current)(), value)  # another replica has begun it
        else:
            box[key] = value


def _appended(before: Any, now: Sequence[Any]) -> Sequence[Any] | None:
    """What was put behind what was there, None if something else was done. A deque that is full loses its first."""
    held = list(before)
    if len(now) >= len(held) and all(map(is_, held, now)):
        return now[len(held) :]
    if isinstance(before, deque) and len(now) == before.maxlen:
        gone = next(i for i in range(len(held) + 1) if all(map(is_, held[i:], now)))
        return now[len(held) - gone :]
    return None
