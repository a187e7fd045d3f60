"""torch.nn.parallel's replicate: a module for each device."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fdp._placement.devices import as_devices
from fdp._placement.moves import copy, is_expanded
from fdp._trees.types import DeviceLike
from fdp.nn._clone import clone
from fdp.nn._recipe import recipe_of

M = TypeVar("M", bound=nn.Module)


def _zero_grad(set_to_none: bool = True) -> None:
    nn.Module.zero_grad(_REPLICA, set_to_none)  # torch's own warning, and nothing to clear


_REPLICA = nn.Module()
_REPLICA._is_replica = True  # pyright: ignore[reportArgumentType]
OF_REPLICAS = {"_is_replica": True, "zero_grad": _zero_grad}


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
        Modules of the same class with hooks of their own; lists, dicts and sets without tensors or modules of `network`
        in them are those of `network`. The first holds the tensors of `network` itself, the others hold copies.

    Raises:
        RuntimeError: Lazy parameters that have no shape yet, a scripted or traced module, or one of which something
            leads back to `network`, such as a hook that closes over it.
        ValueError: There is no such device.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"replicate: expected a torch.nn.Module, got {type(network).__name__}")
    chosen = devices if isinstance(devices, str | int | torch.device) else tuple(devices or ())
    if chosen == ():
        return []
    return replicas_of(network, as_devices(chosen, "replicate"), "replicate", detach=detach)


def replicas_of(
    module: M,
    devices: Sequence[torch.device],
    where: str,
    *,
    detach: bool = False,
    source: torch.device | None = None,
) -> list[M]:
    """Clones over the module's tensors, which are on the `source`, and over copies of them for the other devices."""
    recipe, states = recipe_of(module)
    own = recipe.own(states)
    if any(map(is_lazy, own.values())):  # the message is torch's
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DataParallel`. Run a dummy forward pass to "
            "correctly initialize the modules"
        )
    # In DataParallel what leads back to the module finds the module, as in torch's: its tensors are equal.
    if (reason := recipe.in_place if where == "replicate" else recipe.reason) is not None:
        raise RuntimeError(f"{where}: there can be no replica of this {type(module).__name__}: {reason}")
    named = {name: own[name] for name in recipe.usual}
    if source is not None:
        check_placement(named.values(), source)
    names, made = Names([*named]), list[Any]()
    for slot, device in enumerate(devices):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            copies = {
                name: copy(x, device, names, i, always=slot > 0 and not is_expanded(x))
                for i, (name, x) in enumerate(named.items())
            }
        tensors = {None: None, **own, **copies}
        made.append(clone(recipe, states, tensors, OF_REPLICAS).modules[0])
    return made


class Names(NamedTuple):
    """What the log of `transfers` calls the tensors of a module."""

    names: Sequence[str]

    def path(self, index: int, /) -> str:
        """The name of a tensor."""
        return f"module.{self.names[index]}"


def check_placement(tensors: Iterable[Tensor], source: torch.device) -> None:
    """Raise for a tensor that is elsewhere; the message is torch's."""
    for tensor in tensors:
        if tensor.device != source:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {source} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}"
            )
