"""One meeting of the slots of a call: what each brings, and what it takes from it.

What holds at any time:

- Every slot comes with tensors. Slot 0 alone computes, in its thread, when all are there; the others wait meanwhile.
- It computes by ordinary differentiable operations on the tensors of all slots, so the graph is one.
- No memory of a result is that of another slot's, nor of what a slot has brought. So slots may write to what they get.
- Sums are made in slot order, one slot after the other, packed or not: the same bits in each run.
- On accelerators slot 0 computes on its streams. They wait for the stream that each slot has when it comes, and the one
  that it has when it goes on waits for them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fdp._collectives.axes import check_can_meet, inside
from fdp._collectives.combine import Taken, combined
from fdp._collectives.operations import Kinds, Operation
from fdp._execution.run import Follows, Run
from fdp._execution.thread_state import current_stream
from fdp._placement.slot import AXES, Axis
from fdp._placement.transfer_log import report_collective
from fdp._trees.describe import lines_of
from fdp._trees.message_lists import differing
from fdp._trees.profiling import stage
from fdp._trees.tracebacks import text_of

_ADVICE = "All shards must call the same collectives in the same order"
_IN_A_GRADIENT = (
    "This is in a gradient. All shards must take the same gradients in the same order. torch.func.grad inside the "
    "function needs a result that depends on what is differentiated in all shards"
)


class Brought(NamedTuple):
    """What a slot comes with. `tensors` that are not `given` are zeros that only stand for nothing."""

    name: str
    same: Any
    say: Callable[[], str]
    value: Any
    is_recorded: bool = False
    advice: str = _ADVICE
    numbers: tuple[int, ...] = ()
    axes: Sequence[Axis] = ()
    stream: torch.Stream | None = None


@final
class Meeting:
    """Where slots of a run wait for each other; `results` has one entry for each when it is concluded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.brought: dict[int, Brought] = {}
        self.results: list[Any] | None = None
        self.errors: dict[int, Exception] = {}
        self.streams: dict[torch.device, torch.Stream] = {}  # on which the results were computed

    def come(self, index: int, brought: Brought) -> Callable[[], bool]:
        """A slot has come. Returns what says whether it can go on: slot 0 as soon as all are there."""
        self.brought[index] = brought
        if index == 0:
            return lambda: bool(self.errors) or self.results is not None or len(self.brought) == self.run.count
        return lambda: bool(self.errors) or self.results is not None

    def conclude(self, combine: Callable[[list[Brought]], list[Any]]) -> None:
        """Compute what each takes, and let all go on."""
        try:
            brought = [self.brought[i] for i in range(self.run.count)]
            _check(brought, self.run.first)
            for each in brought:
                if each.stream is not None:
                    here = self.streams[each.stream.device] = torch.accelerator.current_stream(each.stream.device)
                    _wait(here, each.stream)
            self.results = combine(brought)
        except BaseException as error:
            self.fail(Follows(text_of(error)))
            raise
        finally:
            self.brought.clear()
            self.run.settled()

    def fail(self, error: Exception) -> None:
        """All others get an error."""
        self.errors = {i: Follows(*error.args) for i in self.brought}

    def explain(self) -> None:
        """Say to each slot for whom it waits."""
        missing = [i for i in range(self.run.count) if i not in self.brought]
        self._texts = {i: self._text(i, missing) for i in self.brought}

    def give_up(self) -> None:
        """They wait no more."""
        self.errors = {i: Follows(text) for i, text in self._texts.items()}

    def named(self, index: int) -> str:
        """The collective that a slot is in, with its axis where there are several."""
        brought = self.brought[index]
        return f"{brought.name} over {self.run.slots[0].axis_name!r}" if len(brought.axes) > 1 else brought.name

    def _text(self, index: int, missing: Sequence[int]) -> str:
        name, run = self.named(index), self.run
        meetings = run.meetings()
        said = []
        for other in missing:
            own = f"shard {run.first + other}, which"
            if other in run.ended:
                said.append(f"{own} {run.ended[other]}")
                continue
            at = dict.fromkeys(x for meeting in meetings for x in meeting.names_inside(run, other))
            waits = " and ".join(x + " elsewhere" * (x == name) for x in at)
            said.append(f"{own} waits in {waits}" if at else f"{own} has not come to it")
        return f"{name} in shard {run.first + index} waits for {', and for '.join(said)}. {self.brought[index].advice}"

    def names_inside(self, run: Run, index: int) -> list[str]:
        """What those wait in here that are inside of a slot of a run."""
        place = run.first + index
        return [
            self.named(i)
            for i, brought in self.brought.items()
            if any(axis.run is run and axis.slot.index == place for axis in brought.axes)
        ]


