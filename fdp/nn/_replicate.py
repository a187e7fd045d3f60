"""torch.nn.parallel's replicate: a module for each device."""

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fdp._placement.devices import as_devices
from fdp._trees.types import DeviceLike
from fdp.nn._bound_clone import Skeleton
from fdp.nn._copies import Tensors, copies_of

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: Iterable[DeviceLike | int], detach: bool = False) -> list[M]:
    """Make a module for each device, as `torch.nn.parallel.replicate` does.

    `parallel_apply(replicate(f, devices), xs) == [f(x) for x in xs]`; gradients of the replicas add up in `network`.

    >>> import torch
    >>> from fdp.nn import replicate
    >>> layer = torch.nn.Linear(2, 1)
    >>> first, second = replicate(layer, ["cpu", "cpu"])
    >>> first.weight is layer.weight, second.weight is layer.weight
    (True, False)

    Args:
        network: A module on the first of the devices.
        devices: One device a replica; an int is the index of an accelerator.
        detach: Make copies that have no part in gradients.

    Returns:
        Modules of the same class with hooks of their own; lists, dicts and sets without modules in them are those of
        `network`. The first holds the tensors of `network` itself, the others hold copies; `parameters()` has them all.

    Raises:
        RuntimeError: Lazy parameters that have no shape yet, or a scripted or traced module.
        ValueError: There is no such device.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"replicate: expected a torch.nn.Module, got {type(network).__name__}")
    chosen = devices if isinstance(devices, str | int | torch.device) else tuple(devices or ())
    if chosen == ():
        return []
    check_replicable(network, named_tensors(network).values(), "replicate")
    slots = as_devices(chosen, "replicate")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        own = named_tensors(network)
        return [_replica(network, copies_of(own, device, always=i > 0)) for i, device in enumerate(slots)]


def _replica(module: M, tensors: Tensors) -> M:
    """A module of the same class with other tensors."""
    skeleton = Skeleton(module, shares=True)
    if not skeleton.trusted:
        return _shallow(module, tensors)
    skeleton.slots.bind(tensors)
    skeleton.mark(OF_REPLICAS)
    root: Any = skeleton.root
    return root


def named_tensors(module: nn.Module) -> Tensors:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_replicable(
    module: nn.Module, tensors: Iterable[Tensor], where: str, *, may_have_scripts: bool = True
) -> None:
    """What cannot be replicated."""
    if any(map(is_lazy, tensors)):  # the message is torch's
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DataParallel`. Run a dummy forward pass to "
            "correctly initialize the modules"
        )
    for path, part in module.named_modules() if may_have_scripts else ():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the module's {path!r}" if path else "the module"
            raise RuntimeError(
                f"{where}: {what} is scripted or traced, and cannot be replicated. Pass the Python module"
            )


def _zero_grad(set_to_none: bool = True) -> None:
    nn.Module.zero_grad(_REPLICA, set_to_none)  # torch's own warning, and nothing to clear


_REPLICA = nn.Module()
_REPLICA._is_replica = True  # pyright: ignore[reportArgumentType]
OF_REPLICAS = {"_is_replica": True, "zero_grad": _zero_grad}


def _shallow(module: M, tensors: Tensors) -> M:
    """A copy part by part, each as it copies itself, as torch makes it: where a clone may lead back to the module.

    The copy of a compiled module is not compiled: what was compiled calls the original.
    """
    own = named_tensors(module)
    by_id = {id(tensor): tensors[name] for name, tensor in own.items()}
    parts = [part for part in module.modules() if _inside(part) is part]
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in parts}
    for part, replica in copies.items():
        for key, child in part._modules.items():
            replica._modules[key] = None if child is None else copies[_inside(child)]
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(part, kind).items():
                vars(replica)[kind][key] = None if tensor is None else by_id[id(tensor)]
        vars(replica).pop("_compiled_call_impl", None)
        for key, value in vars(replica).items():
            if key.endswith("_hooks") and isinstance(value, dict):
                vars(replica)[key] = value.copy()
    return copies[_inside(module)]


def _inside(module: nn.Module) -> nn.Module:
    """What a module is that torch.compile has wrapped."""
    while type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        module = cast(nn.Module, module._modules["_orig_mod"])
    return module
