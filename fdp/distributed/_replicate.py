"""A tree that is to be the same in all processes: checked, then that of process 0."""

from typing import Any

import torch
from torch import Tensor

from fdp._trees.listing import differing, listed
from fdp._trees.tree import Flat, unflatten
from fdp._trees.types import Tree
from fdp.distributed._autograd import GradientSum
from fdp.distributed._communicator import Communicator
from fdp.distributed._processes import Processes, has_begun
from fdp.distributed._session import Tag, meet


def same_everywhere(flat: Flat, processes: Processes, check_values: bool) -> Tree:
    """The tree of process 0. Raises in all processes where structures, shapes or dtypes differ."""
    comm = processes.comm
    same = f"call {processes.calls}\ncheck_values={check_values}"
    has_begun()
    meet(comm, Tag("replicate", same, lambda: same))()
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in flat.leaves):
        raise TypeError("replicate: sparse tensors cannot be put on a mesh; pass them dense")
    structure = str(flat.structure).removeprefix("PyTreeSpec")
    every = comm.objects((structure, [_said(flat, i) for i in range(len(flat.leaves))]), "replicate")
    for rank, (other, leaves) in enumerate(every):
        _compare(rank, leaves, every[0][1])
        if other != every[0][0]:
            each = differing([other, every[0][0]], [f"process {rank}", "process 0"])
            raise ValueError(f"replicate: the trees differ: {each}")
    tensors = list({id(leaf): leaf for leaf in flat.leaves if isinstance(leaf, Tensor)}.values())
    shared = [_shared(x, comm) for x in tensors]
    if check_values:
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(flat.leaves)))}
        paths = [flat.path(first[id(x)]) for x in tensors]
        columns = zip(paths, tensors, shared, strict=True)
        other = [path for path, own, first in columns if not _equal(own, first)]
        _raise_for(
            [f"process {rank}: {listed(paths)}" for rank, paths in enumerate(comm.objects(other, "replicate")) if paths]
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        shared = GradientSum.apply(comm, "replicate", shared, True, *tensors)
    found = {id(own): x for own, x in zip(tensors, shared, strict=True)}  # what is tied stays tied
    return unflatten(flat.structure, [found.get(id(leaf), leaf) for leaf in flat.leaves])


def _said(flat: Flat, index: int) -> tuple[str, str]:
    leaf: Any = flat.leaves[index]
    if isinstance(leaf, Tensor):
        return flat.path(index), f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
    return flat.path(index), f"{leaf!r}" if plain else f"a {type(leaf).__name__}"


def _equal(own: Tensor, first: Tensor) -> bool:
    return torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (own, first)))


def _shared(x: Tensor, comm: Communicator) -> Tensor:
    data = x.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    comm.share(data, 0, "replicate")
    return data if x.is_contiguous() else torch.empty_like(x, requires_grad=False).copy_(data)


def _compare(rank: int, leaves: list[tuple[str, str]], first: list[tuple[str, str]]) -> None:
    for (path, kind), (other, expected) in zip(leaves, first, strict=False):
        if path != other:
            raise ValueError(f"replicate: the trees differ: process {rank} has {path} where process 0 has {other}")
        if kind != expected:
            raise ValueError(f"replicate: {path} is {kind} in process {rank}, but {expected} in process 0")
    if len(leaves) != len(first):
        more, fewer = (rank, 0) if len(leaves) > len(first) else (0, rank)
        path = max(leaves, first, key=len)[min(len(leaves), len(first))][0]
        raise ValueError(f"replicate: the trees differ: process {more} has {path}, which process {fewer} has not")


def _raise_for(differences: list[str]) -> None:
    if differences:
        raise ValueError(f"replicate: values differ from those of process 0: {'; '.join(differences)}")
