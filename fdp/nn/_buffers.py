"""The buffers of a module after its replicas have run."""

from typing import Any

from torch import Tensor, nn

from fdp._placement.moves import copy
from fdp.nn._replicate import InPlace, Names
from fdp.nn._tree import join
from fdp.nn._write_back import put_buffer


def keep_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Give the module what forward has put in place of buffers of its first replica, which shares the others."""
    written = [(path, part) for path, part in module.named_modules() if part._buffers]
    now: dict[str, Any] = {}
    if isinstance(replica, InPlace):
        now = vars(replica)["tensors"]
    elif written and "_is_replica" in vars(replica):
        now = {join(path, key): x for path, part in replica.named_modules() for key, x in part._buffers.items()}
    for path, part in written:
        for key, own in list(part._buffers.items()):
            new = now.get(join(path, key), own)
            if new is own or not isinstance(new, Tensor | None):  # where forward has deleted it, torch leaves a mark
                continue
            if own is None or new is None or own.device == new.device:
                part._buffers[key] = new
            else:  # all of them: this replica has copies
                put_buffer(part._buffers, key, copy(new.detach(), own.device, Names([key]), 0))
