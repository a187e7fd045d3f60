"""All Hypothesis strategies: slots, rows, tensors, trees with the dims they are split along, and whole calls."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import fdp
from property_tests.functions import features, row_wise, sines, summary, value_and_grads
from property_tests.places import ACCELERATOR, CPU, PLACES, moved
from tests.common.containers import KINDS
from tests.common.hard_trees import OTHERS, integers_whole, last

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool)
EXACT = (torch.float64, torch.complex128)


# ---- calls


def slot_counts(at_most: int = 8) -> st.SearchStrategy[int]:
    """How many slots: 1 to 8."""
    return st.sampled_from(range(1, at_most + 1))


def row_counts(slots: int, at_least: int = 0) -> st.SearchStrategy[int]:
    """Rows around the number of slots: n, n ± 1, 5n ± 1, 1, 0."""
    counts = (slots, slots + 1, slots - 1, 5 * slots + 1, 5 * slots - 1, 1, 0)
    return st.sampled_from([count for count in counts if count >= at_least])


def executors() -> st.SearchStrategy[Any]:
    """Every executor."""
    return st.sampled_from(["sequential", "threads", "auto"])


def devices(slots: int) -> st.SearchStrategy[Any]:
    """That many slots, spelled in all ways."""
    names: list[Any] = ["cpu", torch.device("cpu"), "cpu:0"]
    if ACCELERATOR:
        names = [*PLACES, *map(str, PLACES), *(place.index for place in PLACES), *names[:1]]
    one = st.sampled_from(names)
    several = st.lists(one, min_size=slots, max_size=slots)
    choices = [several, several.map(tuple)]
    if slots == 1:
        choices.append(one.filter(lambda place: not isinstance(place, int)))
    return st.one_of(*choices)


def sources() -> st.SearchStrategy[torch.device]:
    """A device that arguments may be on: any."""
    return st.sampled_from(list(dict.fromkeys([CPU, *PLACES])))


def weights(slots: int) -> st.SearchStrategy[Any]:
    """Relative rows of each slot: whole and broken numbers, very different ones, zeros, but not only zeros."""
    number = st.one_of(
        st.integers(0, 4),
        st.floats(0, 3, allow_subnormal=False),
        st.sampled_from([0, 1e-300, 1e300, 1 / 3]),
    )
    return st.lists(number, min_size=slots, max_size=slots).filter(lambda numbers: sum(numbers) > 0)


class Split(NamedTuple):
    """How a batch is split in a call."""

    slots: int
    rows: int
    devices: Any
    weights: Any
    executor: Any
    source: torch.device  # where arguments are, if a test moves them

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"devices": self.devices, "weights": self.weights, "executor": self.executor}


@st.composite
def splits(draw: st.DrawFn, at_least: int = 0, *, most_slots: int = 8) -> Split:
    """Slots, rows, devices, weights and executor of a call."""
    count = draw(slot_counts(most_slots))
    rows = draw(row_counts(count, at_least))
    shares = draw(st.one_of(st.none(), weights(count)))
    return Split(count, rows, draw(devices(count)), shares, draw(executors()), draw(sources()))


# ---- tensors


@st.composite
def tensors(
    draw: st.DrawFn,
    rows: int,
    dim: int | None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    scalars: bool = True,
    special: bool = False,
    states: Sequence[str] = ("plain", "grad", "parameter", "result"),
) -> torch.Tensor:
    """Tensors of every dtype and memory layout, with `rows` along `dim`; some 0-dim, some with sizes of zero.

    `special` adds NaN, infinity and -0. Of floating dtypes some require grad: as leaves, as parameters, as results.
    """
    dtype = draw(st.sampled_from(dtypes))
    least = 0 if dim is None else dim + 1 if dim >= 0 else -dim
    shape = draw(st.lists(st.sampled_from([2, 1, 3, 0]), min_size=least, max_size=max(least, 3)))
    if dim is not None and shape:
        shape[dim] = rows
    if dim is not None and scalars and draw(st.integers(0, 7)) == 7:
        shape = []
    tensor = _laid_out(draw, _values(draw(st.integers(0, 9)), shape, dtype, special=special))
    if dtype not in FLOATS:
        return tensor
    match draw(st.sampled_from(states)):
        case "grad":
            return tensor.requires_grad_()
        case "parameter":
            return torch.nn.Parameter(tensor)
        case "result":
            return tensor.requires_grad_() * 1
        case "inference":
            with torch.inference_mode():
                return tensor.clone()
    return tensor


def _values(seed: int, shape: Sequence[int], dtype: torch.dtype, *, special: bool = False) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    if not dtype.is_floating_point and not dtype.is_complex:
        return ((7 * numbers + seed) % (2 if dtype is torch.bool else 100)).to(dtype).reshape(shape)
    values = 2 * torch.sin(1 + 1.37 * numbers + seed)
    if dtype.is_complex:
        values = torch.complex(values, torch.cos(numbers * seed))
    if special:
        odd = torch.tensor([float("nan"), float("inf"), -0.0], dtype=values.dtype)
        values[: min(3, len(values))] = odd[: len(values)]
    return values.to(dtype).reshape(shape)


def _laid_out(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    layouts = ["contiguous", "transposed", "strided", "offset", "expanded"] + ["conjugate"] * tensor.is_complex()
    layout = draw(st.sampled_from(layouts))
    if layout == "conjugate":
        return tensor.conj()
    if tensor.ndim == 0 or layout == "contiguous":
        return tensor
    order = tuple(reversed(range(tensor.ndim)))
    match layout:
        case "transposed":
            return tensor.permute(order).contiguous().permute(order)
        case "strided":
            return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
        case "offset":
            return torch.stack([tensor, tensor])[1]
    axis = draw(st.integers(0, tensor.ndim - 1))
    return tensor.narrow(axis, 0, 1).expand(tensor.shape) if tensor.shape[axis] else tensor


# ---- trees


class Batch(NamedTuple):
    """A tree with its in_dims, and for each tensor, depth first, the dimension that is split (None: none)."""

    tree: Any
    dims: Any
    tensor_dims: list[int | None]


@st.composite
def batches(draw: st.DrawFn, rows: int, **options: Any) -> Batch:
    """Trees of all containers and leaves, with in_dims as a leaf, a prefix tree, a function, "items", or by names.

    Options: `dtypes`, `special` and `states` as for `tensors`; `others`, the leaves that are no tensors; `items`
    False leaves out "items"; `whole` False splits every tensor; `scalars` False leaves out 0-dim tensors where tensors
    are split; `functions` False leaves out functions as dims.
    """
    grower = _Grower(draw, rows, **options)
    tree, dims = grower.open(3)
    return Batch(tree, dims, grower.tensor_dims)


@st.composite
def parameters(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = EXACT, **options: Any) -> Any:
    """Trees of floating-point tensors, none of them split."""
    return _Grower(draw, 0, dtypes=dtypes, others=(), **options).below(None, 3)


class _Grower:
    """Grows a tree, depth first."""

    def __init__(
        self,
        draw: st.DrawFn,
        rows: int,
        *,
        dtypes: Sequence[torch.dtype] = DTYPES,
        special: bool = False,
        states: Sequence[str] = ("plain", "grad", "parameter", "result"),
        others: Sequence[Any] = OTHERS,
        items: bool = True,
        whole: bool = True,
        scalars: bool = True,
        functions: bool = True,
    ) -> None:
        self.draw, self.rows, self.others = draw, rows, others
        self.tensor_options = {"dtypes": dtypes, "special": special, "states": states, "scalars": whole and scalars}
        specs: list[Any] = [0, 1, -1, -2]
        specs += [None] * whole + [last] * functions + [integers_whole] * (functions and whole) + ["items"] * items
        self.specs = specs
        self.tensor_dims: list[int | None] = []
        self.pool: list[tuple[torch.Tensor, Any, int | None]] = []

    def open(self, depth: int) -> tuple[Any, Any]:
        """A tree and its in_dims."""
        if depth == 0 or self.draw(st.integers(0, 3)) == 0:
            spec = self.draw(st.sampled_from(self.specs))
            if spec == "items":
                return self._items(), spec
            return self.below(spec, depth), spec
        kind, arity = self._kind()
        parts = [self.open(depth - 1) for _ in range(arity)]
        return KINDS[kind].make([tree for tree, _ in parts]), self._spec(kind, [spec for _, spec in parts])

    def below(self, spec: Any, depth: int) -> Any:
        """A tree all under one leaf of in_dims."""
        if depth == 0 or self.draw(st.booleans()):
            return self._leaf(spec)
        kind, arity = self._kind()
        return KINDS[kind].make([self.below(spec, depth - 1) for _ in range(arity)])

    def _kind(self) -> tuple[type, int]:
        kind = self.draw(st.sampled_from(list(KINDS)))
        return kind, self.draw(st.sampled_from(KINDS[kind].arities))

    def _spec(self, kind: type, specs: list[Any]) -> Any:
        """The same container of specs, or a dict of names with those left out that are 0, or a tuple."""
        ways: list[Callable[[], Any]] = [lambda: KINDS[kind].make(specs)]
        if names := KINDS[kind].names:
            ways.append(lambda: {name: spec for name, spec in zip(names, specs, strict=True) if spec != 0})
        if kind is not tuple and not issubclass(kind, list | dict | deque):
            ways.append(lambda: tuple(specs))
        return self.draw(st.sampled_from(ways))()

    def _items(self) -> Any:
        elements = [self.below(None, 1) for _ in range(self.rows)]
        return self.draw(st.sampled_from([list, tuple]))(elements)

    def _leaf(self, spec: Any) -> Any:
        choice = self.draw(st.integers(0, 9))
        if choice == 9:
            return None
        if choice == 8 and self.others:
            return self.draw(st.sampled_from(self.others))
        fitting = [(tensor, dim) for tensor, own, dim in self.pool if own is spec or own == spec]
        if choice >= 6 and fitting:
            tensor, dim = self.draw(st.sampled_from(fitting))
        else:
            tensor, dim = self._tensor(spec)
            self.pool.append((tensor, spec, dim))
        self.tensor_dims.append(dim)
        return tensor

    def _tensor(self, spec: Any) -> tuple[torch.Tensor, int | None]:
        dim = -1 if spec is last else 0 if spec is integers_whole else spec
        tensor = self.draw(tensors(self.rows, dim, **self.tensor_options))
        if tensor.ndim == 0 or (spec is integers_whole and integers_whole(tensor) is None):
            dim = None
        return tensor, dim


# ---- whole calls


class Case(NamedTuple):
    """A row-wise function, its arguments, and how the call is split."""

    split: Split
    function: Callable[..., Any]
    out_dims: Any
    params: Any
    inputs: tuple[Any, ...]
    in_dims: tuple[Any, ...]
    kwargs: dict[str, Any]
    kwarg_dims: Any

    def run(self, **options: Any) -> Any:
        """The function on several slots."""
        dims = {"in_dims": self.in_dims, "kwarg_dims": self.kwarg_dims, "out_dims": self.out_dims}
        options = self.split.options | dims | options
        params, inputs, kwargs = moved((self.params, self.inputs, self.kwargs), self.split.source)
        return fdp.dp_apply(self.function, params, inputs, kwargs=kwargs, **options)

    def oracle(self) -> Any:
        """The function on one device."""
        return self.function(self.params, *self.inputs, **self.kwargs)


@st.composite
def cases(draw: st.DrawFn, dtypes: Any = DTYPES, *, extremes: bool = True) -> Case:
    """Row-wise functions that return rows along several dims, reductions over rows, an input, and no tensors."""
    split = draw(splits())
    batch = draw(batches(split.rows, dtypes=dtypes, items=False))
    kept = draw(batches(split.rows, dtypes=dtypes, whole=False, functions=False))
    apply = row_wise(batch.tensor_dims)
    reductions = ["sum", "mean"] if split.rows else ["sum"]  # of no rows there is no mean
    reductions += ["amax", "amin"] if split.rows and extremes else []

    def function(params: Any, x: torch.Tensor, tree: Any, *, kept: Any, name: str) -> Any:
        y = apply(params, x, tree)
        rows = {"rows": y, "turned": y.mT, "kept": kept}
        whole = {"params": summary(params), "name": name, "none": None, "integer": torch.tensor(7)}
        return rows, whole, {reduction: getattr(y, reduction)(0) for reduction in reductions}

    out_dims: Any = (
        {"rows": draw(st.sampled_from([0, -2])), "turned": draw(st.sampled_from([1, -1])), "kept": kept.dims},
        {"params": None, "name": 0, "none": None, "integer": "mean"},
        {reduction: reduction.removeprefix("a") for reduction in reductions},
    )
    if draw(st.booleans()):
        setattr(function, "out_dims", out_dims)  # noqa: B010 (functions have no such attribute, as types go)
        out_dims = fdp.AUTO
    dim = draw(st.sampled_from([0, -2]))
    inputs = (sines(split.rows, 3), batch.tree)
    kwargs = {"kept": kept.tree, "name": "text"}
    return Case(split, function, out_dims, draw(parameters()), inputs, (dim, batch.dims), kwargs, {"kept": kept.dims})


class Problem(NamedTuple):
    """A loss that is a mean over rows, its arguments, and how the call is split."""

    split: Split
    row_losses: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    in_dims: tuple[Any, ...]
    argnums: Any
    microbatches: int

    @property
    def positions(self) -> tuple[int, ...]:
        """The arguments that are differentiated in."""
        return self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)

    def transformed(self, transform: Callable[..., Any], loss: Callable[..., Any], **options: Any) -> Any:
        """One of fdp's gradient functions of a loss, called."""
        options = self.split.options | {"in_dims": self.in_dims, "microbatches": self.microbatches} | options
        return transform(loss, self.argnums, **options)(*moved(self.args, self.split.source))

    def oracle(self, loss: Callable[..., Any]) -> tuple[Any, Any]:
        """What the loss returns and its gradients on one device."""
        out, grads = value_and_grads(loss, self.args, self.positions)
        return out, tuple(grads) if isinstance(self.argnums, tuple) else grads[0]


@st.composite
def problems(draw: st.DrawFn, at_least: int = 1, argnums: Sequence[Any] = (0, -3, (0,), (0, 1), (2, 0), 2)) -> Problem:
    """Losses of parameters (some of them unused), a matrix, and any tree of floating-point tensors."""
    split = draw(splits(at_least))
    states = ["plain", "parameter"]
    batch = draw(batches(split.rows, dtypes=EXACT, others=(), items=False, states=states))
    params = {"used": draw(parameters(states=states)), "unused": draw(parameters(states=states))}

    def row_losses(params: Any, x: torch.Tensor, tree: Any) -> torch.Tensor:
        weight = torch.cos(summary(params["used"]) + torch.arange(3, device=x.device))
        x = x * weight + features(tree, batch.tensor_dims, x.device).unsqueeze(-1)
        return torch.sin(x).square().sum(1)  # (rows,)

    microbatches = draw(st.sampled_from([1, 2, 3, 50]))
    args = (params, sines(split.rows, 3), batch.tree)
    return Problem(split, row_losses, args, (None, 0, batch.dims), draw(st.sampled_from(argnums)), microbatches)
