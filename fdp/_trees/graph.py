"""What the graph of a tensor leads back to."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

_GRAD_FN: Any = operator.attrgetter("grad_fn")
_VARIABLE: Any = operator.attrgetter("variable")
_FIRST: Any = operator.itemgetter(0)


def captured(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leaves that outputs depend on by another way than through the inputs."""
    outputs, known = list(outputs), set(map(id, inputs))
    seen: set[Any] = {None, *map(_GRAD_FN, inputs)}
    todo, ends = list(map(_GRAD_FN, outputs)), list[Any]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            parents = node.next_functions
            if parents:
                todo += map(_FIRST, parents)
            else:
                ends.append(node)
    try:
        leaves = list(map(_VARIABLE, ends))
    except AttributeError:  # one ends where a Function has no inputs that require grad
        leaves = [leaf for node in ends if isinstance(leaf := getattr(node, "variable", None), Tensor)]
    leaves += [x for x in outputs if x.grad_fn is None]
    if known.issuperset(map(id, leaves)):
        return []
    return list({id(leaf): leaf for leaf in leaves if leaf.requires_grad and id(leaf) not in known}.values())
