"""A tree that is to be the same in all processes: checked, then that of process 0."""

import torch
from torch import Tensor

from fdp._trees.message_lists import listed
from fdp._trees.tree import Flat, unflatten
from fdp._trees.types import Tree
from fdp.distributed._agreement import said_of, unlike
from fdp.distributed._autograd import GradientSum
from fdp.distributed._exchange import meet, same_of, share
from fdp.distributed._reports import Tag
from fdp.distributed._waits_and_failures import Epoch


def same_everywhere(flat: Flat, epoch: Epoch, check_values: bool) -> Tree:
    """The tree of process 0. Raises in all processes where structures, shapes or dtypes differ."""
    tensors = list({id(leaf): leaf for leaf in flat.leaves if isinstance(leaf, Tensor)}.values())
    options = {"call": epoch.calls, "check_values": check_values}
    same = f"{said_of([flat], options, values=True)}\n{str(flat.structure).removeprefix('PyTreeSpec')}"
    meet(epoch, Tag("replicate", same_of(same), lambda: same))
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in flat.leaves):
        raise TypeError("replicate: sparse tensors cannot be put on a mesh; pass them dense")
    if check_values:
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(flat.leaves)))}
        paths = [flat.path(first[id(x)]) for x in tensors]
        every = enumerate(unlike(epoch, Tag("replicate"), paths, tensors))
        if wrong := [f"process {rank}: {listed(paths)}" for rank, paths in every if paths]:
            raise ValueError(f"replicate: values differ from those of process 0: {'; '.join(wrong)}")
    shared = [_shared(x, epoch) for x in tensors]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        shared = GradientSum.apply(epoch, f"replicate, call {epoch.calls}", shared, *tensors)
    found = {id(own): x for own, x in zip(tensors, shared, strict=True)}  # what is tied stays tied
    return unflatten(flat.structure, [found.get(id(leaf), leaf) for leaf in flat.leaves])


def _shared(x: Tensor, epoch: Epoch) -> Tensor:
    data = x.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    share(epoch, data, 0, "replicate")
    return data if x.is_contiguous() else torch.empty_like(x, requires_grad=False).copy_(data)
