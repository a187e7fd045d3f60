"""Tensors without data, and running a user's function on them so that nothing real is read or written."""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, final

import torch
from torch import nn

from fdp._execution.thread_state import Carried
from fdp._placement.sharded import Slots
from fdp._placement.transfer_log import Watch, watched
from fdp._trees import torch_private
from fdp._trees.tracebacks import text_of
from fdp._trees.tree import map_tensors, tree_map
from fdp._trees.types import Tree


def has_autograd(slots: Sequence[torch.device]) -> bool:
    """Whether torch can build graphs here for tensors that claim to be on these devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", "meta"} | (set() if accelerator is None else {accelerator.type})
    return all(device.type in here for device in slots)


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _nothing(record: logging.LogRecord) -> bool:
    return False


@final
class Apart:
    """While something is explained, compiled functions run as they are written, and no module is converted.

    The kernels of the ones would read data that is not there; the others would lose theirs.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:  # both are the same for all threads: the first sets them, the last puts them back
            if self._count == 0:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:  # torch refuses to be asked for eager code where it compiles
                    raise RuntimeError(
                        "to see what a function does, it is run on tensors without data, and not inside torch.compile: "
                        "compile the function of a shard instead"
                    ) from error
                self._apply, nn.Module._apply = nn.Module._apply, _apply_nowhere_else(nn.Module._apply)
                self._validates = torch_private.set_validate_args(False)
                self._anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
                torch.autograd.set_detect_anomaly(self._anomalies[0], check_nan=False)  # there are no values to look at
            self._count += 1

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                nn.Module._apply = self._apply
                torch_private.set_validate_args(self._validates)
                torch.autograd.set_detect_anomaly(*self._anomalies)
                self._stance.__exit__(*exception)


APART = Apart()


def _apply_nowhere_else(original: Callable[..., Any]) -> Any:
    """`nn.Module._apply`, which is what `.to()` and its like call, for all but functions that are explained."""

    @functools.wraps(original)
    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(torch_private.fake_mode(), _mode_class()):
            raise RuntimeError(
                f"the function converts a {type(module).__name__} (.to(), .double(), .cuda(), ...), which would lose "
                "its data here. Convert it before the call, or pass its parameters: see fdp.functional"
            )
        return original(module, *args, **kwargs)

    return apply


@functools.cache
def _mode_class() -> Any:
    """The class of torch, which imports much, with what it must not do to tensors of the caller's."""

    class GuardedFakeMode(torch_private.fake_tensors().FakeTensorMode):
        is_over = False

        def __init__(self, kept: dict[torch.Tensor, _KeptTensor]) -> None:
            # No fallback kernels: they compute with zeros, and what depends on values would come out wrong.
            super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
            self._kept_tensors = kept

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.is_over:
                raise RuntimeError(
                    f"{func} of a tensor without data: fdp.explain has called a function with it, and something has "
                    "kept it, such as a cache (functools.lru_cache, an attribute of a module, ...). Clear that, or "
                    "make it anew"
                )
            # torch computes with real tensors, and writes to them, where an operation has no other arguments.
            if func not in self.lift_fns:
                args, kwargs = map_tensors(self._fake, (args, kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs or {})

        def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return tensor  # has no data, or is for torch to refuse
            if tensor not in self._kept_tensors:
                self._kept_tensors[tensor] = _KeptTensor.of(tensor, self.from_tensor(tensor.detach()))
            return self._kept_tensors[tensor].fake

    return GuardedFakeMode


class _KeptTensor(NamedTuple):
    """What a write to a tensor of the caller's would change although its values stay."""

    tensor: torch.Tensor
    fake: torch.Tensor
    version: int | None
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, fake: torch.Tensor) -> "_KeptTensor":
        version = None if tensor.is_inference() else torch_private.version(tensor)
        return cls(tensor, fake, version, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)

    def restore(self) -> None:
        if self.tensor.requires_grad and not self.requires_grad and not self.tensor._is_view():
            self.tensor.detach_()  # which torch refuses for views
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.version is not None and torch_private.version(self.tensor) != self.version:
            torch_private.unsafe_set_version_counter((self.tensor,), (self.version,))


@final
class Fakes:
    """Tensors without data in place of real ones, and where these are used."""

    def __init__(self) -> None:
        fake_tensor = torch_private.fake_tensors()

        self._kept: dict[torch.Tensor, _KeptTensor] = {}  # tensors are keys by identity
        self._mode = _mode_class()(self._kept)
        self._memo: dict[torch.Tensor, torch.Tensor] = {}
        self.has_graph = True
        self.values = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
        self.unknown = (
            *self.values,
            fake_tensor.UnsupportedFakeTensorException,
            fake_tensor.UnsupportedOperatorException,
        )

    def __enter__(self) -> Self:
        _LOGGER.addFilter(_nothing)  # torch logs what a function raises with its traceback, as if it were torch's fault
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        _LOGGER.removeFilter(_nothing)
        self._mode.is_over = True
        torch.clear_autocast_cache()  # casts of the caller's parameters are among it, without data
        for kept in self._kept.values():
            kept.restore()

    def of(self, tree: Tree) -> Tree:
        """A tree without data."""
        return tree_map(self._of_leaf, tree)

    def _of_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Slots):
            return dataclasses.replace(leaf, shards=tuple(map(self.of, leaf.shards)))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf not in self._memo:
            self._memo[leaf] = self._of_tensor(leaf)
        return self._memo[leaf]

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        needs_grad = tensor.requires_grad and self.has_graph
        if tensor.layout is torch.strided:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = self._mode.from_tensor(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, needs_grad)
        return fake.requires_grad_() if needs_grad else fake


@contextlib.contextmanager
def without_data(watch: Watch) -> Iterator[Fakes]:
    """As a context: what runs in it reads and writes nothing real. The watch is told of it, and no other."""
    with APART, Fakes() as fakes, watched(watch, alone=True):
        yield fakes


def problem_of(error: Exception, fakes: Fakes) -> str:
    """What keeps outputs from being known, and where in the user's code."""
    known = type(error).__name__
    if isinstance(error, fakes.unknown):
        known = "the function depends on values" if isinstance(error, fakes.values) else "torch knows no shapes here"
    text = text_of(error)
    if not fakes.has_graph and "is not linked with support for" in text:
        text += ", for all that the function does. Explain it on fdp.virtual_devices(n)"
    libraries = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    line = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{known}: {text}{line}"


@final
class Guard(Carried):
    """Around the function: refuses what would end the process, or take the data of the caller's tensors away."""

    def __init__(self, *, has_graph: bool) -> None:
        super().__init__()
        self._has_graph = has_graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._has_graph and func is torch_private.set_grad_enabled and args[0]:
            raise RuntimeError(
                "the function asks for gradients, which cannot be explained on devices that are not here. Explain it "
                "on fdp.virtual_devices(n)"
            )
        if func == _SET_DATA and type(args[0]).__name__ != "FakeTensor":
            raise RuntimeError(
                "the function sets the .data of a tensor that it takes from elsewhere, as the first call of a lazy "
                "module does. That would take its data away: call it once before"
            )
        return func(*args, **(kwargs or {}))


_SET_DATA: Any = vars(torch.Tensor.__base__)["data"].__set__
