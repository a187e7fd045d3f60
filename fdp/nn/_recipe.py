"""What a tree of modules is made of: noted once, and looked at once a call, which makes its clones from that."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, final

from torch import Tensor, nn

from fdp._execution.process_lock import exclusively
from fdp._transforms.own_statistics import may_take_own, takes_own
from fdp._trees import torch_private
from fdp.nn._values import ATOMS, parts_of
from fdp.nn._walk import HOOKS, OF_TENSORS, Attributes, ModulePart, Walk, join

_structure, _of_tensors = itemgetter("_modules", *HOOKS), itemgetter(*OF_TENSORS)


@final
class Recipe:
    """What a module is made of. It keeps none of the modules alive.

    Tensors are numbered: none is 0, those with a name follow in the order of `params` and `buffers`, then the others.
    `numbers` are theirs by name; `has_both_kinds` says that one tensor is a parameter and a buffer. `in_place` says why
    no clone can stand for the module, which is then called itself; such a recipe has no parts.
    """

    def __init__(self, module: nn.Module) -> None:
        walk = Walk(module)
        self.in_place = walk.reason
        self.params, self.buffers = dict.fromkeys(walk.params), dict.fromkeys(walk.buffers)
        self.numbers = {name: number for number, name in enumerate(chain(walk.params, walk.buffers), 1)}
        self.has_both_kinds = walk.has_both_kinds
        self._refs, self.ids = list(map(weakref.ref, walk.modules)), list(map(id, walk.modules))
        self._kinds = [
            weakref.ref(type(part)) for part in walk.modules
        ]  # one may have a property that knows the module
        self._norms = [ref for ref, part in zip(self._refs, walk.modules, strict=True) if may_take_own(part)]
        states = list(map(vars, walk.modules)) if walk.is_whole else []
        self._fixed, self._loose = self._versions(states)
        if self.in_place is not None:  # something in it leads to the module
            walk.parts, walk.places, walk.known = [], [], {}
        self.parts, self.places, self._known, self.registered = walk.parts, walk.places, walk.known, walk.registered
        self.links = [(part.children, part.params, part.buffers) for part in self.parts]
        self.odd = [i for i, part in enumerate(self.parts) if part.own or part.has_hooks]
        self.unnamed = [join(self.parts[i].path, key) for i, _, key in self.places[len(self.numbers) :]]
        weights = [(i, dict(part.params).get("weight")) for i, part in enumerate(self.parts)]
        self._embeddings = [
            (i, n) for i, n in weights if n and isinstance(walk.modules[i], nn.Embedding | nn.EmbeddingBag)
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
        odd = [states[i][key] for i in self.odd for key in self.parts[i].own]
        return states if all(_knows(value, self._known, set()) for value in odd) else None

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
    """Whether nothing but numbers, strings and tensors has changed, and what a clone has of its own."""
    kinds = [(key, type(value)) for key, value in state.items()]
    return kinds == part.attributes and all(state[key] is value for key, value in part.shared)


def _knows(value: Any, known: Mapping[int, Any], inside: set[int]) -> bool:
    """Whether a value is made of what is known, numbers and tensors."""
    if type(value) in ATOMS or id(value) in known or id(value) in inside or isinstance(value, Tensor):
        return True
    inside.add(id(value))
    parts = parts_of(value)
    return parts is not None and all(_knows(part, known, inside) for _, part in parts)
