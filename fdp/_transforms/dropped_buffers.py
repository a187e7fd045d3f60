"""New buffers that `apply` returned while a loss ran, and that its result does not have: said once a module."""

import contextvars
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fdp._placement.moves import layers
from fdp._placement.transfer_log import differences
from fdp._transforms.batch_norm_warning import say_once
from fdp._trees import torch_private
from fdp._trees.message_lists import names
from fdp._trees.tree import tensors_in
from fdp._trees.types import Tree


class Returned(NamedTuple):
    """What a call of `apply` returned in place of buffers that forward has changed."""

    module: nn.Module
    buffers: Mapping[str, torch.Tensor]


RETURNED: contextvars.ContextVar[list[Returned] | None] = contextvars.ContextVar("fdp_returned", default=None)
"""Where a loss notes them that is asked what it returns."""
_SAID: dict[int, Any] = {}


def note_changed(module: nn.Module, given: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Remember new buffers, if forward has changed some in train mode and somebody asks for them."""
    returned = RETURNED.get()
    if returned is None or not module.training:
        return
    found = {name: x for name, x in new.items() if x is not None}
    if any(x is not given[name] or _is_written(x) for name, x in found.items()):  # batch norm leaves no version
        returned.append(Returned(module, found))


def _is_written(copied: torch.Tensor) -> bool:
    return copied.is_inference() or torch_private.version(copied) > 0


def say_dropped(returned: list[Returned], aux: Tree, where: str) -> None:
    """Say of which modules the result of a shard has no new buffers."""
    kept = {_memory(x) for x in tensors_in(aux)}
    for module, buffers in returned:
        if differences() is None and kept.isdisjoint(map(_memory, buffers.values())):
            what = f"new buffers of a {type(module).__name__} in train mode: {names(list(buffers))}"
            say_once(_SAID, module, f"{where}: the loss does not return the {what}. {_WAY_OUT}", UserWarning)


_WAY_OUT = (
    "If nothing else keeps them, they stay as they are. Return (loss, new_buffers) with has_aux=True and "
    "aux_dims='mean', and pass these to the next step or to fdp.set_buffers. If they are to stay, call module.eval()"
)


def _memory(tensor: torch.Tensor) -> int:
    """The same for tensors that share it, inside transforms too."""
    inner = layers(tensor)[-1]
    return torch_private.storage(inner) if inner.layout is torch.strided else id(inner)
