"""Collectives over processes, each as one node of autograd in every process.

All nodes of a call are on one chain: each takes a token, which is a tensor without elements, and gives one. The chain
begins at what is differentiated, and a backward begins at the last token too. So every process comes to all nodes, in
one order, whatever it uses of their results.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fdp._collectives.operations import Operation
from fdp._placement.peers import Say
from fdp.distributed._autograd import Grad, check_order, filled_up
from fdp.distributed._exchange import meet, objects, same_of
from fdp.distributed._reduce import over_processes
from fdp.distributed._reports import Tag
from fdp.distributed._table import Table
from fdp.distributed._waits_and_failures import Epoch


@final
class Chain:
    """The last token of a call, None before the first exchange with gradients."""

    def __init__(self) -> None:
        self._token: Grad = None
        self._leaves: Sequence[Tensor] = ()

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        """Go on from what is differentiated."""
        self._leaves, self._token = leaves, None

    def ends(self) -> list[Tensor]:
        """Where a backward has to begin too."""
        return [] if self._token is None else [self._token]

    def combine(self, link: "Link", columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """An exchange: for each leaf, what becomes of it on each slot of this process."""
        tensors = [x for xs in columns for x in xs]
        if not link.is_recorded(tensors):
            return link.columns(link.results([x.detach() for x in tensors]))
        self._token, *found = Together.apply(link, self._last(), *tensors)
        return link.columns(found)

    def tied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors; a backward from any of them comes to all nodes."""
        own = [x for x in tensors if x.requires_grad] if torch.is_grad_enabled() and self._token is not None else []
        found = dict(zip(map(id, own), Tie.apply(self._token, *own) if own else (), strict=True))
        return [found.get(id(x), x) for x in tensors]

    def end(self) -> None:
        """Let go of the graph."""
        self._token, self._leaves = None, ()

    def _last(self) -> Tensor:
        if self._token is not None:
            return self._token
        leaves = [x for x in self._leaves if x.requires_grad]
        with torch.enable_grad():  # others wait for this process in the backward, also where nothing here needs it
            return Start.apply(*(leaves or [torch.zeros(0, device="cpu", requires_grad=True)]))


@dataclasses.dataclass(frozen=True)
class Link:
    """An exchange of a call, with so many slots of this process. Gradients have its key, and another `derivative`."""

    epoch: Epoch
    table: Table
    call: int
    operation: Operation
    slots: int
    key: Hashable
    say: Say
    derivative: int = 0

    def meet(self, *flags: bool) -> list[list[int]]:
        """The flags of all processes."""
        tag = Tag(
            self.operation.name,
            same_of((self.call, self.key, self.derivative)),
            lambda: f"call {self.call}\n{self.say()}\nderivative {self.derivative}",
        )
        return meet(self.epoch, tag, flags)

    def is_recorded(self, tensors: Sequence[Tensor]) -> bool:
        """Whether some process needs a gradient; all are here."""
        grad_mode = torch.is_grad_enabled()
        table = self.meet(grad_mode and any(x.requires_grad for x in tensors), grad_mode)
        if not any(needs for needs, _ in table):
            return False
        if not all(has_mode for _, has_mode in table):
            raise RuntimeError(
                f"{self.operation.name}: a gradient goes through it in one process, and another is in torch.no_grad "
                "there. All processes must be in the same mode"
            )
        return True

    def columns(self, flat: Sequence[Any]) -> list[list[Any]]:
        """What is one list, as one for each leaf."""
        return [list(flat[i : i + self.slots]) for i in range(0, len(flat), self.slots)]

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What becomes of tensors without a graph; no two results share memory."""
        found, seen = [], set[int]()
        for made in over_processes(self.operation, self.columns(tensors), self.epoch, self.table):
            for x in made:
                found.append(x.clone() if id(x) in seen else x)
                seen.add(id(x))
        return found

    def gradients(self, grads: Sequence[Grad], kinds: Sequence[Any]) -> list[Grad]:
        """The same for gradients: None where they are made of nothing that is there in any process."""
        back = dataclasses.replace(self, operation=self.operation.transpose(), derivative=1)
        given = [grad is not None for grad in grads]
        reached = [True] * len(grads)
        if not all(all_given for (all_given,) in back.meet(all(given))):
            own = list(zip(*self.columns(given), strict=True))  # for each slot
            rows = [row for each in objects(self.epoch, own, Tag(back.operation.name)) for row in each]
            first = self.table.before[0]
            columns = [back.operation.reached(column) for column in zip(*rows, strict=True)]
            if not any(map(any, columns)):
                return [None] * len(grads)
            reached = [x for column in columns for x in column[first : first + self.slots]]
        found = back.results([filled_up(*pair) for pair in zip(grads, kinds, strict=True)])
        return [x if is_reached else None for x, is_reached in zip(found, reached, strict=True)]


class Together(torch.autograd.Function):
    """What all slots of all processes exchange."""

    @staticmethod
    def forward(link: Link, token: Tensor, *tensors: Tensor) -> Any:
        return token.detach(), *link.results([x.detach() for x in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.link, *_ = inputs
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in output[1:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        check_order()
        token, *own = grads
        return None, token, *ctx.link.gradients(own, ctx.kinds)


class Start(torch.autograd.Function):
    """The token as a function of what is differentiated."""

    @staticmethod
    def forward(*leaves: Tensor) -> Tensor:
        return torch.zeros(0, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        return (None,) * ctx.count


class Tie(torch.autograd.Function):
    """Tensors as they are, as functions of the token too."""

    @staticmethod
    def forward(token: Tensor, *tensors: Tensor) -> Any:
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        return torch.zeros(0, device="cpu"), *grads
