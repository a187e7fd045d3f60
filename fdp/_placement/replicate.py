"""Replicate and unreplicate: the same tree on every slot. Its adjoint is the sum over slots."""

import torch

from fdp._placement.devices import as_devices
from fdp._placement.moves import to_device
from fdp._placement.peers import ALONE, Peers, peers_of
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import Slots
from fdp._trees.profiling import staged
from fdp._trees.tree import Flat, flatten
from fdp._trees.types import Devices, Tree


def replicate(tree: Tree, devices: Devices, *, copy: bool = True, check_values: bool = False) -> Replicated:
    """Put a tree on every slot.

    On a mesh of several processes the values are those of process 0, everywhere.

    `unreplicate(replicate(tree, devices)) == tree`; gradients of the copies add up in `tree`.

    >>> import fdp, torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> copies = fdp.replicate({"w": w}, fdp.virtual_devices(3))
    >>> sum(shard["w"].sum() for shard in copies.shards).backward()
    >>> w.grad
    tensor([3., 3.])

    Args:
        tree: Any tree; values that are no tensors are passed by reference.
        devices: One device per slot.
        copy: Give every slot storage of its own, to be written in place if you like. False reuses what is on the
            device already, and slots on one device share it.
        check_values: On a mesh, raise if the values of a process differ from those of process 0, in place of replacing
            them.

    Returns:
        One tree per slot. A tensor that stands in several places of the tree stays one tensor.

    Raises:
        ValueError: A device does not exist; with `check_values`, values differ.
        RuntimeError: On a mesh, the trees of the processes differ, and where.
        TypeError: An object that holds tensors but is no tree.
    """
    peers = peers_of(devices)
    with peers.begins("replicate"):
        slots = as_devices(devices, "replicate")
        flat = flatten(tree, "tree", where="replicate")
        _check_plain(tree, flat, "replicate")
        tree = peers.same_everywhere(tree, flat, check_values=check_values)
    return replicate_on(tree, slots, always=copy, name="tree", where="replicate", peers=peers)


@staged("replicate")
def replicate_on(
    tree: Tree, slots: tuple[torch.device, ...], *, always: bool, name: str, where: str, peers: Peers = ALONE
) -> Replicated:
    """`replicate` on devices that are checked; copies `always`, or only where a tensor is elsewhere."""
    flat = flatten(tree, name, where=where)
    _check_plain(tree, flat, where)
    shards = [to_device(tree, device, name, always=always) for device in slots]
    return Replicated(tuple(shards), slots, peers=peers)


def _check_plain(tree: Tree, flat: Flat, where: str) -> None:
    for i, leaf in enumerate(flat.leaves):
        if isinstance(leaf, Slots):
            what = "the tree" if leaf is tree else flat.path(i)
            raise TypeError(f"{where}: {what} is a {type(leaf).__name__} already")


def unreplicate(replicated: Replicated, *, slot: int = 0) -> Tree:
    """The tree of one slot, without a copy.

    >>> import fdp, torch
    >>> fdp.unreplicate(fdp.replicate(torch.ones(2), fdp.virtual_devices(3)))
    tensor([1., 1.])

    Args:
        replicated: What `replicate` returned.
        slot: Which slot's tree.

    Raises:
        TypeError: Not a `Replicated`.
        IndexError: There is no such slot.
    """
    if not isinstance(replicated, Replicated):
        hint = ". Of what parallel_apply returned, result[0] is that of slot 0" if isinstance(replicated, Slots) else ""
        raise TypeError(f"unreplicate: expected a Replicated, got {type(replicated).__name__}{hint}")
    return replicated[slot]
