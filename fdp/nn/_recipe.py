"""What a tree of modules is made of: noted once, and looked at once a call, which makes its clones from that."""

import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, final

from torch import nn

from fdp._execution.process_lock import exclusively
from fdp._transforms.own_statistics import may_take_own, takes_own
from fdp._trees import torch_private
from fdp.nn._copier import Copier
from fdp.nn._reachable import LruCache, Outside, is_clone, is_settled, members, refuse_clone, way_back
from fdp.nn._tree import HOOKS, REGISTRIES, Attributes, Modules, join, note

_registries, _hooks = itemgetter(*REGISTRIES), itemgetter(*HOOKS)


@final
class Recipe:
    """What a module is made of: names, keys and numbers, and no object of the user's.

    Tensors are numbered: none is 0, those with a name follow in the order of `params` and `buffers`, then the others.
    `usual` are their names by number, `numbers` the reverse, and `names` has the other names of tied tensors too.
    `in_place` says why no clone can stand for the module, which is then called itself; `reason` why there can be none.
    """

    def __init__(self, module: nn.Module) -> None:
        tree = Modules(module)
        states = list(map(vars, tree.all))
        self._refs, self._kinds = list(map(weakref.ref, tree.all)), [weakref.ref(type(part)) for part in tree.all]
        self._is_clone, self._registered, self.ids = is_clone(module), tree.registered, tree.numbers
        marks, self.note = _marks(states), note(states, self.ids, self._registered)
        self._kept = marks, self.note.plain  # at once: threads would mix them up
        self.odd = [
            (i, path, keys) for i, (path, keys) in enumerate(zip(tree.paths, self.note.odd, strict=True)) if keys
        ]
        self._norms = [ref for ref, part in zip(self._refs, tree.all, strict=True) if may_take_own(part)]
        places, names = self.note.places, [join(tree.paths[i], key) for i, _, key in self.note.places]
        named = sum(i < tree.registered for i, _, _ in places)
        self.usual, self.unnamed = dict(enumerate(names[:named], 1)), names[named:]
        self.numbers = {name: number for number, name in self.usual.items()}
        slots = [
            (i, registry, key)
            for i, (_, *both) in enumerate(self.note.keys)
            for registry, keys in zip(REGISTRIES[1:], both, strict=True)
            for key in keys
        ]
        held = [slot for slot in zip(slots, self.note.tensors, strict=True) if 0 < slot[1] <= named]
        self.names = {join(tree.paths[i], key): number for (i, _, key), number in held if i < tree.registered}
        self.buffer_slots = [
            (i, key, number, places[number - 1] == (i, registry, key))
            for (i, registry, key), number in held
            if registry == "_buffers"
        ]
        self.params = dict.fromkeys(name for name, _ in module.named_parameters())
        self.buffers = dict.fromkeys(name for name, _ in module.named_buffers())
        self.in_place = self.reason = tree.reason
        seen: dict[int, Any] = {}
        if [*self.params, *self.buffers] != [*self.numbers]:
            self.in_place = tree.reason or f"{type(module).__name__} names its tensors in a way of its own"
        if self.in_place is None:
            of_classes = [(f"the class {kind.__name__}", each) for kind in {*self.kinds()} for each in members(kind)]
            cached = [path for path, each in of_classes if isinstance(each, LruCache)]  # keeps each instance it is of
            self.in_place = f"{cached[0]} has a cache" if cached else self._way_back(states, of_classes, seen)
        self._outside = Outside(self.kinds(), [each for each in seen.values() if type(each) is types.FunctionType])

    def kinds(self) -> list[Any]:
        """The class of each module."""
        return [ref() for ref in self._kinds]

    def fitting(self) -> "Look | None":
        """The module as it is now; None if that is not what was noted."""
        parts = [ref() for ref in self._refs]
        if not parts or list(map(type, parts)) != self.kinds():
            return None
        states = [part.__dict__ for part in parts]
        marks, (before, plain) = _marks(states), self._kept
        if marks != before:
            now = note(states, self.ids, self._registered)
            if now[:-1] != self.note[:-1]:
                return None
            plain = now.plain
            self._kept = marks, plain  # marks of before the look: another thread may have written since
        if self._outside.are_others():
            return None
        try:
            fits = self.in_place or not self.odd or self._way_back(states) is None
            return Look(states, plain) if fits else None
        except (KeyError, RecursionError):  # there is a module that was not
            return None

    def _way_back(
        self, states: Sequence[Attributes], others: Iterable[tuple[str, Any]] = (), seen: dict[int, Any] | None = None
    ) -> str | None:
        """What of all that a clone shares with the module may lead back to it. What was looked at is `seen` then."""
        copier = Copier(dict(zip(self.ids, self._refs, strict=True)) if self.odd else {}, self._met)
        for i, path, keys in self.odd:
            for key in keys:
                copier.copy(states[i][key], join(path, key))
        shared = [(path, value) for path, value in [*copier.shared, *others] if not is_settled(value)]
        if not shared:
            return None
        targets = copier.boxes().union(self.ids, *(map(id, each) for each in (states, *map(_registries, states))))
        path = way_back(shared, targets, {} if seen is None else seen, refuses_clones=not self._is_clone)
        return None if path is None else f"{path} leads back to it, or may do so"

    def _met(self, module: nn.Module, path: str) -> Any:
        if not self._is_clone:
            refuse_clone(module, path)
        raise KeyError(path)

    def own(self, look: "Look") -> list[Any]:
        """The module's own tensors by number."""
        return [None, *[look.states[i][registry][key] for i, registry, key in self.note.places]]

    def others(self, look: "Look") -> list[Any]:
        """Those that have no name."""
        return [look.states[i][registry][key] for i, registry, key in self.note.places[len(self.numbers) :]]

    def takes_own_statistics(self) -> bool:
        """Whether several slots do not compute what one device does."""
        return any(takes_own(part) for ref in self._norms if (part := ref()) is not None)


