"""A clone of a tree of modules: made for one call, over other tensors, and thrown away."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fdp.nn._copier import Copier
from fdp.nn._recipe import Recipe
from fdp.nn._tree import FLAGS, HOOKS, OF_STATE, Attributes, join

_EMPTY = OrderedDict[Any, Any]()
_new = object.__new__
_put = vars(nn.Module)["__dict__"].__set__  # `object.__setattr__(module, "__dict__", ...)` takes longer


class Clone(NamedTuple):
    """The modules of a clone, the root first, and what they share with the module's."""

    modules: Sequence[Any]
    plain: Sequence[tuple[str, Tensor]] = ()
    """Tensors that are neither parameters nor buffers, by path."""


def clone(
    recipe: Recipe,
    states: Sequence[Attributes],
    tensors: Mapping[Any, Any],
    replica: dict[str, Any] | None = None,
) -> Clone:
    """New modules with the attributes of the module's, over other tensors by name or place.

    A `replica` is a user's, who may register hooks on it; it has these attributes, and the lists, dicts and sets of the
    module in which there is no tensor or module of it.
    """
    made = list[Any](map(_new, recipe.kinds()))
    links: list[Any] = [*made, None]  # the last one is number -1
    child, tensor = map(links.__getitem__, recipe.children), map(tensors.__getitem__, recipe.tensors)
    for (children, params, buffers), (begin, shared), state, module in zip(
        recipe.keys, recipe.plain, states, made, strict=True
    ):
        own = begin.copy()
        for key in shared:
            own[key] = state[key]
        if replica is not None:
            own.update(
                {key: OrderedDict() for key in (*HOOKS, *FLAGS)}, **{key: state[key] for key in OF_STATE}, **replica
            )
        own["_modules"] = dict(zip(children, child, strict=False)) if children else {}
        own["_parameters"] = dict(zip(params, tensor, strict=False)) if params else {}
        own["_buffers"] = dict(zip(buffers, tensor, strict=False)) if buffers else {}
        own["_non_persistent_buffers_set"] = state["_non_persistent_buffers_set"].copy() if buffers else set()
        _put(module, own)
    unnamed = [(path, tensors[place]) for path, place in recipe.unnamed]
    if not recipe.odd:
        return Clone(made, unnamed)
    of = dict(zip(recipe.ids, made, strict=False)) | {id(x): tensors[key] for key, x in recipe.own(states).items()}
    copier = Copier(of, lambda module, path: module, shares=replica is not None)
    for i, path, keys in recipe.odd:
        copied = {key: copier.copy(states[i][key], join(path, key)) for key in keys}
        if not copied.keys().isdisjoint(HOOKS):
            copied |= {key: copied.get(key, _EMPTY).copy() for key in (*HOOKS, *FLAGS)}
        vars(made[i]).update(copied)
    return Clone(made, [*unnamed, *copier.plain])
