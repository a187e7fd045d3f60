"""A clone of a tree of modules: made for one call, over other tensors, and thrown away."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fdp.nn._copier import Copier
from fdp.nn._reachable import OF_CLONE
from fdp.nn._recipe import Recipe
from fdp.nn._tree import FLAGS, HOOKS, Attributes, join


class _NoHooks(OrderedDict[Any, Any]):
    """The hooks of clones without any, one for all of them: to make some takes longer than the rest of a clone."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError(
            "forward registers a hook on a module that is called with other tensors, and the clone that runs goes with "
            "the call. Register the hook before: every later call has it"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, ()


_REGISTRIES, _EMPTY = {*HOOKS, *FLAGS}, OrderedDict[Any, Any]()
_OF_CLONE: dict[str, Any] = {**dict.fromkeys(_REGISTRIES, _NoHooks()), OF_CLONE: True}
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
    tensors: Sequence[Any],
    *,
    shares: bool,
    replica: dict[str, Any] | None = None,
) -> Clone:
    """New modules with the attributes of the module's, over tensors by number.

    If the clone `shares`, it has the lists, dicts and sets of the module in which there is no tensor or module of it.
    A `replica` is a user's, who may register hooks on it; it has these attributes.
    """
    made: list[Any] = [*map(_new, recipe.kinds()), None]  # the last one is number -1
    common = _OF_CLONE if replica is None else replica
    for (children, params, buffers), state, module in zip(recipe.links, states, made, strict=False):
        own = state.copy()
        own.update(common)
        if replica is not None:
            own.update({key: OrderedDict() for key in _REGISTRIES})
        own["_modules"] = {key: made[i] for key, i in children} if children else {}
        own["_parameters"] = {key: tensors[i] for key, i in params} if params else {}
        own["_buffers"] = {key: tensors[i] for key, i in buffers} if buffers else {}
        own["_non_persistent_buffers_set"] = own["_non_persistent_buffers_set"].copy()
        _put(module, own)
    plain = list(zip(recipe.unnamed, tensors[len(recipe.numbers) + 1 :], strict=True))
    if not recipe.odd:
        return Clone(made, plain)
    own_tensors = recipe.own(states)
    of = dict(zip(recipe.ids, made, strict=False)) | dict(zip(map(id, own_tensors[1:]), tensors[1:], strict=True))
    copier = Copier(of, lambda module, path: module, shares=shares)
    for i, path, keys in recipe.odd:
        copied = {key: copier.copy(states[i][key], join(path, key)) for key in keys}
        hooks = {key: copied.pop(key, _EMPTY).copy() for key in _REGISTRIES} if copied.keys() & _REGISTRIES else {}
        vars(made[i]).update(copied, **hooks)
    return Clone(made, [*plain, *copier.plain])
