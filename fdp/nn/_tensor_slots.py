"""Where a clone has the parameters and buffers of its module, by name."""

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, final

from torch import Tensor, nn

from fdp.nn._clone import Box

_setitem: Callable[[Any, Any, Any], None] = operator.setitem
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Registry = tuple[bool, str, Box]
"""Whether it is that of a submodule, `_parameters` or `_buffers`, and what is in it."""


@final
class TensorSlots:
    """The entries of a clone's registries, several under one name where a tensor is tied.

    `params` and `buffers` have the names as keys, and `ids` are those of the tensors. Tensors of modules that are no
    submodules have no name. Between calls there is a mark under each name, not a tensor: one that no call uses would
    only be fetched into the processor's cache.
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
        slots: list[tuple[str | None, Box, str, Tensor]] = [
            (names[kind].get(id(tensor)) if registered else None, box, key, tensor)
            for registered, kind, box in reversed(registries)
            for key, tensor in reversed(box.seen.items())
            if tensor is not None
        ]
        slots.sort(key=lambda slot: slot[0] is None)
        self.names: list[str] = [name for name, _, _, _ in slots if name is not None]
        self._in, self._keys = [box.own for _, box, _, _ in slots], [key for _, _, key, _ in slots]
        self._named, self._tensors = self._in[: len(self.names)], [tensor for _, _, _, tensor in slots]
        self._idle = [tensor if name is None else object() for name, _, _, tensor in slots]
        any(map(_setitem, [box.idle for _, box, _, _ in slots], self._keys, self._idle))
        self._first = {name: (box.own, key) for name, box, key, _ in slots if name is not None}
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
        """Have under these names what is there between calls, and where the module's own are. Says what was where."""
        places = zip(self.names, self._named, self._keys, self._tensors, self._idle, strict=False)
        found = [
            (slot, key, now, idle)
            for name, slot, key, own, idle in places
            if (now := slot.get(key)) is own or name in names
        ]
        for slot, key, _, idle in found:
            slot[key] = idle
        return [(slot, key, now) for slot, key, now, _ in found]

    def release(self) -> None:
        """Let go of all tensors that have a name."""
        any(map(_setitem, self._in, self._keys, self._idle))

    def renormalised(self) -> list[str]:
        """The weights that forward writes to: embeddings with `max_norm` keep the rows that they look up below it."""
        return [name for clone, name in self._embeddings if vars(clone).get("max_norm") is not None]
