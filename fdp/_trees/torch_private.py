"""Every private name of torch that fdp stands on, each with what it is for. No other file uses one: ruff sees to that.

A name here is torch's own without its underscores. A version of torch that has renamed one fails when fdp is imported,
with a message that says which, and what it was for.
"""

import contextlib
import importlib
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.utils import parametrize

SEEN = "2.11 to 2.15"
Result = TypeVar("Result")


class Private(NamedTuple):
    """A private name, what fdp needs it for, and the versions of torch that had it."""

    path: str
    why: str
    seen: str


USED: list[Private] = []


def _use(path: str, why: str, seen: str = SEEN) -> Any:
    USED.append(Private(path, why, seen))
    return find(path)


def find(path: str) -> Any:
    """What stands at a path of torch."""
    names = path.split(".")
    found: Any = torch
    for i, name in enumerate(names[1:], 1):
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join(names[: i + 1]))
            except ImportError:
                why = next((each.why for each in USED if each.path == path), "")
                raise ImportError(f"torch {torch.__version__} has no {path}, which fdp needs: {why}") from None
        found = getattr(found, name)
    return found


def replace(path: str, value: Any) -> None:
    """Put something of fdp's in the place of a private name that is in `USED`."""
    owner, _, name = path.rpartition(".")
    setattr(find(owner), name, value)


# Transforms of torch.func

is_transformed = _use(
    "torch._C._are_functorch_transforms_active", "is there a transform around? It can be asked while compiling"
)
current_interpreter = _use(
    "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter", "the innermost transform, and its level"
)
_INSIDE = "the tensors inside those of transforms"
get_unwrapped = _use("torch._C._functorch.get_unwrapped", _INSIDE)
is_functorch_wrapped_tensor = _use("torch._C._functorch.is_functorch_wrapped_tensor", _INSIDE)
is_gradtrackingtensor = _use("torch._C._functorch.is_gradtrackingtensor", _INSIDE)
_STACK = "the stack of transforms is one for each thread: it is carried to threads, else gradients would be lost"
pop_layer = _use("torch._functorch.pyfunctorch.pop_dynamic_layer_stack", _STACK)
push_layer = _use("torch._functorch.pyfunctorch.push_dynamic_layer_stack", _STACK)
_FORWARD = "forward mode is one for the process: shards that run side by side may not enter it"
_use("torch._functorch.eager_transforms._jvp_with_argnums", _FORWARD)
_forward_level = _use("torch.autograd.forward_ad._current_level", _FORWARD)


forward_level: Callable[[], int] = partial(operator.attrgetter("_current_level"), torch.autograd.forward_ad)
"""The level of forward mode, negative if it is off."""


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way; its level is one for all threads."""
    return torch.autograd.forward_ad._current_level >= 0


def depth() -> int:
    """How many transforms of torch.func are active here."""
    return current_interpreter().level() if is_transformed() else 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for many, which a transform runs at once."""
    return is_functorch_wrapped_tensor(tensor) and not is_gradtrackingtensor(tensor)


class Transforms:
    """The innermost transforms of torch.func. No interrupt comes while they are taken off the stack or put back."""

    def __init__(self, count: int) -> None:
        self._taken: list[Any] = [None]  # where to stop
        self.take = partial(self._taken.extend, map(operator.call, [pop_layer] * count))
        self.put_back = partial(deque, map(push_layer, iter(self._taken.pop, None)), 0)

    def outside(self, call: Callable[[], Result]) -> Result:
        """What a call returns where they are not active; once."""
        try:
            self.take()
            return call()
        finally:
            self.put_back()

    def taken(self) -> list[Any]:
        """Those that were taken, the innermost first."""
        return self._taken[1:]


def outside_transforms(call: Callable[[], Result], count: int | None = None) -> Result:
    """What a call returns outside of so many transforms of torch.func, by default of all."""
    return Transforms(depth() if count is None else count).outside(call)


@contextlib.contextmanager
def without_transforms() -> Iterator[None]:
    """As a context: no transform of torch.func is active."""
    transforms = Transforms(depth())
    try:
        transforms.take()
        yield
    finally:
        transforms.put_back()


