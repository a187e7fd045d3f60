"""What a call will do, before anything runs: the same code, on tensors that have no data."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, final

import torch

from fdp._apply import dp_apply
from fdp._call import Arg, keyword_args, positional_args
from fdp._context import current_slot, text_of
from fdp._dims import Plan as Shares
from fdp._place import flatten_args, plan_args
from fdp._plan import Plan, PlannedLeaf
from fdp._processes import processes_of
from fdp._slots import Sharded, Slots
from fdp._transfers import COLLECTIVES, Collective, Transfer, nbytes_of, transfers
from fdp._tree import Flat, flatten, leaves_up_to, tensors_in, tree_map
from fdp._typing import AUTO, Auto, DeviceLike, Devices, Dims, Executor, Function, Tree


def explain(
    fn: Function,
    params: Tree,
    inputs: Tree,
    devices: Devices = None,
    *,
    kwargs: Mapping[str, Tree] | None = None,
    in_dims: Dims = 0,
    kwarg_dims: Dims = 0,
    out_dims: Dims | Auto = AUTO,
    output_device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    axis_name: str = "data",
) -> Plan:
    """Say what `dp_apply` with the same arguments would do: what is split, what is copied, what comes out.

    Nothing is computed and nothing moves: `fn` is called once a slot, with tensors that have a shape, a dtype and a
    device, and no data (torch's fake tensors). The devices need not exist.

    `explain(fn, ...).copies` is what `transfers()` counts in `dp_apply(fn, ...)`.

    >>> import fdp, torch
    >>> def predict(w, x):
    ...     return x @ w
    >>> plan = fdp.explain(predict, torch.ones(3, 2), torch.ones(7, 3), ["cuda:0", "cuda:1"])
    >>> plan.sizes
    (4, 3)
    >>> [(copy.path, copy.nbytes, str(copy.target)) for copy in plan.copies]
    [('params', 24, 'cuda:0'), ('params', 24, 'cuda:1'),
     ('inputs', 48, 'cuda:0'), ('inputs', 36, 'cuda:1'), ('out', 24, 'cuda:0')]

    Args:
        fn, params, inputs, devices: As in `dp_apply`.
        kwargs, in_dims, kwarg_dims, out_dims, output_device, weights, executor, seed, axis_name: As in `dp_apply`.

    Returns:
        The plan; it prints itself. Where `fn` depends on values (`x.item()`, `if x.sum() > 0`), or fails, `outputs` is
        None, `problem` says why, and what else there is holds for the arguments.

    Raises:
        ValueError, TypeError, RuntimeError: What `dp_apply` would raise for these arguments, or for outputs that
            cannot be joined; a mesh, or a transform of torch.func around the call.
    """
    options = {
        "in_dims": in_dims,
        "kwarg_dims": kwarg_dims,
        "out_dims": getattr(fn, "out_dims", 0) if out_dims is AUTO else out_dims,
        "output_device": output_device,
        "weights": weights,
        "executor": executor,
        "seed": seed,
        "axis_name": axis_name,
    }
    _check(devices, params, inputs, kwargs)
    with _Fakes() as fakes, transfers() as log:
        flats = _flats(params, inputs, {} if kwargs is None else kwargs, in_dims, kwarg_dims)
        slots, shares = plan_args(flats, devices, weights, "explain")
        fakes.has_graph = _has_autograd(slots)
        dry, problem, joined, collectives = _Dry(fn, log), None, None, list[Collective]()
        token = COLLECTIVES.set(collectives)
        try:
            with contextlib.nullcontext() if fakes.has_graph else torch.no_grad():
                kwargs = None if kwargs is None else {name: fakes.of(value) for name, value in kwargs.items()}
                joined = dp_apply(dry, fakes.of(params), fakes.of(inputs), devices, kwargs=kwargs, **options)
        except Exception as error:
            if not dry.has_failed and not isinstance(error, fakes.unknown):
                raise
            known = "the function depends on values" if isinstance(error, fakes.unknown) else type(error).__name__
            problem = f"{known}: {text_of(error)}"
            del log[dry.before :], collectives[:]
        finally:
            COLLECTIVES.reset(token)
    copies = _sized(log, flats)
    arguments = tuple(leaf for flat in flats for leaf in _arguments(flat, shares, copies))
    outputs = None if problem is not None else tuple(_outputs(dry.results, joined, options["out_dims"], copies))
    return Plan(shares.devices, shares.sizes, arguments, outputs, tuple(collectives), copies, problem)


def _check(devices: Devices, *trees: Tree) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("explain: inside a transform of torch.func. Explain the call outside of it")
    held = [leaf for tree in trees for leaf in flatten(tree, "tree", where="explain").leaves if isinstance(leaf, Slots)]
    if processes_of(devices, "explain") is not None or any(slots.processes is not None for slots in held):
        raise ValueError(
            "explain: a mesh of several processes, which would have to talk. devices=mesh.devices, and shards that are "
            "not on the mesh, explain the part of this process"
        )


def _flats(params: Tree, inputs: Tree, kwargs: Mapping[str, Tree], in_dims: Dims, kwarg_dims: Dims) -> list[Flat]:
    if type(inputs) is tuple:
        args = positional_args(inputs, in_dims, "inputs", "explain")
    else:
        args = [Arg("inputs", inputs, in_dims)]
    named = keyword_args(kwargs, kwarg_dims, "explain")
    return flatten_args([Arg("params", params, None), *args, *named.values()], "explain")


def _has_autograd(slots: Sequence[torch.device]) -> bool:
    """Whether torch can build graphs here for tensors that claim to be on these devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {"cpu", "meta"} | (set() if accelerator is None else {accelerator.type})
    return all(device.type in here for device in slots)


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _nothing(record: logging.LogRecord) -> bool:
    return False


@final
class _Fakes:
    """Tensors without data in place of real ones, and where these are used."""

    def __init__(self) -> None:
        from torch._subclasses import fake_tensor

        # No fallback kernels: they compute with zeros, and what depends on values would come out wrong.
        self._mode = fake_tensor.FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._memo: dict[torch.Tensor, torch.Tensor] = {}  # tensors are keys by identity
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


@final
class _Dry:
    """The function, with what it returns in each slot kept, and where the log stood when it was first called."""

    def __init__(self, fn: Function, log: list[Transfer]) -> None:
        self._fn, self._log = fn, log
        self.before, self.has_failed = len(log), False
        self.results: dict[int, Tree] = {}

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        slot = current_slot()
        if not self.results and not self.has_failed:
            self.before = len(self._log)
        try:
            result = self._fn(*args, **kwargs)
        except Exception:
            self.has_failed = True
            raise
        if slot is not None:
            self.results[slot.index] = result
        return result


# ---- the leaves


def _sized(log: Sequence[Transfer], flats: Sequence[Flat]) -> tuple[Transfer, ...]:
    """The copies, with the bytes of sparse arguments, which a tensor without data does not have."""
    real = {
        flat.path(i): nbytes_of(leaf)
        for flat in flats
        for i, leaf in enumerate(flat.leaves)
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided
    }
    return tuple(copy._replace(nbytes=real.get(copy.path, copy.nbytes)) for copy in log)


def _arguments(flat: Flat, shares: Shares, copies: Sequence[Transfer]) -> Iterator[PlannedLeaf]:
    for i, (leaf, spec) in enumerate(zip(flat.leaves, flat.specs, strict=True)):
        path = flat.path(i)
        if isinstance(leaf, Slots):
            yield from _held(leaf, path, spec, shares)
        elif not isinstance(leaf, torch.Tensor) and spec != "items":
            yield PlannedLeaf(path, None, None, "by reference", None, (0,) * len(shares.slots), 0, 0)
        else:
            split = shares.sizes if spec is not None else None
            how = "whole" if split is None else "split by items" if spec == "items" else f"split along dim {spec}"
            yield _planned(path, leaf, how, split, _parts(leaf, spec, shares), copies)


def _parts(leaf: Any, spec: Any, shares: Shares) -> list[int]:
    """The bytes that each shard has of a leaf."""
    ranges = [shares.rows(i) for i in range(len(shares.slots))]
    if spec == "items":
        return [_nbytes(leaf if rows is None else leaf[rows.start : rows.stop]) for rows in ranges]
    whole = nbytes_of(leaf)
    if spec is None or shares.sizes is None:
        return [whole] * len(shares.slots)
    return [whole * size // max(1, leaf.shape[spec]) for size in shares.sizes]


def _held(slots: Slots, path: str, spec: Any, shares: Shares) -> Iterator[PlannedLeaf]:
    """The leaves of what is on its slots already."""
    shards = [slots.shards[slot] for slot in shares.slots]
    how = f"there, as a {type(slots).__name__}"
    rows = shares.sizes if isinstance(slots, Sharded) and spec is not None else None
    for leaf, *others in zip(*(_leaves(shard, path) for shard in shards), strict=True):
        values = [value for _, value in (leaf, *others)]
        yield _planned(leaf[0], values[0], how, rows, [_nbytes(value) for value in values], (), whole=rows is None)


def _outputs(
    results: Mapping[int, Tree], joined: Tree, dims: Dims, copies: Sequence[Transfer]
) -> Iterator[PlannedLeaf]:
    shards = [results[index] for index in sorted(results)]
    flats = [flatten(shard, "out", dims, "out_dims", "explain") for shard in shards]
    for i, (whole, spec) in enumerate(zip(leaves_up_to(flats[0].structure, joined), flats[0].specs, strict=True)):
        values = [flat.leaves[i] for flat in flats]
        spec = (spec(values[0]) if isinstance(values[0], torch.Tensor) else 0) if callable(spec) else spec
        is_tensor = isinstance(values[0], torch.Tensor)
        rows = tuple(value.shape[spec] for value in values) if is_tensor and type(spec) is int else None
        how = (
            _JOINED.get(spec, f"concatenated along dim {spec}")
            if is_tensor or spec in ("list", "items")
            else "one for all"
        )
        yield _planned(flats[0].path(i), whole, how, rows, [_nbytes(value) for value in values], copies)


_JOINED = {
    None: "that of slot 0",
    "items": "lists joined",
    "mean": "mean by rows",
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "stack": "stacked",
    "list": "a list",
}


def _planned(
    path: str,
    leaf: Any,
    how: str,
    rows: tuple[int, ...] | None,
    nbytes: Sequence[int],
    copies: Sequence[Transfer],
    *,
    whole: bool = True,
) -> PlannedLeaf:
    mine = [copy.nbytes for copy in copies if copy.path == path or copy.path.startswith((f"{path}[", f"{path}."))]
    shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) and whole else None
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else None
    return PlannedLeaf(path, dtype, shape, how, rows, tuple(nbytes), len(mine), sum(mine))


def _leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    flat = flatten(tree, name)
    return [(flat.path(i), leaf) for i, leaf in enumerate(flat.leaves)]


def _nbytes(tree: Tree) -> int:
    return sum(map(nbytes_of, tensors_in(tree)))
