"""The replicas of one call of a DataParallel, and what it knows of them, whichever of its methods are overridden."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from fdp._placement.partition import Partition
from fdp._trees import torch_private
from fdp.nn._bound_clone import Skeleton
from fdp.nn._buffers import Buffer, write_first
from fdp.nn._copies import Tensors, copies_of
from fdp.nn._functional_call import call_in_place, clear, forget, in_place, is_held, keep, pool_of, take
from fdp.nn._replicate import OF_REPLICAS, check_replicable, named_tensors


@final
class InPlace(nn.Module):
    """The module itself, with its tensors exchanged during each call: where a clone might lead back to it."""

    def __init__(self, module: nn.Module, tensors: Tensors, ids: frozenset[int]) -> None:
        super().__init__()
        vars(self).update(_original=module, _ids=ids, _tensors=tensors)  # not a child

    def buffers_now(self) -> Iterator[Buffer]:
        original, tensors = vars(self)["_original"], vars(self)["_tensors"]
        names = {id(buffer): name for name, buffer in original.named_buffers()}
        for part in original.modules():
            for key, buffer in part._buffers.items():
                value = tensors.get(names.get(id(buffer)))
                if isinstance(value, Tensor):  # where forward has deleted a buffer, torch leaves a mark of its own
                    yield part, key, value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # without hooks of its own
        module: nn.Module = vars(self)["_original"]
        with in_place():
            try:
                return call_in_place(module, vars(self)["_tensors"], args, kwargs)
            finally:
                forget(vars(self)["_ids"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)


@final
class Replica:
    """A module that computes with other tensors than the one it stands for: those of its own, or copies.

    It is a clone, which serves later calls too; else the module in place.
    """

    def __init__(
        self, module: nn.Module, params: Tensors, buffers: Tensors, copies: Tensors, made: Skeleton | frozenset[int]
    ) -> None:
        self._module, self._copies = module, copies  # alive as long as their ids are of use
        self.copy_of = {id(copies[name]): own for name, own in buffers.items() if copies[name] is not own}
        self.skeleton = made if isinstance(made, Skeleton) else None
        self.root: Any
        if isinstance(made, Skeleton):
            made.slots.bind({**params, **copies})
            made.mark(OF_REPLICAS)
            self.root = made.root
        else:
            self.root = InPlace(module, {**params, **copies}, made)

    def buffers_now(self) -> Iterator[Buffer]:
        """All buffers as they are now."""
        if self.skeleton is None:
            yield from self.root.buffers_now()
            return
        for part, replica in self.skeleton.pairs(self._module):
            for key, value in replica._buffers.items():
                yield part, key, value

    def write_back(self) -> None:
        """Give the module what forward has put into lists, dicts and sets."""
        if self.skeleton is not None:
            self.skeleton.write_back(self._module)

    def in_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replica with what is in the module's lists, dicts and sets by now."""
        if self.skeleton is None:
            return self.root(*args, **kwargs)
        self.skeleton.catch_up(self._module)
        try:
            return self.root(*args, **kwargs)
        finally:
            self.skeleton.write_back(self._module)

    def end(self) -> None:
        """Let go of the tensors. If nobody else holds the clone, it serves the next call.

        What the module keeps of it computes with the module's own from then on.
        """
        skeleton = self.skeleton
        del self.root, self.skeleton, self._copies
        if skeleton is None:
            return
        if not is_held(skeleton):
            keep(clear(skeleton), self._module, of_replicas=True)
        elif skeleton.is_kept:
            skeleton.slots.bind({})


class Loan:
    """The module's tensors, the plan, and the replicas that were made."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plan: Partition | None = None
        self._replicas: dict[int, Replica] = {}  # by the id of what is called
        first = take(pool_of(module, of_replicas=True), module)
        self._spare = [first]
        self._ids = first.original_ids
        self._has_buffers = first.has_buffers or not first.trusted
        self._has_clones = first.trusted and not torch_private.has_any_global_hook()
        own = first.slots.own() if first.trusted else named_tensors(module)
        self.params = {name: own[name] for name in first.slots.params}
        self.buffers = {name: own[name] for name in first.slots.buffers}

    def replicate(self, devices: tuple[torch.device, ...]) -> list[nn.Module]:
        """A replica for each device."""
        tensors = [*self.params.values(), *self.buffers.values()]
        check_replicable(self.module, tensors, "DataParallel", may_have_scripts=not self._has_clones)
        self._device = next((tensor.device for tensor in tensors), devices[0])
        made: list[nn.Module] = []
        own = [slot == 0 and device == self._device for slot, device in enumerate(devices)]
        for device, is_own in zip(devices, own, strict=True):
            params = self.params if is_own else copies_of(self.params, device)
            buffers = copies_of(self.buffers, device, always=not is_own)
            replica = Replica(self.module, params, self.buffers, buffers, self._take())
            self._replicas[id(replica.root)] = replica
            made.append(replica.root)
        return made

    def _take(self) -> Skeleton | frozenset[int]:
        if self._has_clones:
            spare, pool = self._spare, pool_of(self.module, of_replicas=True)
            skeleton = spare.pop() if spare else take(pool, self.module)
            if skeleton.trusted:
                return skeleton
            self._has_clones = False  # something has changed since the first
        return self._ids

    def in_turn(self, replicas: Sequence[nn.Module]) -> list[Callable[..., Any]]:
        """How to call them one after the other: each finds in containers what those before it have put there."""
        return [self._replicas[id(each)].in_turn if id(each) in self._replicas else each for each in replicas]

    def have_filled(self, replicas: Sequence[nn.Module]) -> bool:
        """Whether a forward has changed lists, dicts or sets."""
        lent = [self._replicas[id(each)].skeleton for each in replicas if id(each) in self._replicas]
        return any(skeleton is not None and skeleton.contents.are_filled() for skeleton in lent)

    def write_back(self, replicas: Sequence[nn.Module]) -> None:
        """Give the module's buffers the values that the first replica has."""
        first = self._replicas.get(id(replicas[0]))  # else somebody else's, who shares them or not
        if self._has_buffers and first is not None:
            write_first(first, self._device)

    def end(self) -> None:
        """Let go of everything."""
        while self._spare:
            keep(self._spare.pop(), self.module, of_replicas=True)
        while self._replicas:
            self._replicas.popitem()[1].end()


_LOAN: "contextvars.ContextVar[Loan | None]" = contextvars.ContextVar("fdp_loan", default=None)


def current_loan(module: nn.Module) -> Loan | None:
    """That of the call of a module that is under way."""
    loan = _LOAN.get()
    return loan if loan is not None and loan.module is module else None


@contextlib.contextmanager
def lending(module: nn.Module) -> Iterator[Loan]:
    """A loan for a call, which ends with it."""
    loan = Loan(module)
    token = _LOAN.set(loan)
    try:
        yield loan
    finally:
        _LOAN.reset(token)
        loan.end()
