"""Gradients that are sent while the backward goes on, bucket by bucket, in an order that all processes have agreed on.

A hook of each leaf takes its gradient when it is ready. Who has taken the last of a bucket sends it, and those after it
that were waiting for it. All of this happens in the thread of the backward. What is not sent when it ends, such as a
bucket with a leaf that has no gradient, goes with the note at the end. What was sent of a step that fails then, or
begins anew, is of no use to anybody, since its note does not come.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fdp._placement.moves import is_ours, references
from fdp._trees import torch_private
from fdp.distributed._agreed import Agreed


@contextlib.contextmanager
def hooked(loss: Tensor, leaves: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Have the gradient of each leaf taken when it is ready in the backward of the loss.

    A backward inside of it, of a function that computes anew what it has not kept, comes to the same leaves, with
    parts of their gradients.
    """
    backwards: list[int] = []

    def begin(grad: Tensor) -> None:
        backwards.append(torch_private.current_graph_task_id())

    def ready(leaf: int, grad: Tensor) -> None:
        if backwards[0] == torch_private.current_graph_task_id():
            take(leaf, grad)

    handles = [loss.register_hook(begin)]
    handles += [leaf.register_hook(functools.partial(ready, i)) for i, leaf in enumerate(leaves)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
class Sending:
    """Buckets of a step that are on their way. The gradients are the last of its tensors, beside the sums `before`."""

    def __init__(self, agreed: Agreed, name: str, before: Sequence[Tensor | None]) -> None:
        self._agreed, self._name = agreed, name
        packing = agreed.packing
        self._first = len(packing.kinds) - len(before)
        self._before = before
        self._found: list[Any] = [None] * len(packing.kinds)
        self._ours = [False] * len(packing.kinds)
        self._bucket_of = {i: k for k, bucket in enumerate(packing.buckets) for i in bucket.indices}
        self._missing = [len(bucket.indices) for bucket in packing.buckets]
        self._missing[-1] += 1  # that with the note
        self.flats: list[Tensor] = []
        self.waits: list[Callable[[], None]] = []

    def take(self, leaf: int, grad: Tensor) -> None:
        """A gradient is ready."""
        i = leaf + self._first
        dtype, _, device, *_ = self._agreed.packing.kinds[i]
        if self._found[i] is not None or grad.device != device or grad.layout is not torch.strided:
            return
        before = self._before[leaf]
        if before is None and grad.dtype is dtype:
            self._ours[i] = device.type == "cpu" and is_ours([grad], 0, _alone_in_a_hook())
            self._found[i] = grad
        else:  # half precision is added up in float32
            self._ours[i] = True
            self._found[i] = grad.to(dtype) if before is None else before.to(dtype) + grad.to(dtype)
        self._missing[self._bucket_of[i]] -= 1
        while not self._missing[len(self.flats)]:
            self._send()

    def _send(self) -> None:
        k, packing = len(self.flats), self._agreed.packing
        self.flats.append(packing.packed(k, self._found, self._ours))
        self.waits.append(self._agreed.lane.begin_sum(self.flats[-1], self._name))
        for i in packing.buckets[k].indices:
            self._found[i] = ()  # taken, and not held


@functools.cache
def _alone_in_a_hook() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `references` counts in a hook for a gradient that only autograd has, and for one that is a view."""
    found: list[tuple[int, ...]] = []

    def take(leaf: int, grad: Tensor) -> None:
        found.append(references([grad]))

    for made in (lambda x: x * x, lambda x: x.view(2, 1).cos()):
        with torch.enable_grad():
            leaf = torch.ones(2, device="cpu", requires_grad=True)
            total = made(leaf).sum()
        with hooked(total, [leaf], take):
            torch.autograd.grad(total, leaf)
    return found[0], found[1]
