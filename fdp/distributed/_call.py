"""The part of a process in a call on a mesh."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from fdp._placement.moves import layers
from fdp._placement.partition import Partition
from fdp._placement.peers import Joined, PeerCall, Say, Summed
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots, leaf_tensors
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.tree import Flat, map_tensors, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._agreement import Agreement
from fdp.distributed._autograd import GradientSum
from fdp.distributed._chain import Chain, Link
from fdp.distributed._described import compared, said_of
from fdp.distributed._join import PartialResult
from fdp.distributed._processes import Processes
from fdp.distributed._reduce import everywhere
from fdp.distributed._session import Tag


@final
class MeshCall(Agreement, PeerCall):
    """See `PeerCall`. `flats` are the arguments of this process."""

    flats: Sequence[Flat] = ()

    def __init__(
        self, processes: Processes, where: str, same: Any, rows: Sequence[int], say: Callable[[], str] = str
    ) -> None:
        super().__init__(processes, where, same, rows, say)
        self.chain = Chain()
        self._is_transformed = torch_private.is_transformed() or torch_private.is_forward_mode()

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        return self.table.places(own) if self.is_active else []

    def slots_before(self) -> int:
        return self.table.before[0]

    def has_others(self) -> bool:
        return self.session is not None

    def slots(self, own: int) -> int:
        return sum(self.table.counts)

    def rows(self, own: int) -> int:
        return sum(map(sum, self.table.sizes))

    def enter(self) -> None:
        self._check_transforms()
        if torch.is_grad_enabled():
            _enter(self.flats, self, None if self._is_transformed else self.chain)

    def begins_with(self, leaves: Sequence[Tensor]) -> None:
        if self.session is not None and not self._is_transformed:
            self.chain.begins_with(leaves)

    def ends(self) -> list[Tensor]:
        return self.chain.ends()

    def tie(self, tree: Tree) -> Tree:
        tensors = tensors_in(tree)
        each = iter(self.chain.tied(tensors))
        self.chain.end()
        self.flats = ()  # the graph holds this object
        return map_tensors(lambda _: next(each), tree)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.chain.end()
        super().__exit__(kind, error, traceback)

    def join(self, out: Joined, device: torch.device, where: str) -> Callable[[], Tree]:
        part = PartialResult(out.shards, out.dims, out.weights, out.whole(), device, where, out.name)
        self._check_captured(out.shards)
        self.ends_with(part.tag())

        def finish() -> Tree:
            with self.everybody.comm.to_the_end():
                tree = part.finish(self, self.chain, self._inputs())[0]
            return self.tie(tree)

        return finish

    def reduce(
        self,
        loss: Joined,
        aux: Joined | None,
        gradients: Summed,
        aliases: Sequence[Tensor],
        device: torch.device,
        where: str,
    ) -> Callable[[], tuple[Tensor, Tree]]:
        rest = loss if aux is None else aux
        others = [None] * len(loss.shards) if aux is None else aux.shards
        shards = list(zip(loss.shards, others, strict=True))
        self._check_captured([shards, gradients.sums()], aliases)
        dims = (loss.dims, "mean" if aux is None else aux.dims)
        first = loss.weights, loss.whole()
        part = PartialResult(shards, dims, rest.weights, rest.whole(), device, where, first=first)
        self.ends_with(part.tag(gradients.sums(), may_differ=self.chain.has_gone_back))

        def finish() -> tuple[Tensor, Tree]:
            ours = gradients.ours()  # before others refer to them
            with self.everybody.comm.to_the_end():
                rest = self._inputs(), gradients.sums(), ours, gradients.sent_as
                found, sums = part.finish(self, self.chain, *rest)
            (value, aux), sums = self.tie((found, sums))
            gradients.replace_sums(sums)
            return value, aux

        return finish

    def combine(
        self, operation: Any, columns: Sequence[Sequence[Tensor]], key: Hashable, say: Say
    ) -> list[list[Tensor]]:
        if self.session is None:
            return super().combine(operation, columns, key, say)
        if self._is_transformed:
            raise RuntimeError(_TRANSFORMED.format(operation.name))
        return self.chain.combine(Link(self, operation, len(columns[0]), key, say), columns)

    def everywhere(self, values: list[Any], name: str, same: object = None, say: Say = str) -> list[Any]:
        if self.session is None:
            return values
        return everywhere(values, self, Tag(name) if same is None else self.numbered(name, same, say))

    def _inputs(self) -> list[Tensor]:
        return [tensor for flat in self.flats for leaf in flat.leaves for tensor in leaf_tensors(leaf)]

    def _check_captured(self, outputs: Tree, aliases: Sequence[Tensor] = ()) -> None:
        """A gradient goes through arguments only: of what is captured each process would have a part."""
        inputs = [*self._inputs(), *aliases]  # aliases stand for some of them
        found = captured(_layers_of(tensors_in(outputs)), _layers_of(inputs))
        if any(x.numel() for x in found):  # a token has no elements
            raise ValueError(
                "the function uses a tensor that requires grad and is none of its arguments. Each process would have a "
                "part of its gradient only: pass it in an argument, or detach it"
            )

    def _check_transforms(self) -> None:
        layers = torch_private.get_interpreter_stack() or () if torch_private.is_transformed() else ()
        is_forward = torch_private.is_forward_mode()
        if (is_forward or any(layer.key().name != "Grad" for layer in layers)) and not self.table.is_whole:
            raise RuntimeError(
                f"{self.where}: a process without rows cannot follow vmap or forward mode (jvp, jacfwd, hessian) "
                "around the call. Give every process rows, or use reverse mode"
            )


_TRANSFORMED = (
    "{}: a call over several processes, with collectives, cannot be transformed by torch.func from outside, since what "
    "is transformed stays in its process. Transform inside the mapped function"
)


def begin(
    processes: Processes, where: str, plan: Plan, flats: Sequence[Flat], same: Mapping[str, Any]
) -> tuple[PeerCall, Partition]:
    """Agree with the other processes on a call, and leave this one without shards if it has no rows."""
    partition, rows = plan.partition, _rows(processes, plan.partition, flats)
    call = MeshCall(processes, where, compared(flats, same), rows, partial(said_of, flats, same))
    call.flats = flats
    return call, partition if call.is_active else Partition((), (), None if partition.sizes is None else ())


def _rows(processes: Processes, partition: Partition, flats: Sequence[Flat]) -> list[int]:
    """The rows of each shard of this process."""
    if partition.sizes is not None:
        return [size for size in partition.sizes if size]
    whole = not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves)
    # What is not split runs once, on the first slot of all.
    return [0] * (0 if whole and processes.comm.position else len(partition.slots))


def _layers_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(map(layers, tensors)))


def _enter(flats: Sequence[Flat], call: Agreement, chain: Chain | None) -> None:
    """Mark what is whole on every slot, and so the same in all processes: its gradient is the sum over them."""
    places: list[tuple[Flat, int]] = [
        (flat, i)
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if isinstance(leaf, torch.Tensor)
        and (spec is None or leaf.ndim == 0)
        and any(layer.requires_grad for layer in layers(leaf))
    ]
    if not places:
        return
    distinct = {id(flat.leaves[i]): flat.leaves[i] for flat, i in places}
    name = f"{call.where}, call {call.number}"  # backwards of several calls may come in any order
    node = partial(GradientSum.apply, call.everybody.comm, name, None, call.is_active)
    leaves = list(distinct.values())
    entered = dict(zip(distinct, node(*leaves) if chain is None else chain.enter(node, leaves), strict=True))
    for flat, i in places:
        flat.leaves[i] = entered[id(flat.leaves[i])]
