"""How the shards of a call run: what the caller asks for, and what is possible here."""

from collections.abc import Sequence
from typing import NamedTuple

from fdp._execution.function_traits import is_marked, must_run_in_order
from fdp._execution.patches import is_forward_mode
from fdp._execution.seeds import Seed
from fdp._execution.thread_state import is_carried
from fdp._placement.peers import ALONE_IN_CALL, PeerCall
from fdp._placement.slot import IN_ORDER, Slot
from fdp._placement.timings import Timings
from fdp._trees import torch_private
from fdp._trees.types import Executor, Function
from fdp._trees.untraced import leave_alone


class Mode(NamedTuple):
    """How the shards of a call run; `fn` is the user's function."""

    executor: Executor
    seed: Seed | None
    fn: Function | None
    effects: bool = False  # a shard must not begin anew for its first collective
    stays: bool = False  # nor where it does not fit beside others: it goes on alone
    apart: bool = False  # the call raises `Again`; if it `stays`, only where shards have run
    peers: PeerCall = ALONE_IN_CALL
    timings: Timings | None = None  # of calls with this plan; none where effects show which way they took


def check_executor(executor: Executor, where: str) -> None:
    """It is one of those that there are."""
    if executor not in ("auto", "sequential", "threads"):
        raise ValueError(f"{where}: there is no executor {executor!r}; expected 'auto', 'sequential' or 'threads'")


def executor_of(mode: Mode, slots: Sequence[Slot]) -> str:
    """How shards run, and why."""
    reason, timings = why_in_order(mode, len(slots)), timings_of(mode, slots)
    if reason is None and timings is not None:
        if timings.is_trying():
            return "side by side in threads and one shard after the other in turns, to see which is faster"
        reason = timings.why_in_order()
    if reason is not None:
        return f"one shard after the other: {reason}"
    return "side by side in threads" + ("" if timings is None else timings.why_in_threads())


def why_in_order(mode: Mode, shards: int) -> str | None:
    """Why shards do not run side by side; None if they do: it is wanted, and they see what the caller's thread sees."""
    if shards < 2:
        return "there is one"
    if mode.executor == "sequential":
        return "executor='sequential'"
    if mode.seed is not None:
        return "they are seeded, and take turns with torch's one generator of the CPU"
    if IN_ORDER.get():
        return "a call around this one has a lock"
    if mode.executor == "auto":
        if not is_marked(mode.fn):
            return "the function is not known to be safe in threads (fdp.thread_safe marks it)"
        if torch_private.is_transformed():
            return "a transform of torch.func is active"
    if not is_carried() or is_forward_mode():
        return "other threads would not see a mode, hook or profiler that is active here"
    return "the function has refused to run beside others" if must_run_in_order(mode.fn) else None


def timings_of(mode: Mode, slots: Sequence[Slot]) -> Timings | None:
    """What calls like this one have taken, if times say which way is faster. Results have the same bits in both."""
    on_cpu = all(slot.device.type in ("cpu", "meta") for slot in slots)
    return mode.timings if mode.executor == "auto" and on_cpu else None


leave_alone(globals())
