"""torch.nn.DataParallel with one import changed."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from fdp._execution.executor import check_executor
from fdp._placement.devices import as_devices
from fdp._placement.moves import copy, to_device
from fdp._placement.partition import Partition, check_weights
from fdp._trees.not_compiled import leave_all_alone
from fdp._trees.tracebacks import api_boundary
from fdp._trees.types import DeviceLike, Executor, Tree
from fdp.nn._device_ids import devices_of, index_of, warn_of_imbalance
from fdp.nn._parallel_apply import check_lengths, run_modules
from fdp.nn._replicate import Names, check_placement, replicas_of
from fdp.nn._scatter_gather import Inputs, Keywords, as_target, check_dim, join_outputs, split_call
from fdp.nn._write_back import put_buffer

M = TypeVar("M", bound=nn.Module)


class DataParallel(nn.Module, Generic[M]):
    """Run a module on several devices, each with a part of the batch: `torch.nn.DataParallel` with one import changed.

    For a module that treats rows alike, `DataParallel(module)(x) == module(x)`, values and gradients.

    >>> import torch
    >>> from fdp import DataParallel
    >>> model = DataParallel(torch.nn.Linear(2, 1), device_ids=["cpu", "cpu"])
    >>> model(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    >>> list(model.state_dict())
    ['module.weight', 'module.bias']

    `torch.chunk` splits each input by itself, but all in equally many parts, the module's parameters and buffers are
    copied to the other devices, replicas of the module run, and their outputs are joined. Where nothing is split the
    module runs once, on the first device. Without an accelerator and without a CPU among `device_ids`, calls go to the
    module itself.

    Subclasses may override `replicate`, `scatter`, `parallel_apply` and `gather`.

    Replicas share what torch's share: lists, dicts and sets of the module, unless its tensors or modules are in them,
    and objects of other classes. Ask for no threads if forward writes to them. Attributes that forward sets are lost.

    Dropout draws from the generators that there are: run side by side on the CPU, replicas share one, and their masks
    vary between runs.

    Args:
        module: The module, with its parameters and buffers on the first device; on a single device it is moved there.
        device_ids: One device per slot: None (all accelerators), or a sequence of devices, in which an int is the index
            of an accelerator. `["cpu"] * n` are n virtual devices.
        output_device: Where outputs go, by default the first device.
        dim: The dimension of inputs that is split, and of outputs that is concatenated.
        weights: Relative rows of each slot. By default as `torch.chunk` cuts.
        executor: `"sequential"`, `"threads"` or `"auto"`, as in `dp_apply`.

    Attributes:
        module: The wrapped module.
        device_ids: An index for each accelerator, a `torch.device` for each CPU; empty if the module is called itself.
        output_device: The same for the output.
        dim: As given.
        src_device_obj: The first device.

    Raises:
        ValueError: There is no such device, or an option is none of those that there are.
        TypeError: Not a module, or not a device.
        RuntimeError: From calls: a parameter or buffer that is not on the first device, or lazy parameters.

    Exceptions of the module arrive as they are, with notes that say "Caught ... in replica ... on device ...".
    """

    module: M
    device_ids: list[int | torch.device]
    output_device: int | torch.device | None
    src_device_obj: torch.device | None
    _where = "DataParallel"

    def __init__(
        self,
        module: M,
        device_ids: Sequence[DeviceLike | int] | None = None,
        output_device: DeviceLike | int | None = None,
        dim: int = 0,
        *,
        weights: Sequence[float] | None = None,
        executor: Executor = "auto",
    ) -> None:
        super().__init__()
        where = self._where
        if not isinstance(module, nn.Module):
            raise TypeError(f"{where}: expected a torch.nn.Module, got {type(module).__name__}")
        check_executor(executor, where)
        check_dim(dim, where)
        devices = devices_of(device_ids, where)
        if len(devices) > 1 and isinstance(module, DataParallel | nn.DataParallel):
            raise TypeError(f"{where}: the module is a {type(module).__name__} already; pass its .module")
        self.module = module
        self.dim: int = dim
        self.device_ids = [index_of(device) for device in devices]
        self.src_device_obj = devices[0] if devices else None
        self.output_device = index_of(self.src_device_obj)
        if devices and output_device is not None:
            is_minus_one = output_device == -1 and not isinstance(output_device, bool)
            self.output_device = -1 if is_minus_one else index_of(as_target(output_device, where))
        self._weights = None if weights is None or not devices else check_weights(weights, len(devices), where)
        self._executor: Executor = executor
        self._prepare(devices)

    def _prepare(self, devices: Sequence[torch.device]) -> None:
        if self._weights is None:
            warn_of_imbalance(devices)
        if len(devices) == 1:
            self.module.to(devices[0])

    @api_boundary()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices."""
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            return self._run(inputs, kwargs) if self.device_ids else self.module(*inputs, **kwargs)

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.device_ids) == 1:
            check_placement(
                chain(self.module.parameters(), self.module.buffers()), self._devices_of(self.device_ids)[0]
            )
        args, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if not args and not keywords:
            args, keywords = ((),), ({},)
        if len(self.device_ids) == 1:
            output = self.module(*args[0], **keywords[0])
            if self.output_device == index_of(self.src_device_obj):
                return output
            return to_device(output, as_target(cast(Any, self.output_device), self._where), "output")
        replicas = self.replicate(self.module, self._ids_of(args))
        output = self.gather(self.parallel_apply(replicas, args, keywords), cast(Any, self.output_device))
        _keep_buffers(self.module, replicas[0])
        return output

    def replicate(self, module: M, device_ids: Sequence[DeviceLike | int]) -> list[M]:
        """Make a replica of the module for each device."""
        devices = self._devices_of(device_ids)
        return replicas_of(module, devices, self._where, source=self.src_device_obj)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device_ids: Sequence[DeviceLike | int]
    ) -> tuple[Inputs, Keywords]:
        """Split the arguments: those of each replica, positional ones first."""
        devices = self._devices_of(device_ids)
        args, keywords, partition = split_call(inputs, kwargs or {}, devices, self.dim, self._weights, self._where)
        return _Shards(args, partition), keywords

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas, each with its arguments. None for `kwargs` is none for all of them."""
        check_lengths(len(replicas), inputs=inputs, kwargs_tup=kwargs)
        partition = inputs.partition if isinstance(inputs, _Shards) else None
        devices = self._devices_of(self._ids_of(inputs))
        return run_modules(replicas, inputs, kwargs, devices, partition and partition.sizes, self._executor)

    def gather(self, outputs: Sequence[Tree], output_device: DeviceLike | int) -> Tree:
        """Join the outputs of the replicas."""
        return join_outputs(outputs, as_target(output_device, self._where), self.dim, self._where)

    def _ids_of(self, inputs: Sequence[Any]) -> list[int | torch.device]:
        """The devices of the replicas: those that have rows."""
        if isinstance(inputs, _Shards) and inputs.partition is not None:
            return [self.device_ids[slot] for slot in inputs.partition.slots]
        return self.device_ids[: len(inputs)]

    def _devices_of(self, device_ids: Sequence[DeviceLike | int]) -> tuple[torch.device, ...]:
        return as_devices(list(device_ids), self._where)


def _keep_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Give the module what forward has put in place of buffers of its first replica, which shares the others."""
    made = dict(replica.named_modules())
    for path, part in module.named_modules():
        for key, own in part._buffers.items() if path in made else ():
            new = made[path]._buffers.get(key, own)
            if own is not None and new is not None and own.device != new.device:
                name = Names([f"{path}.{key}" if path else key])
                put_buffer(part._buffers, key, copy(new.detach(), own.device, name, 0))  # the first device has no rows
            elif new is not own:
                part._buffers[key] = new


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike | int] | None = None,
    output_device: DeviceLike | int | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module on several devices once: the functional form of `DataParallel`, as torch has it.

    `data_parallel(module, x, devices) == DataParallel(module, devices)(x)`.

    >>> import torch
    >>> from fdp import data_parallel
    >>> data_parallel(torch.nn.Identity(), torch.arange(3), ["cpu", "cpu"])
    tensor([0, 1, 2])

    Args:
        module: The module, with its parameters and buffers on the first device.
        inputs: A tuple of arguments, None for none, or the only one.
        device_ids, output_device, dim: As in `DataParallel`.
        module_kwargs: Keyword arguments.

    Returns:
        The joined output.

    Raises:
        ValueError, TypeError, RuntimeError: As `DataParallel` does.
    """
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return _Once(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))


class _Once(DataParallel[Any]):
    _where = "data_parallel"

    def _prepare(self, devices: Sequence[torch.device]) -> None:
        """The module stays where it is."""


class _Shards(tuple[tuple[Any, ...], ...]):
    """The positional arguments of each replica, with the partition of the rows."""

    partition: Partition | None

    def __new__(cls, args: Inputs, partition: Partition | None) -> "_Shards":
        shards = super().__new__(cls, args)
        shards.partition = partition
        return shards


leave_all_alone(DataParallel._run)
