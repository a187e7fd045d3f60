"""The buffers of a module after its replicas have run."""

import torch
from torch import Tensor, nn

from fdp._placement.moves import copy
from fdp.nn._copies import Names
from fdp.nn._replicate import InPlace


def keep_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Give the module what a replica of it has in place of its buffers.

    What was written in place is there already, unless the replica has copies on another device.
    """
    swapped = vars(replica).get("tensors", {}) if isinstance(replica, InPlace) else None
    if swapped is None and "_is_replica" not in vars(replica):
        return  # somebody else's, who shares them or not
    written = [(path, part) for path, part in module.named_modules() if part._buffers]
    parts = dict(replica.named_modules()) if swapped is None and written else {}
    names = {id(buffer): name for name, buffer in module.named_buffers()} if swapped else {}
    for path, part in written:
        for key, own in list(part._buffers.items()):
            if swapped is None:
                value = parts[path]._buffers.get(key, own) if path in parts else own
            else:
                value = swapped.get(names.get(id(own), ""), own)
            _give(part, key, own, value)


def _give(part: nn.Module, key: str, own: Tensor | None, value: object) -> None:
    if value is own or not isinstance(value, Tensor | None):  # where forward has deleted it, torch leaves a mark
        return
    if own is None or value is None or value.device == own.device:
        part._buffers[key] = value if own is None or value is None else copy(value, own.device, Names([key]), 0)
    elif not is_same(own, moved := copy(value.detach(), own.device, Names([key]), 0)):
        write(own, moved)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta:
        return a.is_meta
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN here


def write(own: Tensor, value: Tensor) -> None:
    """Give a buffer other values, in place."""
    with torch.inference_mode(own.is_inference()), torch.no_grad():
        if value.shape != own.shape:
            own.resize_(value.shape)
        own.copy_(value)
