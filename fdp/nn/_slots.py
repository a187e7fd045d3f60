"""Where a clone has the parameters and buffers of its module, by name."""

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, final

from torch import Tensor, nn

from fdp._trees.untraced import leave_alone

_setitem: Callable[[Any, Any, Any], None] = operator.setitem
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Registry = tuple[bool, str, dict[str, Any], dict[str, Any]]
"""Whether it is that of a submodule, `_parameters` or `_buffers`, the module's content, and the clone's."""


@final
class TensorSlots:
    """The entries of a clone's registries, several under one name where a tensor is tied.

    `params` and `buffers` have the names as keys, and `ids` are those of the tensors. Tensors of modules that are no
    submodules have no name.
    """

    def __init__(
        self, module: nn.Module, pairs: Sequence[tuple[nn.Module, nn.Module]], registries: Sequence[Registry]
    ) -> None:
        params = {id(tensor): name for name, tensor in module.named_parameters()}
        buffers = {id(tensor): name for name, tensor in module.named_buffers()}
        self.params, self.buffers = dict.fromkeys(params.values()), dict.fromkeys(buffers.values())
        self.ids = params.keys() | buffers.keys()
        self._two_kinds = not params.keys().isdisjoint(buffers)
        self._place({"_parameters": params, "_buffers": buffers}, registries)
        weights = [(clone, part._parameters.get("weight")) for part, clone in pairs if isinstance(part, _EMBEDDINGS)]
        self._embeddings = [(clone, params[id(weight)]) for clone, weight in weights if id(weight) in params]

    def _place(self, names: Mapping[str, Mapping[int, str]], registries: Sequence[Registry]) -> None:
        """Which slots belong to which name, the first of a tied tensor last. Slots without a name come at the end."""
        slots: list[tuple[str | None, dict[str, Any], str, Tensor]] = [
            (names[kind].get(id(tensor)) if registered else None, own, key, tensor)
            for registered, kind, seen, own in reversed(registries)
            for key, tensor in reversed(seen.items())
            if tensor is not None
        ]
        slots.sort(key=lambda slot: slot[0] is None)
        self.names: list[str] = [name for name, _, _, _ in slots if name is not None]
        self._in, self._keys = [own for _, own, _, _ in slots], [key for _, _, key, _ in slots]
        self._named, self._tensors = self._in[: len(self.names)], [tensor for _, _, _, tensor in slots]
        self._first = {name: (own, key) for name, own, key, _ in slots if name is not None}
        # The first name twice: of a single name itemgetter does not make a tuple.
        self._pick = itemgetter(*self.names, self.names[0]) if self.names else tuple

    def own(self) -> dict[str, Tensor]:
        """The module's tensors by name."""
        return dict(zip(self.names, self._tensors, strict=False))

    def takes(self, values: Mapping[str, Any], strict: bool) -> bool:
        """Whether `bind` is enough: tensors, under no name but the first of each tied tensor."""
        names = self.params.keys() | self.buffers.keys()
        enough = (len(values) == len(names) or not strict) and not self._two_kinds  # these torch takes for one
        return enough and values.keys() <= names and all(isinstance(value, Tensor) for value in values.values())

    def bind(self, values: Mapping[str, Tensor]) -> None:
        """Put a tensor under each name, in all its slots. Names left out keep the module's own."""
        if len(values) < len(self.params) + len(self.buffers):
            values = {**self.own(), **values}
        any(map(_setitem, self._named, self._keys, self._pick(values)))  # `any` drives the map: setitem gives None

    def bound(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What is under the names now, which is not what was bound where forward has put another tensor."""
        places = ((name, *self._first[name]) for name in names)
        return {name: slot[key] for name, slot, key in places if key in slot}

    def take_out(self, names: Container[str]) -> list[tuple[dict[str, Any], str, Any]]:
        """Put the module's own tensors under these names, and say what was where."""
        places = zip(self.names, self._named, self._keys, self._tensors, strict=False)
        found = [(slot, key, slot.get(key), own) for name, slot, key, own in places if name in names]
        for slot, key, _, own in found:
            slot[key] = own
        return [(slot, key, now) for slot, key, now, _ in found]

    def release(self) -> None:
        """Put the module's own tensors under all names."""
        any(map(_setitem, self._in, self._keys, self._tensors))

    def renormalised(self) -> list[str]:
        """The weights that forward writes to: embeddings with `max_norm` keep the rows that they look up below it."""
        return [name for clone, name in self._embeddings if vars(clone).get("max_norm") is not None]


leave_alone(globals())