class Look(NamedTuple):
    """What a module is like in a call: the attributes of each part, and what its clones begin with."""

    states: list[Attributes]
    plain: list[tuple[Attributes, list[str]]]


_RECIPES: dict[int, tuple[weakref.ref[nn.Module], Recipe]] = {}


def recipe_of(module: nn.Module) -> tuple[Recipe, Look]:
    """The recipe of a module as it is now, and the look at it."""
    if torch_private.is_parametrize_caching():
        raise RuntimeError(
            f"A call of this {type(module).__name__} with other tensors inside torch.nn.utils.parametrize.cached(), "
            "whose cache does not know of which tensors it is. Leave the block, or write it inside of forward"
        )
    found = _fitting(module)
    if found is None:
        with exclusively():  # so that no call in place has put other tensors into it
            found = _fitting(module) or _new(module)
    return found


def _fitting(module: nn.Module) -> tuple[Recipe, Look] | None:
    ref, recipe = _RECIPES.get(id(module), (None, None))
    if ref is None or recipe is None or ref() is not module or (look := recipe.fitting()) is None:
        return None
    return recipe, look


def _new(module: nn.Module) -> tuple[Recipe, Look]:
    key, recipe = id(module), Recipe(module)
    _RECIPES[key] = weakref.ref(module, lambda _: _RECIPES.pop(key, None)), recipe
    return recipe, Look([vars(part) for ref in recipe._refs if (part := ref()) is not None], recipe.note.plain)


def _marks(states: Sequence[Attributes]) -> list[int]:
    """How often attributes and registries have been written, and the numbers of hooks: they differ after any change."""
    dicts = chain(states, chain.from_iterable(map(_registries, states)))
    return [*map(torch_private.dict_version, dicts), *map(len, chain.from_iterable(map(_hooks, states)))]