def transforms_here() -> list[Any]:
    """The transforms that are active, the innermost first."""
    transforms = Transforms(depth())
    return transforms.outside(transforms.taken)


def kinds_here() -> list[str]:
    """Of what kind these are: "Vmap", "Grad", "Jvp", "Functionalize"."""
    return [current_interpreter().key().name, *outside_transforms(kinds_here, 1)] if is_transformed() else []


_LEVELS = "collectives inside torch.func meet at each level of its transforms"
unwrap_batched = _use("torch._C._functorch._unwrap_batched", _LEVELS)
add_batch_dim = _use("torch._C._functorch._add_batch_dim", _LEVELS)
unwrap_for_grad = _use("torch._C._functorch._unwrap_for_grad", _LEVELS)
wrap_for_grad = _use("torch._C._functorch._wrap_for_grad", _LEVELS)
enable_single_level_function = _use("torch._functorch.autograd_function.enable_single_level_autograd_function", _LEVELS)
forward_mode_enabled = _use("torch.autograd.forward_ad._set_fwd_grad_enabled", _LEVELS)
if TYPE_CHECKING:  # else what is derived from it has an unknown base
    from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
else:
    SingleLevelFunction = _use("torch.autograd.function._SingleLevelFunction", _LEVELS)

# The rest of a thread's state

_STATE = "what a thread has of torch, carried to other threads"
set_grad_enabled = _use("torch._C._set_grad_enabled", _STATE)
is_multithreading_enabled = _use("torch._C._is_multithreading_enabled", _STATE)
set_multithreading_enabled = _use("torch._C._set_multithreading_enabled", _STATE)
push_on_torch_function_stack = _use("torch._C._push_on_torch_function_stack", _STATE)
pop_torch_function_stack = _use("torch._C._pop_torch_function_stack", _STATE)
get_current_function_mode_stack = _use("torch.overrides._get_current_function_mode_stack", _STATE)
len_torch_dispatch_stack = _use("torch._C._len_torch_dispatch_stack", _STATE)
push_on_torch_dispatch_stack = _use("torch._C._push_on_torch_dispatch_stack", _STATE)
pop_torch_dispatch_stack = _use("torch._C._pop_torch_dispatch_stack", _STATE)
get_current_dispatch_mode_stack = _use("torch.utils._python_dispatch._get_current_dispatch_mode_stack", _STATE)
saved_tensors_hooks = _use("torch._C._autograd._top_saved_tensors_default_hooks", _STATE)
saved_tensors_hooks_get_disabled_error_message = _use(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", _STATE
)
USED.append(Private("torch.autograd.profiler._is_profiler_enabled", "are ranges wanted?", SEEN))
profiler_enabled = _use("torch._C._autograd._profiler_enabled", "does a profiler watch this thread alone?")


is_tracing: Callable[[], bool] = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
"""Whether torch.jit traces. It is public, and type checkers do not see that."""


def fake_mode() -> Any:
    """The mode of fake tensors, if the call is on these. That of the compiler is not the user's."""
    if torch.compiler.is_dynamo_compiling() or not len_torch_dispatch_stack():
        return None
    kind = fake_tensors().FakeTensorMode
    return next((mode for mode in get_current_dispatch_mode_stack() if isinstance(mode, kind)), None)


# Autograd

_ORDER = "in which order a backward takes nodes that several threads have made"
get_sequence_nr = _use("torch._C._autograd._get_sequence_nr", _ORDER)
_set_node_number = _use("torch._C._functions.AccumulateGrad._set_sequence_nr", _ORDER)
current_graph_task_id = _use("torch._C._current_graph_task_id", "does a backward run here?")
StopRecomputationError = _use("torch.utils.checkpoint._StopRecomputationError", "a checkpoint ends its recomputing so")


def set_sequence_nr(node: Any, number: int) -> None:
    """Give a node another number."""
    node._set_sequence_nr(number)


