"""What each operation on virtual tensors means for streams and for the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from fdp.testing import _virtual_device as virtual
from fdp.testing import _virtual_tensor
from fdp.testing._virtual_tensor import VirtualTensor
from tests.accelerator.double import host_waits, streams

_NO_WORK = ("aten::empty", "aten::record_stream", "aten::set_", "aten::resize_", "aten::is_same_size", "prim::device")


def install() -> None:
    """Look at every operation."""
    theirs: Any = VirtualTensor.__torch_dispatch__

    def dispatch(cls: Any, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::record_stream":
            return None
        if name in ("aten::copy_", "aten::_to_copy"):
            source, target = _ends(name, args, kwargs)
            _copies(name, source, target, args, kwargs)
            out = theirs(func, types, args, kwargs)
            streams.writes(name, _virtual(out))
            return out
        if _virtual_tensor._is_composite(func) or func.is_view or name.startswith(_NO_WORK):
            return theirs(func, types, args, kwargs)
        written = _virtual(_virtual_tensor._written(func, args, kwargs))
        given = [] if _looks_at_no_values(func) else _virtual((args, kwargs))
        ids = {id(x) for x in written}
        streams.reads(name, [x for x in given if id(x) not in ids])
        streams.writes(name, written)
        if name in host_waits.ASKS:
            host_waits.count(host_waits.ASKS[name])
            streams.host_waits(given[0].device)
        out = theirs(func, types, args, kwargs)
        seen = ids | {id(x) for x in given}
        streams.writes(name, [x for x in _virtual(out) if id(x) not in seen and not _shares(x, given)])
        return out

    cast: Any = VirtualTensor
    cast.__torch_dispatch__ = classmethod(dispatch)


def _looks_at_no_values(func: OpOverload) -> bool:
    name = func._schema.name
    return name.startswith("aten::new_") or name.endswith("_like")


def _virtual(tree: Any) -> Sequence[VirtualTensor]:
    return [x for x in tree_iter(tree) if isinstance(x, VirtualTensor)]


def _shares(tensor: VirtualTensor, others: Sequence[VirtualTensor]) -> bool:
    """Whether its memory is that of another, as `aten::_reshape_alias` and the like return it."""
    own = tensor.host.untyped_storage()._cdata
    return any(own == x.host.untyped_storage()._cdata for x in others)


def _ends(name: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.device]:
    if name == "aten::copy_":
        return args[1], args[0].device
    return args[0], virtual.resolve(kwargs.get("device") or args[0].device)


def _copies(name: str, source: torch.Tensor, target: torch.device, args: Any, kwargs: Any) -> None:
    from_device, to_device = isinstance(source, VirtualTensor), target.type == virtual.NAME
    if from_device and to_device:
        if source.device != target:
            streams.both_wait(source.device, target)
        streams.reads(name, _virtual(source))
    elif from_device:
        streams.reads(name, _virtual(source))
        host_waits.count("copy to the host")
        streams.host_waits(source.device)
    elif to_device:
        is_late = kwargs.get("non_blocking") or (name == "aten::copy_" and True in args[2:])
        is_dense = torch.empty_like(source).stride() == source.stride()
        if not (is_late and source.is_pinned() and is_dense):
            host_waits.count("copy from the host")
            streams.host_waits(target)