def meet(axis: Axis, brought: Brought, combine: Callable[[list[Brought]], list[Any]]) -> Any:
    """Wait for all slots of an axis, then take this one's part of what `combine` makes of what they bring."""
    check_can_meet(axis, brought.name)
    run, index = axis.run, axis.slot.index - axis.run.first
    brought = brought._replace(axes=AXES.get(), stream=current_stream(axis.slot.device))
    if run.count == 1:
        run.has_met = True
        return combine([brought])[0]
    here: list[Meeting] = []

    def come(meeting: Meeting) -> Callable[[], bool]:
        here.append(meeting)
        return meeting.come(index, brought)

    try:
        meeting = run.meet((id(run), inside(axis)), index, come, partial(Meeting, run))
    except BaseException:
        for meeting in here:  # who is interrupted takes part no more
            meeting.fail(RuntimeError(f"{brought.name} in shard {axis.slot.index} was interrupted"))
        raise
    if not meeting.errors and meeting.results is None:
        meeting.conclude(combine)
    error = meeting.errors.pop(index, None)
    if error is not None:
        try:
            raise error
        finally:
            del error, meeting, here  # no cycle
    assert meeting.results is not None
    stream = current_stream(axis.slot.device)
    if stream is not None:
        _wait(stream, meeting.streams[stream.device])
    return meeting.results[index]


def _wait(stream: torch.Stream, other: torch.Stream) -> None:
    if stream != other:
        stream.wait_stream(other)


def exchange(
    axis: Axis,
    operation: Operation,
    tensors: Sequence[Tensor],
    same: Any,
    given: Sequence[bool] | None = None,
    numbers: tuple[int, ...] = (),
) -> Taken:
    """What becomes of the tensors of this slot."""
    if axis.slot.index == axis.run.first:
        report_collective(operation.name, tensors)
    kinds = operation.kinds(tensors)
    brought = Brought(
        operation.name,
        (same, kinds),
        partial(_said, operation, tensors, same, kinds),
        (operation, tensors, given),
        torch.is_grad_enabled(),
        _ADVICE if given is None else _IN_A_GRADIENT,
        numbers,
    )

    def combine(everybody: list[Brought]) -> list[Any]:
        with stage(operation.name):
            return combined(
                axis.run,
                [each.value for each in everybody],
                [each.is_recorded for each in everybody],
                (inside(axis), same, numbers, kinds, operation.options()),
                brought.say,
            )

    return meet(axis, brought, combine)


def _said(operation: Operation, tensors: Sequence[Tensor], same: Any, kinds: Kinds) -> str:
    each = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors]
    return f"{said_of(same, each)}\n{operation.options()}\n{same[-1]}"


def said_of(same: Any, tensors: Sequence[str]) -> str:
    """The tree of a collective in lines that can be compared: what is said of its tensors."""
    structure, are_tensors, *_ = same
    texts = iter(tensors)
    lines = lines_of(structure, [next(texts) if each else "a number" for each in are_tensors], "tree")
    return "\n".join([*lines, str(structure).removeprefix("PyTreeSpec")])


def _check(brought: Sequence[Brought], first: int) -> None:
    """All do the same, with what fits together."""
    names = [
        f"the gradient of {'another ' * (each.numbers != brought[0].numbers)}" * (each.advice is _IN_A_GRADIENT)
        + each.name
        for each in brought
    ]
    if len(set(names)) > 1:
        each = ", ".join(f"{name} in shard {first + i}" for i, name in enumerate(names))
        raise RuntimeError(f"the shards call different collectives: {each}. All must call the same in the same order")
    if any(each.same != brought[0].same for each in brought):
        texts = differing([each.say() for each in brought], [f"shard {first + i}" for i in range(len(brought))])
        raise ValueError(f"{brought[0].name}: the shards do not fit together: {texts}")
