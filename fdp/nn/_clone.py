"""A clone of a tree of modules: made for one call, over other tensors, and thrown away."""

import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from fdp.nn._recipe import Recipe
from fdp.nn._values import ATOMS, BOXES, has_atoms_only, is_tuple
from fdp.nn._walk import HOOKS, Attributes, ModulePart, join

_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class _NoHooks(OrderedDict[Any, Any]):
    """The hooks of clones without any, one for all of them: to make some takes longer than the rest of a clone."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError(
            "forward registers a hook on a module that is called with other tensors, and the clone that runs goes with "
            "the call. Register the hook before: every later call has it"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, ()


_NONE = _NoHooks()
_WITHOUT_HOOKS: dict[str, Any] = dict.fromkeys((*HOOKS, *_FLAGS), _NONE)
_EMPTY: list[tuple[()]] = [()] * len(_WITHOUT_HOOKS)
_new = object.__new__
_put = vars(nn.Module)["__dict__"].__set__  # `object.__setattr__(module, "__dict__", ...)` takes longer


class Clone(NamedTuple):
    """The modules of a clone, in the order of the recipe's parts, and what they share with the module's."""

    modules: Sequence[Any]
    plain: Sequence[tuple[str, Tensor]]
    """Tensors that are neither parameters nor buffers, by path."""

    def now(self, recipe: Recipe, names: Iterable[str]) -> dict[str, Any]:
        """What is under the names by now: other tensors than were given, where forward has put such there."""
        now: dict[str, Any] = {}
        for name in names:
            i, registry, key = recipe.places[recipe.names[name] - 1]
            held = self.modules[i].__dict__[registry]
            if key in held:
                now[name] = held[key]
        return now


def clone(
    recipe: Recipe,
    states: Sequence[Attributes],
    tensors: Sequence[Any],
    *,
    shares: bool = False,
    outlives: bool = False,
    marks: Mapping[str, Any] | None = None,
) -> Clone:
    """New modules with the attributes of the module's, over tensors by number.

    If the clone `shares`, it has the lists, dicts and sets of the module in which there is no tensor or module of it.
    If it `outlives` the call, hooks may be registered on it.
    """
    made: list[Any] = [*map(_new, recipe.kinds()), None]
    common = {**_WITHOUT_HOOKS, **(marks or {})}
    for (children, params, buffers), state, module in zip(recipe.links, states, made, strict=False):
        own = state.copy()
        own.update(common)
        if outlives:
            own.update(zip(_WITHOUT_HOOKS, map(OrderedDict, _EMPTY), strict=True))
        own["_modules"] = {key: made[i] for key, i in children} if children else {}
        own["_parameters"] = {key: tensors[i] for key, i in params} if params else {}
        own["_buffers"] = {key: tensors[i] for key, i in buffers} if buffers else {}
        own["_non_persistent_buffers_set"] = own["_non_persistent_buffers_set"].copy()
        _put(module, own)
    plain = list(zip(recipe.unnamed, tensors[len(recipe.numbers) + 1 :], strict=True))
    if not recipe.odd:
        return Clone(made, plain)
    copier = _Copier(recipe, states, made, tensors, shares)
    for i in recipe.odd:
        copier.complete(recipe.parts[i], states[i], vars(made[i]))
    return Clone(made, [*plain, *copier.plain])


class _Copier:
    """What in a module refers to tensors and modules, referring to those of the clone."""

    def __init__(
        self, recipe: Recipe, states: Sequence[Attributes], made: Sequence[Any], tensors: Sequence[Any], shares: bool
    ) -> None:
        self._of = dict(zip(recipe.ids, made, strict=False))
        self._of.update(zip(map(id, recipe.tensors(states)[1:]), tensors[1:], strict=True))
        self._mapped = frozenset(self._of)
        self._shares = shares
        self.plain: list[tuple[str, Tensor]] = []

    def complete(self, part: ModulePart, state: Attributes, own: Attributes) -> None:
        for key in part.others:
            own[key] = self._copy(state[key], join(part.path, key))
        if part.has_hooks:
            own.update({key: state[key].copy() for key in _FLAGS})
            own.update({key: self._dict(state[key].copy(), key) for key in HOOKS})

    def _copy(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self._of:
            return self._of[id(value)]
        if kind in BOXES and has_atoms_only(value) and kind is not defaultdict:
            self._of[id(value)] = own = value if self._shares else value.copy()
            return own
        if kind in BOXES:
            own = self._of[id(value)] = value.copy()
            held = own.copy()
            self._dict(own, path) if isinstance(own, dict) else _refill(own, self._all(own, path))
            if self._shares and self._mapped.isdisjoint(map(id, _contents(held))) and _same(own, held):
                self._of[id(value)] = own = value
            return own
        if is_tuple(kind) or kind is frozenset:
            parts = self._all(value, path)
            same = all(map(is_, parts, value))
            return value if same else kind(parts) if kind in (tuple, frozenset) else kind(*parts)
        if kind is types.MethodType:
            owner = self._copy(value.__self__, path)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is functools.partial:
            return self._partial(value, path)
        if isinstance(value, Tensor):
            self.plain.append((path, value))
        return value

    def _partial(self, value: functools.partial[Any], path: str) -> functools.partial[Any]:
        held = [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
        copied = self._all(held, path)
        if all(map(is_, copied, held)):
            return value
        rest = iter(copied[1 + len(value.args) :])
        keywords = {key: next(rest) for key in value.keywords}
        own = functools.partial(copied[0], *copied[1 : 1 + len(value.args)], **keywords)
        vars(own).update(zip(vars(value), rest, strict=True))
        return own

    def _all(self, values: Any, path: str) -> list[Any]:
        return [self._copy(value, f"{path}.{i}") for i, value in enumerate(values)]

    def _dict(self, own: dict[Any, Any], path: str) -> dict[Any, Any]:
        held = [(self._copy(key, path), self._copy(value, f"{path}.{key}")) for key, value in own.items()]
        if isinstance(own, defaultdict):
            own.default_factory = self._copy(own.default_factory, path)
        own.clear()
        own.update(held)
        return own


def _refill(own: Any, held: list[Any]) -> None:
    own.clear()
    (own.update if isinstance(own, set) else own.extend)(held)


def _contents(box: Any) -> Iterable[Any]:
    return chain(box, box.values()) if isinstance(box, dict) else box


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects."""
    held = (
        [set(map(id, a)), set(map(id, b))] if isinstance(a, set) else [list(map(id, _contents(box))) for box in (a, b)]
    )
    return held[0] == held[1]
