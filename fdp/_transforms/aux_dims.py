"""How aux of a loss is joined."""

import torch

from fdp._trees.message_lists import listed
from fdp._trees.prefix import named_spec
from fdp._trees.tree import flatten
from fdp._trees.types import AUTO, Auto, Dims, Tree


def dims_of(aux: Tree, aux_dims: Dims | Auto, where: str) -> Dims:
    """What the user has said, else `"mean"`, for aux that has no dims: with dims it may have rows, which have none."""
    if aux_dims is not AUTO:
        return aux_dims
    flat = flatten(aux, "aux", where=where)
    found = [i for i, leaf in enumerate(flat.leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    if found:
        paths = listed(found, lambda i: f"{flat.path(i)} of shape {tuple(flat.leaves[i].shape)}")
        each = named_spec(flat.structure, [0 if i in found else "mean" for i in range(len(flat.leaves))])
        raise ValueError(
            f"{where}: aux has dims, and aux_dims does not say what they are: {paths}. "
            f"For new buffers and averages pass aux_dims='mean', for rows aux_dims={each!r}"
        )
    return "mean"
