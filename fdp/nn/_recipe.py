"""What a tree of modules is made of: noted once, and looked at once a call, which makes its clones from that."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, final

from torch import Tensor, nn

from fdp._execution.process_lock import exclusively
from fdp._transforms.own_statistics import may_take_own, takes_own
from fdp._trees import torch_private
from fdp.nn._reachable import LruCache, is_clone, members, way_back
from fdp.nn._values import is_constant
from fdp.nn._walk import HOOKS, OF_TENSORS, Attributes, ModulePart, Sight, Walk, ids_of, join

_structure, _of_tensors = itemgetter("_modules", *HOOKS), itemgetter(*OF_TENSORS)


@final
class Recipe:
    """What a module is made of: names, keys and numbers, and no object of the user's.

    Tensors are numbered: none is 0, those with a name follow in the order of `params` and `buffers`, then the others.
    `numbers` are theirs by name, and `names` has the other names of tied tensors too. `has_both_kinds` says that one
    tensor is a parameter and a buffer. `in_place` says why no clone can stand for the module, which is then called
    itself; such a recipe has no parts.
    """

    def __init__(self, module: nn.Module) -> None:
        walk = Walk(module)
        self.params, self.buffers = dict.fromkeys(walk.params), dict.fromkeys(walk.buffers)
        self.numbers = {name: number for number, name in enumerate(chain(walk.params, walk.buffers), 1)}
        self.names, self.has_both_kinds = walk.names, walk.has_both_kinds
        self._is_clone = is_clone(module)
        self._refs, self.ids = list(map(weakref.ref, walk.modules)), list(map(id, walk.modules))
        self._kinds = [weakref.ref(type(part)) for part in walk.modules]
        self._norms = [ref for ref, part in zip(self._refs, walk.modules, strict=True) if may_take_own(part)]
        states = list(map(vars, walk.modules)) if walk.is_whole else []
        self.parts, self.places, self._targets = (
            walk.parts,
            walk.places,
            ids_of(walk.modules) if states else frozenset(),
        )
        self._rich = [i for i, part in enumerate(self.parts) if part.others or part.has_hooks]
        self.in_place = walk.reason or self._way_back(states)
        self._fixed, self._loose = self._versions(states)
        if self.in_place is not None:
            self.parts, self.places = [], []
        self.odd = [i for i in self._rich if self.parts]
        self.links = [(part.children, part.params, part.buffers) for part in self.parts]
        self.unnamed = [join(self.parts[i].path, key) for i, _, key in self.places[len(self.numbers) :]]
        embeddings = [(part, walk.modules[i]) for i, part in enumerate(self.parts)]
        self._embeddings = [
            (i, number)
            for i, (part, module) in enumerate(embeddings)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (number := dict(part.params).get("weight"))
        ]

    def kinds(self) -> list[Any]:
        """The class of each part."""
        return [ref() for ref in self._kinds]

    def fits(self) -> list[Attributes] | None:
        """The attributes of each part as they are now; None if they are not what was noted."""
        parts = [ref() for ref in self._refs]
        if list(map(type, parts)) != self.kinds() or not self._fixed:
            return None
        states = [part.__dict__ for part in parts]
        fixed, loose = self._versions(states)
        if fixed != self._fixed:
            return None
        if loose != self._loose:
            if self.in_place or not all(map(_follows, self.parts, states)) or not self._ties(states):
                return None
            self._loose = loose  # of before the look: another thread may have written since
        try:
            return states if self.in_place or self._way_back(states) is None else None
        except _NewModule:
            return None

    def _way_back(self, states: Sequence[Attributes]) -> str | None:
        """What of all that a clone shares with the module may lead back to it."""
        sight = Sight(self._check_known, may_hold_clones=not self._is_clone)
        for i in self._rich:
            sight.see(self.parts[i], states[i])
        found = [(kind, each) for kind in {*self.kinds()} for each in members(kind)]
        cached = next((kind for kind, each in found if isinstance(each, LruCache)), None)
        if cached is not None:  # it keeps every instance that was called
            return f"a method of {cached.__name__} has a cache"
        held = [*sight.shared, *[(f"the class {kind.__name__}", each, False) for kind, each in found]]
        path = way_back(held, self._targets, sight.boxes) if held else None
        return None if path is None else f"{path} leads back to it, or may do so"

    def _check_known(self, module: nn.Module, path: str) -> None:
        if id(module) not in self._targets:
            raise _NewModule(path)

    def _versions(self, states: Sequence[Attributes]) -> tuple[list[int], list[int]]:
        """How often the registries of modules and hooks have been written; and how often attributes and the others."""
        # Calls in place put other tensors into registries, and take them out again.
        others = chain.from_iterable(map(_of_tensors, states)) if self.in_place is None else ()
        return _read(chain.from_iterable(map(_structure, states))), _read(chain(states, others))

    def _ties(self, states: Sequence[Attributes]) -> bool:
        """Whether the same keys have tensors, and the same of them the same tensor."""
        own = [None, *[states[i][registry].get(key) for i, registry, key in self.places]]
        noted = [dict(held) for _, *both in self.links for held in both]
        now = list(chain.from_iterable(map(_of_tensors, states)))
        same = [list(held) for held in noted] == [list(held) for held in now] and len(set(map(id, own))) == len(own)
        return same and all(
            held[key] is own[n] for held, then in zip(now, noted, strict=True) for key, n in then.items()
        )

    def tensors(self, states: Sequence[Attributes]) -> list[Any]:
        """The module's own tensors by number."""
        return [None, *[states[i][registry][key] for i, registry, key in self.places]]

    def others(self, states: Sequence[Attributes]) -> list[Tensor]:
        """Those that have no name."""
        return [states[i][registry][key] for i, registry, key in self.places[len(self.numbers) :]]

    def renormalised(self, states: Sequence[Attributes]) -> list[int]:
        """The weights that forward writes to: embeddings with `max_norm` keep the rows that they look up below it."""
        return [number for i, number in self._embeddings if states[i].get("max_norm") is not None]

    def takes_own_statistics(self) -> bool:
        """Whether several slots do not compute what one device does."""
        return any(takes_own(part) for ref in self._norms if (part := ref()) is not None)


class _NewModule(Exception):
    """There is a module that the recipe does not know."""


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
    if ref is None or recipe is None or ref() is not module or (states := recipe.fits()) is None:
        return None
    return recipe, states


def _new(module: nn.Module) -> tuple[Recipe, list[Attributes]]:
    key, recipe = id(module), Recipe(module)
    _RECIPES[key] = weakref.ref(module, lambda _: _RECIPES.pop(key, None)), recipe
    return recipe, [vars(part) for ref in recipe._refs if (part := ref()) is not None]


def _read(dicts: Iterable[Any]) -> list[int]:
    return list(map(torch_private.dict_version, dicts))


def _follows(part: ModulePart, state: Attributes) -> bool:
    """Whether what was a number or a string is one, and there is no attribute more or less."""
    kinds = [(key, type(value)) for key, value in state.items()]
    return kinds == part.attributes and all(is_constant(state[key]) for key in part.constants)
