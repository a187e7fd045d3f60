"""What one call of a DataParallel knows of its module and its replicas, whichever of its methods are overridden."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from fdp._placement.partition import Partition
from fdp._trees import torch_private
from fdp.nn._buffers import write_first, write_means
from fdp.nn._containers import Separated
from fdp.nn._copies import copies_of
from fdp.nn._functional_call import keep, pool_of, take
from fdp.nn._replicas import Clone, CopiedModule, InPlace, Lent, Stand
from fdp.nn._replicate import check_replicable, has_scripts
from fdp.nn._stateless import Skeleton

_LOST = (
    "{}: forward wrote to the module's {!r}, in which there are modules, so that each replica has its own. What was "
    "written is lost. Keep it in a container without modules"
)


class Loan:
    """The module's tensors, the plan, and the replicas that were made."""

    def __init__(self, module: nn.Module, owner: nn.Module, buffers: str) -> None:
        self.module, self._owner, self._takes = module, owner, buffers
        self.plan: Partition | None = None
        self._lent: dict[int, Lent] = {}  # by the id of the replica
        self._spare: list[Skeleton] = []
        skeleton = take(pool_of(module), module)
        self._ids = skeleton.original_ids
        self._has_clones = skeleton.trusted and not torch_private.has_any_global_hook()
        if self._has_clones:
            self._spare.append(skeleton)
            own = skeleton.slots.own()
            self.params = {name: own[name] for name in skeleton.slots.params}
            self.buffers = {name: own[name] for name in skeleton.slots.buffers}
        else:
            keep(skeleton, module)
            self.params, self.buffers = dict(module.named_parameters()), dict(module.named_buffers())

    def replicate(self, devices: tuple[torch.device, ...]) -> list[nn.Module]:
        """A replica for each device."""
        check_replicable(self.module, [*self.params.values(), *self.buffers.values()])
        own = [slot == 0 and device == self._source(device) for slot, device in enumerate(devices)]
        columns = copies_of(self._owner, self.params, devices, own)
        if self._takes == "mean":
            self._given = {id(buffer): buffer.detach().clone() for buffer in self.buffers.values()}
            own = [False] * len(devices)
        lent = [
            Lent(self._stand(), params, self.buffers, device, copied=not is_own)
            for params, device, is_own in zip(columns, devices, own, strict=True)
        ]
        self._lent |= {id(each.root): each for each in lent}
        return [each.root for each in lent]

    def may_use_threads(self, replicas: Sequence[nn.Module]) -> bool:
        """Whether all of them are clones."""
        return None not in map(self._skeleton_of, replicas)

    def separate(self, replicas: Sequence[nn.Module]) -> Separated:
        """Give each of these replicas its own containers."""
        return Separated([skeleton for skeleton in map(self._skeleton_of, replicas) if skeleton is not None])

    def write_back(self, replicas: Sequence[nn.Module], where: str) -> None:
        """Give the module's buffers the values that the first replica has, or the mean over all."""
        lent = [self._lent[id(replica)] for replica in replicas if id(replica) in self._lent]
        for path in dict.fromkeys(chain.from_iterable(each.stand.lost() for each in lent)):
            warnings.warn(_LOST.format(where, path), stacklevel=2)
        if self._takes == "mean":
            weights = self._weights(len(replicas))
            if len(lent) < len(replicas) or weights is None:
                raise ValueError(
                    f"{where}: buffers='mean' needs replicas of its own replicate, and inputs with equal rows that its "
                    "own scatter has split. Call those of the superclass, or pass buffers='first'"
                )
            write_means(lent, self._given, weights, self._source(lent[0].device), where)
        elif id(replicas[0]) in self._lent:  # else somebody else's, who shares buffers or does not
            write_first(lent[0], self._source(lent[0].device))

    def end(self) -> None:
        """Let go of everything."""
        while self._spare:
            keep(self._spare.pop(), self.module)
        while self._lent:
            self._lent.popitem()[1].end()

    def _source(self, default: torch.device) -> torch.device:
        """Where the module is."""
        return next((tensor.device for tensor in [*self.params.values(), *self.buffers.values()]), default)

    def _weights(self, replicas: int) -> Sequence[int] | None:
        """Rows of each replica, None if they are not known."""
        sizes = None if self.plan is None else self.plan.sizes
        if sizes is None or len(sizes) != replicas:
            return (1,) if replicas == 1 else None
        return sizes if any(sizes) else (1,) * replicas

    def _skeleton_of(self, replica: nn.Module) -> Skeleton | None:
        lent = self._lent.get(id(replica))
        return lent.stand.skeleton if self._has_clones and lent is not None and isinstance(lent.stand, Clone) else None

    def _stand(self) -> Stand:
        if self._has_clones:
            skeleton = self._spare.pop() if self._spare else take(pool_of(self.module), self.module)
            if skeleton.trusted:
                return Clone(self.module, skeleton)
            self._has_clones = False  # something has changed since the first
        return CopiedModule(self.module) if has_scripts(self.module) else InPlace(self.module, self._ids)


_LOAN: "contextvars.ContextVar[Loan | None]" = contextvars.ContextVar("fdp_loan", default=None)


def current_loan(module: nn.Module) -> Loan | None:
    """That of the call of a module that is under way."""
    loan = _LOAN.get()
    return loan if loan is not None and loan.module is module else None


@contextlib.contextmanager
def lending(module: nn.Module, owner: nn.Module, buffers: str) -> Iterator[Loan]:
    """A loan for a call of `owner`, which ends with it."""
    loan = Loan(module, owner, buffers)
    token = _LOAN.set(loan)
    try:
        yield loan
    finally:
        _LOAN.reset(token)
        loan.end()
