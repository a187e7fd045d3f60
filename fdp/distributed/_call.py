"""The part of a process in a call on a mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fdp._collectives.graph import captured
from fdp._execution.patches import is_forward_mode
from fdp._placement.partition import Partition
from fdp._placement.peers import Joined, PeerCall, Say, Summed
from fdp._placement.sharded import Sharded, Slots, leaf_tensors
from fdp._placement.slot import Slot
from fdp._trees import torch_private
from fdp._trees.tree import Flat, digest_of, flatten, tensors_in
from fdp._trees.types import Tree
from fdp.distributed._agreement import Agreement
from fdp.distributed._autograd import GradientSum, is_tracked
from fdp.distributed._join import PartialResult
from fdp.distributed._processes import Processes
from fdp.distributed._reduce import everywhere, over_processes
from fdp.distributed._session import Tag


@final
class MeshCall(Agreement, PeerCall):
    """See `PeerCall`. `flats` are the arguments of this process."""

    flats: Sequence[Flat] = ()

    def places(self, own: Sequence[Slot]) -> Sequence[Slot]:
        if not self.is_active:
            return []
        first, row = self.table.before
        return [
            dataclasses.replace(
                slot,
                index=first + slot.index,
                count=self.slots(0),
                rows=None if slot.rows is None else range(row + slot.rows.start, row + slot.rows.stop),
            )
            for slot in own
        ]

    def slots_before(self) -> int:
        return self.table.before[0]

    def has_others(self) -> bool:
        return self.session is not None

    def slots(self, own: int) -> int:
        return sum(self.table.counts)

    def rows(self, own: int) -> int:
        return sum(map(sum, self.table.sizes))

    def sizes(self, own: Sequence[int], pieces: Callable[[int], Sequence[int]]) -> Sequence[int]:
        return [piece for each in self.table.sizes for size in each for piece in pieces(size)]

    def enter(self) -> None:
        self._check_transforms()
        if torch.is_grad_enabled():
            _enter(self.flats, self)

    def join(self, out: Joined, device: torch.device, where: str) -> Callable[[], Tree]:
        part = PartialResult(self, out.shards, out.dims, out.weights, out.whole(), device, where, out.name)
        self._check_captured(out.shards)
        self.ends_with(part.tag())
        return lambda: part.finish(self._inputs())[0]

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
        part = PartialResult(self, shards, dims, rest.weights, rest.whole(), device, where, first=first)
        sums = gradients.sums()
        self.ends_with(part.tag(sums))
        if shards and not is_tracked([part.first(), *sums]):
            del sums  # whether they may be written to depends on who refers to them
            ours = gradients.ours()
            self.add(part.first(), gradients.sums(), ours)

        def finish() -> tuple[Tensor, Tree]:
            ours = gradients.ours()  # before others refer to them
            (value, aux), sums = part.finish(self._inputs(), gradients.sums(), ours)
            gradients.replace_sums(sums)
            return value, aux

        return finish

    def agree(self, name: str, same: object, say: Say, numbers: Sequence[int], *, joint: bool) -> list[list[int]]:
        if self.session is None:
            return [list(numbers)]
        if joint:
            raise RuntimeError(
                f"{name}: a call over several processes, with collectives, cannot be transformed by torch.func from "
                "outside, since what is transformed stays in its process. Transform inside the mapped function"
            )
        return self.session.agree(Tag(name, repr(same), say), numbers)

    def combine(self, operation: Any, columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        if self.session is None:
            return super().combine(operation, columns)
        return over_processes(operation, columns, self)

    def everywhere(self, values: list[Any], name: str, same: object = None, say: Say = str) -> list[Any]:
        if self.session is None:
            return values
        return everywhere(values, self, Tag(name, None if same is None else repr(same), say))

    def _inputs(self) -> list[Tensor]:
        return [tensor for flat in self.flats for leaf in flat.leaves for tensor in leaf_tensors(leaf)]

    def _check_captured(self, outputs: Tree, aliases: Sequence[Tensor] = ()) -> None:
        """A gradient goes through arguments only: of what is captured each process would have a part."""
        if captured(tensors_in(outputs), [*self._inputs(), *aliases]):  # aliases stand for some of them
            raise ValueError(
                "the function uses a tensor that requires grad and is none of its arguments. Each process would have a "
                "part of its gradient only: pass it in an argument, or detach it"
            )

    def _check_transforms(self) -> None:
        layers = torch_private.get_interpreter_stack() or () if torch_private.is_transformed() else ()
        if (is_forward_mode() or any(layer.key().name != "Grad" for layer in layers)) and not self.table.is_whole:
            raise RuntimeError(
                f"{self.where}: a process without rows cannot follow vmap or forward mode (jvp, jacfwd, hessian) "
                "around the call. Give every process rows, or use reverse mode"
            )


def begin(
    processes: Processes, where: str, plan: Partition, flats: Sequence[Flat], same: Mapping[str, Any]
) -> tuple[MeshCall, Partition]:
    """Agree with the other processes on a call, and leave this one without shards if it has no rows."""
    whole = plan.sizes is None and not any(isinstance(leaf, Slots) for flat in flats for leaf in flat.leaves)
    if plan.sizes is not None:
        rows = [size for size in plan.sizes if size]
    else:  # what is not split runs once, on the first slot of all
        rows = [0] * (0 if whole and processes.comm.position else len(plan.slots))
    kinds = [(digest_of(flat), [_kind(*pair) for pair in zip(flat.leaves, flat.specs, strict=True)]) for flat in flats]

    def say() -> str:
        leaves = [(f.path(i), x, d) for f in flats for i, (x, d) in enumerate(zip(f.leaves, f.specs, strict=True))]
        return "\n".join([f"{k}={v!r}" for k, v in same.items()] + [f"{path} {_said(x, d)}" for path, x, d in leaves])

    call = MeshCall(processes, where, (same, kinds), rows, say)
    call.flats = flats
    return call, plan if call.is_active else Partition((), (), None if plan.sizes is None else ())


def _kind(leaf: Any, spec: Any) -> Any:
    """What of a leaf is the same in all processes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.ndim if spec is not None else tuple(leaf.shape)
    if isinstance(leaf, Slots):
        inner = flatten(leaf.shards[0], "", None)
        return digest_of(inner), [_kind(x, spec if isinstance(leaf, Sharded) else None) for x in inner.leaves]
    return None


def _said(leaf: Any, spec: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = list(leaf.shape) if spec is None else f" of {leaf.ndim} dimensions"
        return f"{str(leaf.dtype).removeprefix('torch.')}{shape}"
    return str(leaf.shards[0] if isinstance(leaf, Slots) else type(leaf).__name__)[:200]


def _enter(flats: Sequence[Flat], call: Agreement) -> None:
    """Mark what is whole on every slot, and so the same in all processes: its gradient is the sum over them."""
    places: list[tuple[Flat, int]] = [
        (flat, i)
        for flat in flats
        for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and (spec is None or leaf.ndim == 0)
    ]
    if not places:
        return
    distinct = {id(flat.leaves[i]): flat.leaves[i] for flat, i in places}
    entered = dict(
        zip(
            distinct,
            GradientSum.apply(call.everybody.comm, call.where, None, call.is_active, *distinct.values()),
            strict=True,
        )
    )
    for flat, i in places:
        flat.leaves[i] = entered[id(flat.leaves[i])]
