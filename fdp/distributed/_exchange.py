"""What processes exchange in an epoch, each as one operation after the other: numbers, objects, sums, tensors."""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fdp._placement.moves import accumulator, bytes_of
from fdp._trees.tracebacks import text_of
from fdp.distributed._reports import Elsewhere, Tag
from fdp.distributed._waits_and_failures import Epoch

MOST = 24  # numbers: all headers have one size, since processes may meet with different ones by mistake


def meet(epoch: Epoch, tag: Tag, numbers: Sequence[int] = ()) -> list[list[int]]:
    """The numbers of every process, at most `MOST`. All are at the same place and have the `same`, or all raise.

    Who does not know what that is has 0.
    """
    assert len(numbers) <= MOST
    own = [zlib.crc32(tag.name.encode()), tag.same, *numbers]
    own += [0] * (2 + MOST - len(own))
    rows = [row.tolist() for row in _gathered(epoch, tag, torch.tensor(own, dtype=torch.int64))]
    if any(row[0] != own[0] for row in rows) or len({row[1] for row in rows} - {0}) > 1:
        epoch.disagree(tag)
    return [row[2 : 2 + len(numbers)] for row in rows]


def same_of(value: object) -> int:
    """A number that equal values have in all processes."""
    return zlib.crc32(repr(value).encode())


def objects(epoch: Epoch, value: Any, tag: Tag) -> list[Any]:
    """The value of every process, pickled on the way; `dist.all_gather_object` would need numpy."""
    try:
        own = b"\1" + pickle.dumps(value)
    except Exception as error:  # the others are told, or they would wait
        own = b"\0" + f"{type(error).__name__}: {text_of(error)}".encode(errors="backslashreplace")
    sizes = [size for (size,) in meet(epoch, tag, [len(own)])]
    sent = torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8)
    found = [bytes_of(x)[:size] for x, size in zip(_gathered(epoch, tag, sent), sizes, strict=True)]
    for rank, data in enumerate(found):
        if not data[0]:
            problem = data[1:].decode()
            raise Elsewhere(f"{tag.name}: what process {rank} has to say to the others cannot be pickled: {problem}")
    return [pickle.loads(data[1:]) for data in found]


def _gathered(epoch: Epoch, tag: Tag, tensor: Tensor) -> list[Tensor]:
    """Tensors of one shape and dtype."""
    found = [torch.empty_like(tensor) for _ in range(epoch.size)]
    epoch.send(tag, tensor, lambda group: group.allgather([found], [tensor]))()
    return found


def all_of(epoch: Epoch, tensor: Tensor, name: str) -> list[Tensor]:
    """The tensor of every process; their shapes may differ, but not how many dimensions they have."""
    shapes = [torch.Size(shape) for shape in meet(epoch, Tag(f"{name}, shapes"), tensor.shape)]
    room = max(shape.numel() for shape in shapes) * tensor.element_size()
    sent = torch.zeros(room, dtype=torch.uint8, device=tensor.device)
    own = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    sent[: own.numel()] = own
    arrived = _gathered(epoch, Tag(name), sent)
    return [
        x[: shape.numel() * tensor.element_size()].view(tensor.dtype).reshape(shape)
        for x, shape in zip(arrived, shapes, strict=True)
    ]


def share(epoch: Epoch, tensor: Tensor, source: int, name: str) -> None:
    """Overwrite the tensor, which is contiguous, by that of one of the processes."""
    data, options = tensor.view(-1).view(torch.uint8), dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    if data.numel():
        epoch.send(Tag(name), data, lambda group: group.broadcast([data], options))()


def sums(epoch: Epoch, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """The sum over all processes of each, in memory of its own: one message for all of a kind."""
    kinds = dict.fromkeys((wire_dtype(x.dtype), x.device) for x in tensors)
    found: list[Any] = [None] * len(tensors)
    for dtype, device in kinds:
        at = [i for i, x in enumerate(tensors) if (wire_dtype(x.dtype), x.device) == (dtype, device)]
        flat = torch.cat([numbers_of(tensors[i], dtype) for i in at])
        if flat.numel():
            epoch.send(Tag(name), flat, lambda group, flat=flat: group.allreduce([flat]))()
        parts = flat.split_with_sizes([size_of(tensors[i]) for i in at])
        for i, part in zip(at, parts, strict=True):
            found[i] = as_it_was(part.clone() if len(at) > 1 else part, tensors[i])
    return found


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what numbers are added up: half precision has no room for sums, and not every backend knows every integer."""
    if dtype.is_complex:
        return dtype.to_real()
    return accumulator(dtype) if dtype.is_floating_point else torch.int64


def size_of(x: Tensor) -> int:
    """How many real numbers are sent of a tensor."""
    return x.shape.numel() * (2 if x.is_complex() else 1)


def numbers_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor as they are sent: dense, real, and wide enough for sums."""
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj().resolve_neg())
    return (x if x.dtype is dtype else x.to(dtype)).reshape(-1)


def as_it_was(numbers: Tensor, like: Tensor) -> Tensor:
    """Inverse of `numbers_of`."""
    if like.is_complex():
        numbers = numbers if numbers.storage_offset() % 2 == 0 else numbers.clone()
        x = torch.view_as_complex(numbers.view(*like.shape, 2))
    else:
        x = numbers.view(like.shape).to(like.dtype)
    return x.to_sparse(like.sparse_dim()) if like.layout is torch.sparse_coo else x
