"""The replicas of one call, on loan: each a module that computes with other tensors than the one it stands for."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from fdp._placement.moves import copy, is_expanded
from fdp.nn._copies import Names, Tensors
from fdp.nn._functional_call import call_in_place, clear, forget, in_place, is_held, keep
from fdp.nn._replicate import as_replica, shallow
from fdp.nn._stateless import Skeleton

Buffer = tuple[nn.Module, str, Any]
"""The part of the user's module that has a buffer, its name there, and what the replica has in its place."""


class Stand(Protocol):
    """A way to call a module with other tensors than its own."""

    @property
    def root(self) -> nn.Module:
        """What is called."""
        ...

    def bind(self, tensors: Tensors) -> None:
        """Put tensors under their names."""
        ...

    def buffers_now(self) -> Iterator[Buffer]:
        """All buffers as they are now."""
        ...

    def lost(self) -> Sequence[str]:
        """What forward has written to and the module does not get."""
        ...

    def end(self) -> None:
        """Let go of the tensors."""
        ...


@final
class Clone:
    """A clone of the module, which serves later calls too."""

    def __init__(self, module: nn.Module, skeleton: Skeleton) -> None:
        self._module, self._skeleton, self.root = module, skeleton, skeleton.root
        as_replica(skeleton)

    @property
    def skeleton(self) -> Skeleton:
        """What makes the clone."""
        return self._skeleton

    def bind(self, tensors: Tensors) -> None:
        self._skeleton.slots.bind(tensors)

    def buffers_now(self) -> Iterator[Buffer]:
        for part, clone in self._skeleton.pairs(self._module):
            for key, value in clone._buffers.items():
                yield part, key, value

    def lost(self) -> Sequence[str]:
        return self._skeleton.lost()

    def end(self) -> None:
        skeleton = self._skeleton
        skeleton.translate(self._module)
        del self.root, self._skeleton
        if not is_held(skeleton):
            keep(clear(skeleton), self._module)


@final
class CopiedModule:
    """A copy part by part, for scripted modules: those of the C++ side cannot be bound twice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.root: Any = None

    def bind(self, tensors: Tensors) -> None:
        self.root = shallow(self._module, tensors)

    def buffers_now(self) -> Iterator[Buffer]:
        for part, replica in zip(self._module.modules(), self.root.modules(), strict=True):
            for key, value in replica._buffers.items():
                yield part, key, value

    def lost(self) -> Sequence[str]:
        return ()

    def end(self) -> None:
        self.root = None


@final
class InPlace(nn.Module):
    """The module itself, with its tensors exchanged during each call: where a clone might lead back to it."""

    def __init__(self, module: nn.Module, ids: frozenset[int]) -> None:
        super().__init__()
        vars(self).update(_original=module, _ids=ids, _tensors={})  # not a child

    @property
    def root(self) -> nn.Module:
        return self

    def bind(self, tensors: Tensors) -> None:
        vars(self)["_tensors"] = tensors

    def buffers_now(self) -> Iterator[Buffer]:
        original, tensors = vars(self)["_original"], vars(self)["_tensors"]
        names = {id(buffer): name for name, buffer in original.named_buffers()}
        for part in original.modules():
            for key, buffer in part._buffers.items():
                value = tensors.get(names.get(id(buffer)))
                if isinstance(value, Tensor):  # where forward has deleted a buffer, torch leaves a mark of its own
                    yield part, key, value

    def lost(self) -> Sequence[str]:
        return ()

    def end(self) -> None:
        vars(self)["_tensors"] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # without hooks of its own
        module: nn.Module = vars(self)["_original"]
        with in_place():
            try:
                return call_in_place(module, vars(self)["_tensors"], args, kwargs)
            finally:
                forget(vars(self)["_ids"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)


@final
class Lent:
    """A replica with its tensors: the buffers of the module itself, or copies of them."""

    def __init__(self, stand: Stand, params: Tensors, buffers: Tensors, device: torch.device, *, copied: bool) -> None:
        self.stand, self.device = stand, device
        names = Names(list(buffers))
        own = {
            name: copy(buffer, device, names, i, always=copied and not is_expanded(buffer))
            for i, (name, buffer) in enumerate(buffers.items())
        }
        self.copy_of = {id(own[name]): buffer for name, buffer in buffers.items() if own[name] is not buffer}
        self._alive = own  # as long as their ids are of use
        stand.bind({**params, **own})
        self.root = stand.root

    def end(self) -> None:
        """If nobody else holds the replica, it serves the next call."""
        del self.root
        self._alive = {}
        self.stand.end()
