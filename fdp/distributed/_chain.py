"""Collectives over processes, each as one node of autograd in every process.

All nodes of a call are on one chain: each takes a token, which is a tensor without elements, and gives one. The chain
begins at what is differentiated, and a backward begins at the last token too. So every process comes to all nodes, in
one order, whatever it uses of their results. `Together` is closed under transposition: what a backward exchanges are
nodes of the same class, further on the same chain, for derivatives of any order.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fdp._collectives.operations import Extreme, Operation
from fdp._placement.peers import Say
from fdp._trees import torch_private
from fdp.distributed._epoch import Epoch, Tag
from fdp.distributed._exchange import meet, objects, same_of
from fdp.distributed._reduce import over_processes
from fdp.distributed._table import Table

Grad = Tensor | None


@final
class Chain:
    """The last token of a call, and how many exchanges with gradients there were."""

    def __init__(self) -> None:
        self.count = 0
        self.has_gone_back = False
        """Whether a backward that will be differentiated has come back to the beginning: in all processes or none."""
        self._token: Grad = None
        self._before: Grad = None  # where a round begins: not at what a round before it, without a graph, has left
        self._begun = 0
        self._is_open = True

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        """Go on from what is differentiated."""
        self._begun, self._token = self.count, self._before
        if torch.is_grad_enabled():
            self._token = Start.apply(self, self._last(), *(x for x in leaves if x.requires_grad))

    def ends(self) -> list[Tensor]:
        """Where a backward has to begin too, if something was exchanged since the beginning."""
        return [self._last()] if self.count > self._begun else []

    def combine(self, step: "Link", columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """An exchange: for each leaf, what becomes of it on each slot of this process."""
        before = self._last()
        token, found = step.run(before, [x for xs in columns for x in xs])
        if token is not before:
            self._token, self.count = token, self.count + 1
        return step.columns(found)

    def enter(self, node: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a node gives for tensors; the token goes through it, as the last of them."""
        *found, self._token = node(*tensors, self._last())
        self._before = self._token
        return found

    def through(self, node: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """`enter`, if there were exchanges with gradients; else the node alone."""
        return self.enter(node, tensors) if self.count and torch.is_grad_enabled() else node(*tensors)

    def tied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors; a backward from any of them comes to all nodes."""
        own = [x for x in tensors if x.requires_grad] if self.count and torch.is_grad_enabled() else []
        found = dict(zip(map(id, own), Tie.apply(self._last(), *own) if own else (), strict=True))
        return [found.get(id(x), x) for x in tensors]

    def goes_back(self, token: Grad) -> None:
        """A backward inside of the call, which will be differentiated, has come to the beginning: go on from there."""
        if self._is_open and token is not None and token.requires_grad:
            self._token, self._before, self.has_gone_back = token, token, True

    def end(self) -> None:
        """Let go of the graph, which holds this object."""
        self._token, self._before, self._is_open = None, None, False

    def _last(self) -> Tensor:
        token = self._token
        if token is None or (torch_private.is_functorch_wrapped_tensor(token) and not torch_private.is_transformed()):
            return _nothing()  # a vjp around the shards is over
        return token


@dataclasses.dataclass(frozen=True)
class Link:
    """An exchange of a call, with so many slots of this process. Its gradients have its key, and another `order`."""

    epoch: Epoch
    table: Table
    call: int
    operation: Operation
    slots: int
    key: Hashable
    say: Say
    order: int = 0

    def run(self, token: Tensor, tensors: Sequence[Tensor], given: Sequence[bool] | None = None) -> tuple[Tensor, Any]:
        """The next token, and the results: None where they are made of nothing that is `given` in any process.

        If no process needs a gradient, the token stays.
        """
        name, grad_mode = self.operation.name, torch.is_grad_enabled()
        same = same_of((self.call, self.key, self.order))
        tag = Tag(name, same, lambda: f"call {self.call}\n{self.say()}\nderivative {self.order}")
        needs = grad_mode and any(x.requires_grad for x in tensors)
        table = meet(self.epoch, tag, [needs, grad_mode, given is None or all(given)])
        reached = [True] * len(tensors)
        if given is not None and not all(all_given for *_, all_given in table):
            is_any, reached = self._reached(given)
            if not is_any:
                return token, [None] * len(tensors)
        if not any(row[0] for row in table):
            found = self.results([x.detach() for x in tensors])
        elif all(row[1] for row in table):
            if not token.requires_grad and not torch_private.is_transformed():
                token = token.detach().requires_grad_()  # others wait for this process in the gradient
            token, *found = Together.apply(self, token, *tensors)
        else:
            raise RuntimeError(
                f"{name}: a gradient goes through it in one process, and another is in torch.no_grad there. All "
                "processes must be in the same mode"
            )
        return token, [x if is_reached else None for x, is_reached in zip(found, reached, strict=True)]

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

    def transpose(self) -> "Link":
        return dataclasses.replace(self, operation=self.operation.transpose(), order=self.order + 1)

    def _reached(self, given: Sequence[bool]) -> tuple[bool, list[bool]]:
        """Whether any result, of all processes, is made of what is given, and which of this process are."""
        own = list(zip(*self.columns(given), strict=True))  # for each slot
        rows = [row for each in objects(self.epoch, own, self.operation.name) for row in each]
        columns = [self.operation.reached(column) for column in zip(*rows, strict=True)]
        first = self.table.before[0]
        return any(map(any, columns)), [x for column in columns for x in column[first : first + self.slots]]


class Together(torch.autograd.Function):
    """What all slots of all processes exchange."""

    @staticmethod
    def forward(step: Link, token: Tensor, *tensors: Tensor) -> Any:
        return token.detach(), *step.results([x.detach() for x in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.step, *_ = inputs
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in output[1:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        token, *own = grads
        step, given = ctx.step, [grad is not None for grad in own]
        if isinstance(step.operation, Extreme) and not any(given):
            return None, token, *own  # it has no gradient in other processes either, or they say that it cannot
        full = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(own, ctx.kinds, strict=True)
        ]
        token, found = step.transpose().run(_nothing() if token is None else token, full, given)
        return None, token, *found


class Start(torch.autograd.Function):
    """The token as a function of what is differentiated."""

    @staticmethod
    def forward(chain: Chain, token: Tensor, *leaves: Tensor) -> Tensor:
        return token.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.chain, _, *leaves = inputs
        ctx.count = len(leaves)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        ctx.chain.goes_back(grads[0])
        return None, *grads, *[None] * ctx.count


class Tie(torch.autograd.Function):
    """Tensors as they are, as functions of the token too."""

    @staticmethod
    def forward(token: Tensor, *tensors: Tensor) -> Any:
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Grad) -> Any:
        (token,) = ctx.saved_tensors  # its own gradient: so the chain of a gradient of this gradient goes on from it
        return token if torch.is_grad_enabled() else token.detach(), *grads


def _nothing() -> Tensor:
    return torch.zeros(0, device="cpu")
