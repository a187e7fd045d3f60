"""Tensors without data, and running a user's function on them so that nothing real is read or written."""

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import torch
from torch._C import _autograd as autograd
from torch.overrides import TorchFunctionMode

from fdp._slots import Slots
from fdp._tree import map_tensors, tree_map
from fdp._typing import Tree


def has_autograd(slots: Sequence[torch.device]) -> bool:
    """Whether torch can build graphs here for tensors that claim to be on these devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", "meta"} | (set() if accelerator is None else {accelerator.type})
    return all(device.type in here for device in slots)


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _nothing(record: logging.LogRecord) -> bool:
    return False


@final
class Eagerly:
    """Compiled functions run as they are written meanwhile: their kernels would read data that is not there."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:  # the stance is one for all threads: the first sets it, the last puts it back
            if self._count == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._count += 1

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._stance.__exit__(*exception)


EAGERLY = Eagerly()


class _Kept(NamedTuple):
    """What a write to a tensor of the caller's would change although its values stay."""

    tensor: torch.Tensor
    fake: torch.Tensor
    version: int | None
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, fake: torch.Tensor) -> "_Kept":
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor, fake, version, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)

    def restore(self) -> None:
        if self.tensor.requires_grad and not self.requires_grad and not self.tensor._is_view():
            self.tensor.detach_()  # which torch refuses for views
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.version is not None and self.tensor._version != self.version:
            autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


@final
class Fakes:
    """Tensors without data in place of real ones, and where these are used."""

    def __init__(self) -> None:
        from torch._subclasses import fake_tensor

        kept = self._kept = dict[torch.Tensor, _Kept]()  # tensors are keys by identity

        class Mode(fake_tensor.FakeTensorMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                def fake(tensor: torch.Tensor) -> torch.Tensor:
                    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                        return tensor  # has no data, or is for torch to refuse
                    if tensor not in kept:
                        kept[tensor] = _Kept.of(tensor, self.from_tensor(tensor.detach()))
                    return kept[tensor].fake

                # torch computes with real tensors, and writes to them, where an operation has no other arguments.
                if func not in self.lift_fns:
                    args, kwargs = map_tensors(fake, (args, kwargs or {}))
                return super().__torch_dispatch__(func, types, args, kwargs or {})

        # No fallback kernels: they compute with zeros, and what depends on values would come out wrong.
        self._mode = Mode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._memo: dict[torch.Tensor, torch.Tensor] = {}
        self.has_graph = True
        self.unknown = (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
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
        if tensor.layout is torch.strided and not tensor.is_nested:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = self._mode.from_tensor(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, needs_grad)
        return fake.requires_grad_(needs_grad)


class NoGraphs(TorchFunctionMode):
    """For devices that torch knows nothing of here: a graph with tensors on them would end the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and args[0]:
            raise RuntimeError(
                "the function asks for gradients, which cannot be explained on devices that are not here. Explain it "
                "on fdp.virtual_devices(n)"
            )
        return func(*args, **(kwargs or {}))
