"""Batch norms that take the statistics of a slot's own rows, which are not those of one device: said once a module."""

import weakref
from typing import Any

from torch import nn

from fdp._placement.slot import AXES
from fdp._placement.transfer_log import differences
from fdp._trees import torch_private
from fdp._trees.message_lists import names
from fdp._trees.tracebacks import warn


class BatchNormWarning(UserWarning):
    """Several slots run a module in train mode whose batch norms take the statistics of each slot's own rows.

    Loss and gradients are then not those of one device. It comes once for each module, from `functional` and
    `functional_call`. `DataParallel` does not warn: this is what `torch.nn.DataParallel` does.

    >>> import warnings, fdp
    >>> warnings.simplefilter("ignore", fdp.nn.BatchNormWarning)  # where it is meant
    """


BatchNormWarning.__module__ = "fdp.nn"

_SAID: dict[int, Any] = {}


def may_take_own(part: nn.Module) -> bool:
    """Whether a part of a module is a batch norm of torch; one with a forward of its own may do anything."""
    return getattr(type(part), "forward", None) is torch_private.BatchNorm.forward


def takes_own(part: nn.Module) -> bool:
    """Whether such a part, as it is now, normalises by the rows that it sees."""
    return part.training or (part._buffers.get("running_mean") is None and part._buffers.get("running_var") is None)


def say_own(module: nn.Module) -> None:
    """Say that a module has such parts, if it runs on several slots."""
    found = differences()
    if found is None and id(module) in _SAID:
        return
    count = max((axis.slot.at_most for axis in AXES.get()), default=1)
    if count < 2:
        return
    if found is not None:
        found.append(_text(module, count))
        return
    say_once(_SAID, module, f"{_text(module, count)}. {_WAYS_OUT}", BatchNormWarning)


def say_once(said: dict[int, Any], module: nn.Module, text: str, category: type[Warning]) -> None:
    """Warn, unless it was `said` of this module before."""
    key = id(module)
    own = weakref.ref(module, lambda _: said.pop(key, None))
    if said.setdefault(key, own) is own:
        try:
            warn(text, category, once_a_line=False)
        except category:  # it is an error here, in every call
            said.pop(key, None)
            raise


_WAYS_OUT = (
    "fdp.nn.convert_sync_batchnorm(module) takes those of all rows. If each slot is to have its own, write "
    "warnings.simplefilter('ignore', fdp.nn.BatchNormWarning)"
)


def _text(module: nn.Module, count: int) -> str:
    paths = [path for path, part in module.named_modules() if may_take_own(part) and takes_own(part)]
    where = f"{names(paths)} of a " if any(paths) else "a "
    return (
        f"Batch norm in train mode on {count} slots: {where}{type(module).__name__} takes the statistics of each "
        "slot's own rows, so loss and gradients are not those of one device"
    )
