"""Laws of DataParallel: it is the module on one device, and its plan is that of torch.chunk."""

import copy
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fdp
from property_tests.comparing import assert_close, assert_same
from property_tests.functions import sines, summary
from property_tests.places import CPU, moved, spread
from property_tests.strategies import batches, devices, executors, slot_counts, weights
from tests.common.containers import tensors_of


class RowWise(nn.Module):
    """Layers that treat rows alike, along any dimension of the input; `others` have a part in every row."""

    def __init__(self, dim: int, frozen: bool) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
        self.layers[3].requires_grad_(not frozen)
        self.tied = nn.Linear(4, 2)
        self.tied.weight = self.layers[3].weight  # pyright: ignore[reportAttributeAccessIssue]
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("shift", sines(4))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = sines(*parameter.shape) + i / 4

    def on(self, device: torch.device) -> "RowWise":
        """A copy of the module on a device."""
        module = copy.deepcopy(self).to(device)
        module.tied.weight = module.layers[3].weight  # pyright: ignore[reportAttributeAccessIssue] (it comes apart)
        return module

    def forward(self, x: torch.Tensor, others: Any = None, *, scale: Any = 1.0) -> dict[str, Any]:
        rows = x.movedim(self.dim, 0)  # (rows, 3)
        hidden = self.layers[:3](rows) + self.shift
        out = self.layers[3](hidden) + self.tied(hidden).cos() * scale
        if others is not None:
            out = out * others.movedim(self.dim, 0).sum(1, keepdim=True)
        return {"out": out.movedim(0, self.dim), "pair": [out.movedim(0, self.dim) ** 2, None], "name": "text"}


class Case(NamedTuple):
    """A module, how it is wrapped, and two batches of inputs."""

    module: RowWise
    shim: fdp.DataParallel[RowWise]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def oracle(self) -> RowWise:
        """The module on one device."""
        return self.module.on(CPU)


@st.composite
def wrapped(draw: st.DrawFn) -> Case:
    """Row-wise modules of any rows, slots, dim, weights and executor, with inputs that require gradients or not."""
    slots, rows, dim = draw(slot_counts()), draw(st.integers(0, 20)), draw(st.sampled_from([0, 1, -1, -2]))
    shares = draw(st.one_of(st.none(), weights(slots)))
    ids = draw(devices(slots))
    module = RowWise(dim, draw(st.booleans())).double().train(draw(st.booleans()))
    module = module.on(fdp.scatter(torch.zeros(1), ids).devices[0])
    shim = fdp.DataParallel(
        module,
        ids,
        dim=dim,
        weights=shares,
        executor=draw(executors()),
    )
    along = dim % 2
    x, others = sines(rows, 3).movedim(0, along), sines(rows, 2).cos().movedim(0, along)
    scale = draw(st.sampled_from([torch.tensor(2.0, dtype=torch.float64), 0.5]))
    args = draw(st.sampled_from([(x,), (x, others), (x, None)]))
    return Case(module, shim, args, {"scale": scale})


def value_and_grads(run: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    named = {k: a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
    out = run(*leaves, **named)
    wanted = [t for t in [*tensors_of((leaves, list(named.values()))), *module.parameters()] if t.requires_grad]
    return out, list(torch.autograd.grad(summary(moved(out)), wanted, allow_unused=True))


@given(wrapped())
def test_data_parallel_is_the_module(case: Case):
    module = case.oracle()
    want, want_grads = value_and_grads(module, module, case.args, case.kwargs)
    for _ in range(2):
        got, grads = value_and_grads(case.shim, case.module, case.args, case.kwargs)
        assert_close(got, want)
        assert [grad is None for grad in grads] == [grad is None for grad in want_grads]  # unused ones have none
        assert_close(grads, want_grads)


@given(wrapped(), st.sampled_from([torch.no_grad, torch.inference_mode]))
def test_data_parallel_is_the_module_without_gradients(case: Case, mode: Any):
    with mode():
        want = case.oracle()(*case.args, **case.kwargs)
        for _ in range(2):
            assert_close(case.shim(*case.args, **case.kwargs), want)


@given(wrapped(), st.integers(1, 7), st.booleans(), st.sampled_from([1.5, 1.0]))
def test_copies_follow_their_parameters(case: Case, which: int, versioned: bool, factor: float):
    """However a parameter is written between two calls, the second sees it."""
    with torch.no_grad():
        case.shim(*case.args, **case.kwargs)
        parameter = list(case.module.parameters())[which]
        (parameter if versioned else parameter.data).copy_(parameter.flip(0) * factor)
        assert_close(case.shim(*case.args, **case.kwargs), case.oracle()(*case.args, **case.kwargs))


@given(wrapped())
def test_the_function_is_the_class(case: Case):
    shim = fdp.DataParallel(case.module, list(case.shim.device_ids), dim=case.shim.dim)
    got = fdp.data_parallel(case.module, case.args, shim.device_ids, None, shim.dim, case.kwargs)
    assert_same(got, shim(*case.args, **case.kwargs))


@given(st.data())
def test_data_parallel_is_gather_of_parallel_apply(data: st.DataObject):
    case = data.draw(wrapped())
    ids, dim = list(case.shim.device_ids), case.shim.dim
    inputs, kwargs = fdp.nn.scatter_kwargs(case.args, case.kwargs, ids, dim)
    replicas = fdp.nn.replicate(case.module, ids[: len(inputs)])
    out = fdp.nn.gather(fdp.nn.parallel_apply(replicas, inputs, kwargs), "cpu", dim)
    assert_close(out, fdp.DataParallel(case.module, ids, dim=dim)(*case.args, **case.kwargs))


# ---- the plan


@given(slot_counts(), st.integers(0, 40), st.sampled_from([0, 1, -1]))
def test_the_plan_is_that_of_torch_chunk(slots: int, rows: int, dim: int):
    x = sines(rows, 2).movedim(0, dim)
    chunks = x.chunk(slots, dim)
    inputs, kwargs = fdp.nn.scatter_kwargs((x,), {"y": [x], "z": 3}, spread(slots), dim)
    assert_same([args[0] for args in inputs], list(chunks))
    assert_same(list(kwargs), [{"y": [chunk], "z": 3} for chunk in chunks])
    assert_same(fdp.nn.scatter(x, spread(slots), dim), tuple(chunks))


@given(st.data())
def test_gather_inverts_scatter(data: st.DataObject):
    slots, rows = data.draw(slot_counts()), data.draw(st.integers(0, 20))
    dim = data.draw(st.sampled_from([0, 1, -1, -2]))
    batch = data.draw(trees(rows, dim))
    parts = fdp.nn.scatter(batch, spread(slots), dim)
    assert len(parts) in (1, slots) or len(parts) == len(torch.arange(rows).chunk(slots))
    assert_same(fdp.nn.gather(parts, "cpu", dim), batch)


def trees(rows: int, dim: int) -> st.SearchStrategy[Any]:
    """Trees of tensors that are all split along one dim, and of leaves that are no tensors."""
    options = {"items": False, "whole": False, "functions": False, "scalars": False, "special": True}
    return batches(rows, **options).filter(lambda batch: set(batch.tensor_dims) <= {dim}).map(lambda batch: batch.tree)
