"""Scatter and gather: a tree split over slots, and its inverse."""

from collections.abc import Sequence

from fdp._placement.common_rows import partition_of_tree
from fdp._placement.devices import as_device, as_devices
from fdp._placement.leaves import place
from fdp._placement.partition import check_weights
from fdp._placement.peers import Joined, peers_of
from fdp._placement.sharded import Sharded, Slots
from fdp._trees.prefix import named_spec
from fdp._trees.profiling import stage
from fdp._trees.types import AUTO, Auto, DeviceLike, Devices, Dims, Tree


def scatter(
    tree: Tree,
    devices: Devices,
    in_dims: Dims = 0,
    *,
    weights: Sequence[float] | None = None,
    keep_empty: bool = False,
) -> Sharded:
    """Split the tensors of a tree by rows, a shard per slot.

    Inverse of `gather`: `gather(scatter(tree, devices)) == tree`.

    >>> import fdp, torch
    >>> fdp.scatter(torch.arange(5), fdp.virtual_devices(2)).shards
    (tensor([0, 1, 2]), tensor([3, 4]))

    Args:
        tree: Any tree. Tensors of at least one dimension are split; 0-dim tensors and other values go whole to every
            slot.
        devices: One device per slot.
        in_dims: A prefix tree of `tree`: an int (the dimension to split), None (whole to every slot), `"items"` (split
            a list or tuple by its elements) or a function of the tensor that returns one of these.
        weights: Relative rows of each slot, one number per slot. By default sizes differ by at most one, larger first.
        keep_empty: Give slots without rows an empty shard; by default they are left out.

    Returns:
        The shards. On a device where a tensor already is they are views.

    Raises:
        ValueError: Rows disagree, a dim is out of range, `in_dims` is not a prefix, a list has a plain value for each
            row and no spec that says what it is, or a device does not exist.
        TypeError: A numpy array under an int, or an object that holds tensors but is no tree.
    """
    peers = peers_of(devices)
    peers.check("scatter")
    slots = as_devices(devices, "scatter")
    if isinstance(tree, Slots):
        raise TypeError(f"scatter: the tree is a {type(tree).__name__} already")
    flat, partition = partition_of_tree(tree, "tree", in_dims, slots, weights, "scatter", keep_empty=keep_empty)
    with stage("scatter"):
        shards = place(flat, partition)
    dims = named_spec(flat.structure, flat.specs)
    return Sharded(tuple(shards), partition.devices, partition.sizes, dims, peers=peers)


def gather(
    sharded: Slots,
    out_dims: Dims | Auto = AUTO,
    *,
    device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    across: bool = False,
) -> Tree:
    """Join the shards of all slots into one tree.

    On a mesh, reductions and None are those of all processes; the rest is joined in each process, or `across` all.

    Inverse of `scatter`: `gather(scatter(tree, devices)) == tree`.

    >>> import fdp, torch
    >>> sharded = fdp.scatter(torch.arange(5.0), fdp.virtual_devices(2))
    >>> fdp.gather(sharded)
    tensor([0., 1., 2., 3., 4.])
    >>> fdp.gather(sharded.map(torch.mean), "mean", weights=sharded.sizes)
    tensor(2.)

    Args:
        sharded: What `scatter` or `parallel_apply` returned.
        out_dims: A prefix tree of one shard: an int (concatenate), None (slot 0's value), `"mean"` (weighted by rows),
            `"sum"`, `"max"`, `"min"`, `"stack"` (a new first dimension), `"list"` (all values), `"items"` (join lists)
            or a function of slot 0's tensor that returns one of these. By default as it was scattered.
        device: Where the result goes, by default the device of slot 0.
        weights: One number per slot for `"mean"`, by default the rows of each slot.
        across: On a mesh, join the rows, lists and stacks of all processes too, in their order; without gradients.

    Returns:
        One tree. Values that are no tensors must be equal on all slots and are returned once.

    Raises:
        ValueError: No dims are known, or structures, shapes, dtypes or values that are no tensors differ.
    """
    if not isinstance(sharded, Slots):
        raise TypeError(f"gather: expected a Sharded, as fdp.scatter makes it, got {type(sharded).__name__}")
    with sharded.peers.begins("gather"):
        dims = sharded.dims if out_dims is AUTO else out_dims
        if dims is AUTO:
            raise ValueError("gather: these shards carry no dims; pass out_dims, e.g. 0 to concatenate or 'mean'")
        # No rows at all are none to average, but may be concatenated.
        own = sharded.sizes
        shares = own if weights is None else check_weights(weights, len(sharded), "gather", whole=False)
        target = sharded.devices[0] if device is None else as_device(device, "gather")
        out = Joined(sharded.shards, dims, shares, "shard")
        return sharded.peers.gather(out, target, across=across)
