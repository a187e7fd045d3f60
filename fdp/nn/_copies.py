"""Copies of tensors for other devices; those of parameters are used again while the parameters stay as they are."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fdp._placement.moves import copy, is_expanded
from fdp._trees import torch_private

Tensors = dict[str, Tensor]

_GROUP = 2**26  # bytes that are summed up at once
_ODD = -0x61C8864680B583EB  # 2**64 over the golden ratio: spreads positions over all bits
_privateuse1_name = torch_private.get_privateuse1_backend_name  # a backend in Python has a tensor class of its own


class Names(NamedTuple):
    """What the log of `transfers` calls the tensors of a module."""

    names: Sequence[str]

    def path(self, index: int, /) -> str:
        """The name of a tensor."""
        return f"module.{self.names[index]}"


class _Kept(NamedTuple):
    """A copy, of which tensor it is, and the versions of both."""

    source: weakref.ref[Tensor]
    copied: Tensor
    versions: tuple[int, int]

    def may_be_of(self, param: Tensor) -> bool:
        versions = torch_private.version(param), torch_private.version(self.copied)
        return self.source() is param and self.versions == versions


_Cache = dict[tuple[int, torch.device], dict[str, _Kept]]
_CACHES: "weakref.WeakKeyDictionary[nn.Module, _Cache]" = weakref.WeakKeyDictionary()


def copies_of(tensors: Tensors, device: torch.device, *, always: bool = True) -> Tensors:
    """The tensors on a device; nobody can write to one that is expanded, so it serves there as it is."""
    names = Names(list(tensors))
    return {
        name: copy(tensor, device, names, i, always=always and not is_expanded(tensor))
        for i, (name, tensor) in enumerate(tensors.items())
    }


def kept_copies(
    owner: nn.Module, params: Tensors, devices: Sequence[torch.device], own: Sequence[bool]
) -> list[Tensors]:
    """The parameters on each slot: themselves where the slot is the module's `own`, else copies.

    A copy that has no part in a gradient serves until its parameter changes, and lives as long as its `owner`.
    """
    cache = _CACHES.pop(owner, {})  # another thread may be here too, and makes copies of its own then
    names, keepable = Names(list(params)), _keepable(params)
    others = {name: param for name, param in params.items() if name not in keepable}
    columns: list[Tensors] = []
    for slot, (device, is_own) in enumerate(zip(devices, own, strict=True)):
        if is_own:
            columns.append(params)
            continue
        kept = _current(cache.pop((slot, device), {}), keepable)
        for i, name in enumerate(params):
            if name in keepable and name not in kept:
                kept[name] = _keep(params[name], device, names, i)
        made = copies_of(others, device) | {name: each.copied for name, each in kept.items()}
        columns.append({name: made[name] for name in params})
        if kept:
            _CACHES.setdefault(owner, {})[slot, device] = kept
    return columns


def _keep(param: Tensor, device: torch.device, names: Names, index: int) -> _Kept:
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode is of no use outside of it
        made = copy(param.detach(), device, names, index, always=True)
    return _Kept(weakref.ref(param), made, (torch_private.version(param), torch_private.version(made)))


def _keepable(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those of which a copy has no part in a gradient."""
    if torch_private.is_transformed() or torch_private.is_forward_mode() or torch_private.len_torch_dispatch_stack():
        return {}
    enabled = torch.is_grad_enabled()
    return {
        name: param
        for name, param in params.items()
        if not (param.requires_grad and enabled)
        and (type(param) in (Tensor, nn.Parameter) or param.device.type == _privateuse1_name())
        and param.layout is torch.strided
        and not (param.is_inference() or param.is_meta)
    }


def _current(kept: Mapping[str, _Kept], params: Mapping[str, Tensor]) -> dict[str, _Kept]:
    """The copies that are still equal to their parameters. Versions do not tell of writes through `.data` or numpy."""
    same = {name: old for name, old in kept.items() if name in params and old.may_be_of(params[name])}
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: same[name]
            for names in _groups(same)
            if _are_equal([params[name].detach() for name in names], [same[name].copied for name in names])
            for name in names
        }


def _groups(kept: Mapping[str, _Kept]) -> Iterator[list[str]]:
    """Names of tensors that are compared together: one question to a device takes longer than its answer."""
    group, size = [], 0
    for name, old in kept.items():
        if group and size + old.copied.nbytes > _GROUP:
            yield group
            group, size = [], 0
        group.append(name)
        size += old.copied.nbytes
    if group:
        yield group


def _are_equal(params: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
    if params[0].device == copies[0].device:
        return all(map(_is_equal, params, copies))
    return _checksum(params) == _checksum(copies)  # on both devices, which compute side by side


def _is_equal(param: Tensor, copied: Tensor) -> bool:
    return param.shape == copied.shape and param.dtype == copied.dtype and torch.equal(param, copied)


def _checksum(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Of all bits: a sum of 32-bit words, each times a number that its position gives (multilinear hashing)."""
    raw = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    words = nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
    factors = torch.arange(words.numel(), device=words.device).mul_(_ODD)
    for shift in (29, 32):
        factors.bitwise_xor_(factors >> shift).mul_(_ODD)
    return (factors.mul_(words).sum().item(), *((tensor.shape, tensor.dtype) for tensor in tensors))
