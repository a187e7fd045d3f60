"""What a tree of modules is made of: noted once, and looked at once a call, which makes its clones from that."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias, final

from torch import nn

from fdp._execution.process_lock import exclusively
from fdp._transforms.batch_norm_warning import may_take_own, takes_own
from fdp._trees import torch_private
from fdp.nn._copier import Copier
from fdp.nn._no_clone import why_no_clone_of_classes
from fdp.nn._reachable import is_settled, members, way_back
from fdp.nn._tree import HOOKS, REGISTRIES, Attributes, Modules, beginning, join, odd_keys

Key: TypeAlias = str | tuple[int, str, str] | None
"""A tensor's first name, or its place if it has none; None is None."""
_registries, _hooks = itemgetter(*REGISTRIES), itemgetter(*HOOKS)


@final
class Recipe:
    """What a module is made of as long as nothing is written to it: names, keys and numbers, and no object of the user.

    `usual` are the names of its tensors, in the order of `params` and `buffers`; `names` has the other names of tied
    tensors too. `in_place` says why no clone can stand for the module, which is then called itself;
    `reason` is why there is none at all.
    """

    def __init__(self, module: nn.Module) -> None:
        tree = Modules(module)
        states, count = list(map(vars, tree.all)), tree.registered
        self._refs, self._kinds = list(map(weakref.ref, tree.all)), [weakref.ref(type(part)) for part in tree.all]
        self._marks, self.ids = _marks(states), tree.numbers
        held = [[state[name].copy() for name in REGISTRIES] for state in states]  # at once: other threads may write
        known, kept = dict[int, Any]({id(None): None}), dict[Any, Any]()
        self.places, self.names = dict[Any, tuple[int, str, str]](), dict[str, Any]()
        self.buffer_slots = list[tuple[Any, int, str, bool]]()  # the last: whether it is the first with this name
        order = [(i, which) for which in (1, 2) for i in range(count)]
        for i, which in order + [(i, which) for i in range(count, len(states)) for which in (1, 2)]:
            for key, tensor in held[i][which].items():
                place, path = (i, REGISTRIES[which], key), join(tree.paths[i], key)
                name = known.setdefault(id(tensor), path if i < count else place)
                if tensor is not None:
                    self.places.setdefault(name, place)
                if tensor is not None and i < count:
                    self.names[path] = name
                    self.buffer_slots += [(name, i, key, path == name)] * (which == 2)
        self.usual = {name: name for name in self.places if isinstance(name, str)}
        self.unnamed = [(join(tree.paths[i], key), (i, of, key)) for i, of, key in self.places.values() if i >= count]
        self.keys = [kept.setdefault(keys, keys) for keys in (tuple(map(tuple, of_each)) for of_each in held)]
        self.children = [
            -1 if x is None else tree.numbers.get(id(x), -1) for of_each in held for x in of_each[0].values()
        ]
        self.tensors: list[Key] = [known[id(x)] for _, *both in held for registry in both for x in registry.values()]
        self.plain = list[tuple[Attributes, list[str]]]()
        self.odd = list[tuple[int, str, list[str]]]()
        for i, state in enumerate(map(dict.copy, states)):
            odd = odd_keys(state)
            found = beginning(state, odd)
            self.plain.append(kept.setdefault((*found[0], *map(id, found[0].values()), *found[1]), found))
            self.odd += [(i, tree.paths[i], odd)] * bool(odd)
        self._norms = [ref for ref, part in zip(self._refs, tree.all, strict=True) if may_take_own(part)]
        self.params = dict.fromkeys(name for name, _ in module.named_parameters())
        self.buffers = dict.fromkeys(name for name, _ in module.named_buffers())
        self.reason: str | None = tree.reason
        self.in_place: str | None = tree.reason or self._why_in_place(module, states)
        if self.in_place is not None:
            self._marks = _outline(states)

    def _why_in_place(self, module: nn.Module, states: Sequence[Attributes]) -> str | None:
        if [*self.params, *self.buffers] != [*self.usual]:
            return f"{type(module).__name__} names its tensors in a way of its own"
        of_classes = [(f"the class {kind.__name__}", each) for kind in {*self.kinds()} for each in members(kind)]
        return why_no_clone_of_classes(of_classes) or self._way_back(states, of_classes)

    def kinds(self) -> list[Any]:
        """The class of each module."""
        return [ref() for ref in self._kinds]

    def look(self) -> list[Attributes] | None:
        """The attributes of each module as they are now; None if the module is not what was noted."""
        parts = [ref() for ref in self._refs]
        if not parts or list(map(type, parts)) != self.kinds():
            return None
        states = [part.__dict__ for part in parts]
        if (_marks if self.in_place is None else _outline)(states) != self._marks:
            return None
        try:
            return states if self.in_place or not self.odd or self._way_back(states) is None else None
        except (KeyError, RecursionError):  # there is a module that was not
            return None

    def _way_back(self, states: Sequence[Attributes], others: Iterable[tuple[str, Any]] = ()) -> str | None:
        """What of all that a clone shares with the module may lead back to it."""
        copier = Copier(dict(zip(self.ids, self._refs, strict=True)) if self.odd else {}, _met)
        for i, path, keys in self.odd:
            for key in keys:
                copier.copy(states[i][key], join(path, key))
        shared = [(path, value) for path, value in [*copier.shared, *others] if not is_settled(value)]
        if not shared:
            return None
        targets = copier.boxes().union(self.ids, *(map(id, each) for each in (states, *map(_registries, states))))
        path = way_back(shared, targets)
        return None if path is None else f"{path} leads back to it, or may do so"

    def own(self, states: Sequence[Attributes]) -> dict[Any, Any]:
        """The module's own tensors."""
        return {key: states[i][registry][name] for key, (i, registry, name) in self.places.items()}

    def takes_own_statistics(self) -> bool:
        """Whether several slots do not compute what one device does."""
        return any(takes_own(part) for ref in self._norms if (part := ref()) is not None)


_RECIPES: dict[int, tuple[weakref.ref[nn.Module], Recipe]] = {}


def recipe_of(module: nn.Module) -> tuple[Recipe, list[Attributes]]:
    """The recipe of a module as it is now, and the attributes of each part."""
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


def _fitting(module: nn.Module) -> tuple[Recipe, list[Attributes]] | None:
    ref, recipe = _RECIPES.get(id(module), (None, None))
    if ref is None or recipe is None or ref() is not module or (states := recipe.look()) is None:
        return None
    return recipe, states


def _new(module: nn.Module) -> tuple[Recipe, list[Attributes]]:
    key, recipe = id(module), Recipe(module)
    _RECIPES[key] = weakref.ref(module, lambda _: _RECIPES.pop(key, None)), recipe
    return recipe, [vars(part) for ref in recipe._refs if (part := ref()) is not None]


def _met(module: nn.Module, path: str) -> Any:
    raise KeyError(path)


def _marks(states: Sequence[Attributes]) -> list[int]:
    """How often attributes and registries have been written, and the numbers of hooks: they differ after any change."""
    dicts = chain(states, chain.from_iterable(map(_registries, states)))
    return [*map(torch_private.dict_version, dicts), *map(len, chain.from_iterable(map(_hooks, states)))]


def _outline(states: Sequence[Attributes]) -> list[Any]:
    """Names and classes of attributes, names of tensors: what stays while a module is called in place."""
    attributes = [[*state, *map(id, map(type, state.values()))] for state in states]
    return attributes + [list(each) for state in states for each in (*_registries(state), *_hooks(state))]
