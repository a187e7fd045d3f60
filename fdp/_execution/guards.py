"""What torch keeps for the whole process although threads may use it: guarded once slots run.

`torch.func.functional_call` puts its tensors into the module and takes them out again. Two slots on one module would
compute with each other's, and nothing would tell. So in slots it is fdp's, which works on a clone.

The others only raise, and only in shards that run side by side: what looks at the state of torch's generator or changes
it, from which other shards draw meanwhile, and what enters forward mode, whose level is one for all threads.
"""

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fdp._placement.slot import AXES
from fdp._trees import torch_private

BESIDE = contextvars.ContextVar("fdp_beside", default=False)
"""Whether this code runs in a shard beside others."""

_INSTALLING = threading.Lock()
_installed = False
_functional_call: Callable[..., Any] | None = None
_GENERATOR = (
    "which looks at torch's random generator or changes it, and other shards draw from that meanwhile. Pass "
    "executor='sequential'; for torch.utils.checkpoint, preserve_rng_state=False does too"
)
_FORWARD = (
    "which enters forward mode (jvp, jacfwd, hessian), and its level is one for all threads. Pass "
    "executor='sequential', or differentiate by vjp, jacrev"
)


def refuse_beside(what: str, why: str = _GENERATOR) -> None:
    """Raise in a shard that runs beside others."""
    if not torch.compiler.is_dynamo_compiling() and BESIDE.get():
        raise RuntimeError(f"executor='threads': the function calls {what}, {why}")


def stand_in_for_functional_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator: call this instead of `torch.func.functional_call` in slots."""
    global _functional_call
    _functional_call = function
    return function


def install() -> None:
    """Put the guards in place, at the first call with several slots."""
    global _installed
    if _installed:
        return
    with _INSTALLING:
        if not _installed:
            _guard_functional_call()
            for name in ("manual_seed", "seed", "get_rng_state", "set_rng_state"):
                guards: dict[Any, Any] = {}  # the two are one function until the compiler is imported
                for owner in (torch.random, torch):
                    theirs = getattr(owner, name)
                    setattr(owner, name, guards.setdefault(theirs, _refused(theirs, f"torch.{name}", _GENERATOR)))
            jvp = "torch._functorch.eager_transforms._jvp_with_argnums"  # jacfwd and hessian call it
            torch_private.replace(jvp, _refused(torch_private.find(jvp), "torch.func.jvp", _FORWARD))
            what = "torch.autograd.forward_ad.enter_dual_level"
            forward_ad.enter_dual_level = _refused(forward_ad.enter_dual_level, what, _FORWARD)
            _installed = True


def _guard_functional_call() -> None:
    theirs = torch_private.functional_call

    @functools.wraps(theirs)
    def guarded(
        module: torch.nn.Module, parameters_and_buffers: Any, args: Any = None, kwargs: Any = None, **options: bool
    ) -> Any:
        # A shard's own backward, which may call again what it has checkpointed, is in no slot, but beside others.
        is_alone = torch.compiler.is_dynamo_compiling() or not (AXES.get() or BESIDE.get())
        ours = None if is_alone else _functional_call
        return (ours or theirs)(module, parameters_and_buffers, args, kwargs, **options)

    # torch finds it by its name at each call, so a stand-in reaches every caller.
    torch_private.replace("torch.nn.utils.stateless._functional_call", guarded)


def _refused(function: Callable[..., Any], what: str, why: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        refuse_beside(what, why)
        return function(*args, **kwargs)

    return guarded