_run_backward = _use("torch.autograd.graph._engine_run_backward", "gradients of tensors that need not be looked over")


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    *,
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """What `torch.autograd.grad` returns with `allow_unused`, without its questions if these are plain tensors."""
    if get_current_function_mode_stack() or not _PLAIN.issuperset(map(type, (*outputs, *inputs))):
        return torch.autograd.grad(outputs, inputs, given, create_graph=create_graph, allow_unused=True)
    run = torch.autograd.graph._engine_run_backward  # not the one of above: the virtual accelerator has another
    roots, leaves = (tuple(outputs), tuple(given)), tuple(inputs)
    return run(*roots, create_graph, create_graph, leaves, allow_unreachable=True, accumulate_grad=False)


_PLAIN = frozenset({torch.Tensor})

# Tensors

_WRITTEN = "has an argument been written to?"
_version = _use("torch.Tensor._version", _WRITTEN)
unsafe_set_version_counter = _use("torch._C._autograd._unsafe_set_version_counter", "explain leaves no trace")
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is to be called with the gradient of a leaf, or after it was added."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def storage(tensor: torch.Tensor) -> int:
    """The same number for all tensors with the memory of this one."""
    return tensor.untyped_storage()._cdata


flatten_dense_tensors = _use(
    "torch._C._nn.flatten_dense_tensors", "what is summed over processes as one is put together in one call"
)
unflatten_dense_tensors = _use("torch._C._nn.unflatten_dense_tensors", "and it is taken apart in one")
mps_generator = _use("torch.mps._get_default_mps_generator", "seeds and bookmarks on MPS")
foreach_zero_ = _use("torch._foreach_zero_", _ORDER)
foreach_add = _use("torch._foreach_add", "small gradients are added up in one call")
pytree = _use("torch.utils._pytree", "types that are registered with torch only")

# Modules

_CALL = "two shards would swap tensors in one module: it is replaced for shards by fdp's"
functional_call = _use("torch.nn.utils.stateless._functional_call", _CALL)
reparametrize_module = _use("torch.nn.utils.stateless._reparametrize_module", "a module that is called in place")
dict_version = _use(
    "torch._C._dynamo.guards.dict_version", "has a dict been written to? The compiler asks for its guards", "2.13"
)
_CACHE = "parametrizations are cached for the module, and not for the tensors of a call: refused"
_cache_enabled = _use("torch.nn.utils.parametrize._cache_enabled", _CACHE)
_VALIDATES = "torch.distributions.Distribution._validate_args"
_use(_VALIDATES, "distributions look at values, where there are none")


def set_validate_args(value: bool) -> bool:
    """Whether distributions look at their arguments from here on; returns whether they did before."""
    before = find(_VALIDATES)
    torch.distributions.Distribution.set_default_validate_args(value)
    return before


if TYPE_CHECKING:  # else what is derived from it has an unknown base
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = torch.nn.BatchNorm1d.__base__


def is_parametrize_caching() -> bool:
    """Whether they cache at the moment."""
    return bool(parametrize._cache_enabled)


# The compiler

_SKIP = "the compiler skips fdp's own code, without being imported"
set_code_exec_strategy = _use("torch._C._dynamo.eval_frame.set_code_exec_strategy", _SKIP)
FrameExecStrategy = _use("torch._C._dynamo.eval_frame._FrameExecStrategy", _SKIP)
FrameAction = _use("torch._C._dynamo.eval_frame._FrameAction", _SKIP)

USED.append(Private("torch._dynamo.polyfills.pytree", "dicts without tensors, in a graph", SEEN))  # it is imported late


def trace_dicts() -> None:
    """Have the compiler trace how any dict is taken apart and put together; for use while it compiles.

    One without tensors is a constant, for which it calls optree instead, and has no way to hold what optree returns.
    """
    pytree = sys.modules["torch._dynamo.polyfills.pytree"]
    for name in ("dict_flatten", "dict_unflatten"):
        if hasattr(pytree, name):
            vars(getattr(pytree, name))["__torch_dynamo_can_constant_fold_through__"] = False


def graph_break(why: str) -> None:
    """End a graph here while compiling."""
    torch._dynamo.graph_break(msg=why)


def fake_tensors() -> Any:
    """The module of fake tensors, which torch imports late."""
    return find("torch._subclasses.fake_tensor")
