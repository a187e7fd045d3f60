"""What the graph of a tensor leads back to."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

_GRAD_FN: Any = operator.attrgetter("grad_fn")


def captured(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Sequence[Tensor]:
    """Leaves that outputs depend on by another way than through the inputs."""
    inputs = list(inputs)
    known, found = set(map(id, inputs)), dict[int, Tensor]()
    seen: set[Any] = {None, *map(_GRAD_FN, inputs)}
    todo: list[Any] = []
    for x in outputs:
        todo.append(x.grad_fn)
        if x.is_leaf and x.requires_grad and id(x) not in known:
            found[id(x)] = x
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = node.next_functions
        if parents:
            for parent, _ in parents:
                todo.append(parent)
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in known:
            found[id(leaf)] = leaf
    return list(found.values())
