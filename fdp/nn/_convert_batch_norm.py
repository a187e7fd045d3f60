"""Batch norms of a module replaced by those with the statistics of all slots."""

import copy
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fdp._trees import torch_private
from fdp.nn._sync_batch_norm import SyncBatchNorm

M = TypeVar("M", bound=nn.Module)


def convert_sync_batchnorm(module: M, axis_name: str = "data") -> M:
    """Copy a module with a `SyncBatchNorm` in place of each `torch.nn.BatchNorm1d`, `2d` and `3d`.

    On one device the copy computes what the module does.

    >>> import torch
    >>> from fdp.nn import convert_sync_batchnorm
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> convert_sync_batchnorm(network)
    Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
      (1): SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True, axis_name='data')
    )
    >>> type(network[1]).__name__
    'BatchNorm1d'

    Args:
        module: The module, which stays as it is.
        axis_name: As in `SyncBatchNorm`.

    Returns:
        A deep copy, with parameters and buffers of its own: make the optimizer afterwards. Names, modes, hooks,
        `requires_grad`, dtypes, devices and what is shared inside are those of the module.

    Raises:
        TypeError: Not a module, or a batch norm with a forward or parametrizations of its own.
        ValueError: A lazy batch norm that has not seen an input.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm: expected a torch.nn.Module, got {type(module).__name__}")
    found = {name or "module": part for name, part in module.named_modules() if isinstance(part, _CONVERTED)}
    lazy = [name or "module" for name, part in module.named_modules() if _is_lazy(part)]
    if lazy:
        raise ValueError(
            f"convert_sync_batchnorm: {', '.join(lazy)}: lazy, without a shape yet; run a dummy forward first: "
            "module(example)"
        )
    own = [f"{name} ({type(part).__name__})" for name, part in found.items() if not _is_plain(part)]
    if own:
        raise TypeError(
            f"convert_sync_batchnorm: {', '.join(own)}: no SyncBatchNorm does what a batch norm with a forward or "
            "parametrizations of its own does. Derive its class from fdp.nn.SyncBatchNorm"
        )
    copied = copy.deepcopy(module)
    replaced: list[Any] = [part for part in copied.modules() if isinstance(part, _CONVERTED)]
    for part in replaced:
        part.__class__ = SyncBatchNorm  # the object stays: hooks and other modules may hold it
        part.axis_name = axis_name
    return copied


_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _is_plain(part: nn.Module) -> bool:
    return type(part).forward is torch_private.BatchNorm.forward and not parametrize.is_parametrized(part)


def _is_lazy(part: nn.Module) -> bool:
    return isinstance(part, torch_private.BatchNorm) and isinstance(part, LazyModuleMixin)
