"""What torch.nn.DataParallel needs of a build for GPUs, made of copies: it then runs on the virtual accelerator."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)


@contextlib.contextmanager
def torch_copies() -> Iterator[None]:
    """Inside, torch's own scatter, gather, replicate and parallel_apply work on the virtual accelerator.

    The functions are what torch/csrc/cuda/comm.cpp does, without its checks. It is silent about torch's warnings of the
    number -1, which its backward raises too.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using -1 to represent CPU tensor", FutureWarning)
        for name, function in (
            ("_scatter", _scatter),
            ("_gather", _gather),
            ("_broadcast_coalesced", _broadcast_coalesced),
        ):
            patch.setattr(torch._C, name, function, raising=False)
        patch.setattr("torch.cuda.nccl.is_available", lambda _: False)
        # torch would copy on streams of its own.
        patch.setattr("torch.nn.parallel._functions._get_stream", torch.accelerator.current_stream)
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        yield


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index == -1 else torch.device("virtual", index)


def _scatter(tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, _: Any) -> list[Tensor]:
    chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split_with_sizes(list(sizes), dim)
    return [chunk.to(_device(device)) for chunk, device in zip(chunks, devices, strict=False)]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
    return torch.cat([tensor.to(_device(destination)) for tensor in tensors], dim)


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], size: int) -> list[list[Tensor]]:
    """The tensors themselves on the first device, on others parts of large ones, each with a version of its own."""
    if any(tensor.device != _device(devices[0]) for tensor in tensors):
        raise RuntimeError("all tensors must be on devices[0]")
    copies: list[list[Tensor]] = [[] for _ in devices[1:]]
    for chunk in _take_tensors(tensors, size):
        flat = _flatten_dense_tensors(chunk)
        for device, made in zip(devices[1:], copies, strict=True):
            made += [part.data for part in _unflatten_dense_tensors(flat.to(_device(device), copy=True), chunk)]
    return [list(tensors), *(list(_reorder_tensors_as(made, tensors)) for made in copies)]
