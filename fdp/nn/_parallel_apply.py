"""torch.nn.parallel's parallel_apply: several modules, each with its inputs, each on its device."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fdp._execution.executor import run_all
from fdp._placement.devices import as_device
from fdp._placement.partition import Partition
from fdp._placement.plan import places_of
from fdp._trees.tree import tensors_in
from fdp._trees.types import DeviceLike, Executor


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike | int | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs on its device, as `torch.nn.parallel.parallel_apply` does.

    `parallel_apply([f, g], [x, y]) == [f(x), g(y)]`.

    >>> import torch
    >>> from fdp.nn import parallel_apply
    >>> parallel_apply([torch.abs, torch.neg], [torch.tensor([-1.0]), torch.tensor([2.0])])
    [tensor([1.]), tensor([-2.])]

    The modules run one after the other in the calling thread; kernels of accelerators overlap all the same.

    Args:
        modules: One per device.
        inputs: For each a tuple or list of positional arguments, or the only one.
        kwargs_tup: For each its keyword arguments.
        devices: For each the device that is current in it; an int is the index of an accelerator. By default that of
            its first tensor.

    Returns:
        What each module returns.

    Raises:
        AssertionError: The numbers of modules, inputs, keyword arguments and devices differ.
        Exception: What the first failing module raised, with notes that say "Caught ... in replica ... on device ...".
    """
    check_lengths(len(modules), inputs=inputs, kwargs_tup=kwargs_tup, devices=devices)
    if not modules:
        return []
    places = [
        _device_of(module, args) if device is None else as_device(device, "parallel_apply")
        for module, args, device in zip(modules, inputs, devices or [None] * len(modules), strict=True)
    ]
    return run_modules(modules, inputs, kwargs_tup, places, None)


def run_modules(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None,
    devices: Sequence[torch.device],
    sizes: tuple[int, ...] | None,
    executor: Executor = "sequential",
) -> list[Any]:
    """Call each module on its slot; `sizes` are the rows that each has, if they are known."""
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    calls = enumerate(zip(devices, modules, inputs, kwargs, strict=True))
    tasks = [functools.partial(_call, i, *call) for i, call in calls]
    return run_all(tasks, places_of(Partition(tuple(range(len(tasks))), tuple(devices), sizes), "data"), executor)


def check_lengths(modules: int, **others: Sequence[Any] | None) -> None:
    """As many of everything as there are modules; the message is torch's."""
    for name, values in others.items():
        if values is not None and len(values) != modules:
            raise AssertionError(f"The number of modules {modules} is not equal to the number of {name} {len(values)}")


def _call(i: int, device: torch.device, module: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any]) -> Any:
    try:
        return module(*inputs, **kwargs) if isinstance(inputs, list | tuple) else module(inputs, **kwargs)
    except Exception as error:
        place = device.type if device.index is None else device.index
        note_on(error, f"Caught {type(error).__name__} in replica {i} on device {place}.")
        raise


def note_on(error: Exception, note: str) -> None:
    """Add a note, unless the error has it: one object may be raised again and again."""
    with contextlib.suppress(Exception):  # a class of the user's may not take notes: it arrives all the same
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _device_of(module: Callable[..., Any], inputs: Any) -> torch.device:
    held = [*module.parameters()] if isinstance(module, nn.Module) else []
    return next((tensor.device for tensor in [*tensors_in(inputs), *held]), torch.device("cpu"))
