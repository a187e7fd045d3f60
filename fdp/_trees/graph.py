"""What the graph of a tensor leads back to."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def captured(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Sequence[Tensor]:
    """Leaves that outputs depend on by another way than through the inputs."""
    inputs, outputs = list(inputs), list(outputs)
    known = {id(x) for x in inputs}
    seen: set[Any] = {None, *(x.grad_fn for x in inputs)}
    todo: list[Any] = [x.grad_fn for x in outputs]
    found = {id(x): x for x in outputs if x.is_leaf and x.requires_grad and id(x) not in known}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        leaf = getattr(node, "variable", None) if not node.next_functions else None
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in known:
            found[id(leaf)] = leaf
    return list(found.values())
