"""`explain`: what it says is what `dp_apply` does, and nothing is left of it (copies: tests/accelerator)."""

import io
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fdp
from fdp.distributed import init
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import Point, children_of, tensors_of
from tests.common.hard_trees import TREES
from tests.common.numbers import numbers
from tests.common.threads import many_cores

SLOTS = fdp.virtual_devices(3)
GPUS = [f"cuda:{i}" for i in range(3)]
anywhere = pytest.mark.parametrize("devices", [SLOTS, GPUS], ids=["cpu", "cuda"])


def linear(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def leaf(plan: fdp.Plan, path: str) -> fdp.PlannedLeaf:
    (found,) = [leaf for leaf in (*plan.arguments, *(plan.outputs or ())) if leaf.path == path]
    return found


# ---- arguments


@anywhere
def test_what_becomes_of_each_argument(devices: Any):
    params = {"w": numbers(3, 2), "scale": torch.tensor(2.0), "name": "model"}
    inputs = ({"x": numbers(7, 3), "y": numbers(3, 7).float()}, [numbers(i, 2) for i in range(7)], torch.tensor(1), 5)
    options: dict[str, Any] = {"in_dims": ({"x": 0, "y": -1}, "items", 0, 0), "kwargs": {"mask": numbers(2, 7)}}
    plan = fdp.explain(
        lambda params, batch, images, n, k, mask: batch["x"], params, inputs, devices, kwarg_dims={"mask": 1}, **options
    )
    assert plan.sizes == (3, 2, 2)
    assert plan.devices == tuple(map(torch.device, devices))
    assert [(leaf.path, leaf.dtype, leaf.shape, leaf.how, leaf.rows, leaf.nbytes) for leaf in plan.arguments] == [
        ("params['name']", None, None, "by reference", None, (0, 0, 0)),
        ("params['scale']", torch.float32, (), "whole", None, (4, 4, 4)),
        ("params['w']", torch.float64, (3, 2), "whole", None, (48, 48, 48)),
        ("inputs[0]['x']", torch.float64, (7, 3), "split along dim 0", (3, 2, 2), (72, 48, 48)),
        ("inputs[0]['y']", torch.float32, (3, 7), "split along dim -1", (3, 2, 2), (36, 24, 24)),
        ("inputs[1]", None, None, "split by items", (3, 2, 2), (48, 112, 176)),
        ("inputs[2]", torch.int64, (), "whole", None, (8, 8, 8)),
        ("inputs[3]", None, None, "by reference", None, (0, 0, 0)),
        ("kwargs['mask']", torch.float64, (2, 7), "split along dim 1", (3, 2, 2), (48, 32, 32)),
    ]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 16])
@pytest.mark.parametrize("tree", TREES)
def test_rows_and_bytes_are_those_of_scatter(tree: str, rows: int):
    batch, dims = TREES[tree].make(rows), TREES[tree].dims
    plan = fdp.explain(lambda params, tree: None, None, (batch,), SLOTS, in_dims=(dims,))
    shards = fdp.scatter(batch, SLOTS, dims)
    assert plan.sizes == shards.sizes
    assert len(plan.devices) == len(shards)
    for slot, shard in enumerate(shards.shards):
        assert sum(leaf.nbytes[slot] for leaf in plan.arguments) == sum(t.nbytes for t in tensors_of(shard))


@pytest.mark.parametrize("weights", [[1, 2, 3], [1, 0, 2], [0, 0, 1]], ids=str)
def test_weights(weights: list[float]):
    x = numbers(7, 3)
    plan = fdp.explain(linear, numbers(3, 2), x, GPUS, weights=weights)
    assert plan.sizes == fdp.scatter(x, SLOTS, weights=weights).sizes
    assert [str(device) for device in plan.devices] == [gpu for gpu, w in zip(GPUS, weights, strict=True) if w]


@anywhere
def test_zero_rows_are_one_slot(devices: Any):
    plan = fdp.explain(linear, numbers(3, 2), numbers(0, 3), devices)
    assert (plan.sizes, len(plan.devices)) == ((0,), 1)
    assert leaf(plan, "out").shape == (0, 2)
    assert "Plan: 0 rows on 1 slot\n" in str(plan)


@anywhere
def test_nothing_to_split_is_one_slot(devices: Any):
    plan = fdp.explain(lambda w, x: w * x, numbers(3), 2.0, devices)
    assert (plan.sizes, len(plan.devices)) == (None, 1)
    assert leaf(plan, "out").shape == (3,)
    assert str(plan).startswith("Plan: nothing to split: one slot\n")


def test_what_is_on_its_slots():
    params, batch = fdp.replicate({"w": numbers(3)}, SLOTS), fdp.scatter({"x": numbers(7, 3)}, SLOTS)
    plan = fdp.explain(lambda params, batch: batch["x"] * params["w"], params, batch)
    assert [(leaf.path, leaf.how, leaf.shape, leaf.rows, leaf.nbytes) for leaf in plan.arguments] == [
        ("params['w']", "there, as a Replicated", (3,), None, (24, 24, 24)),
        ("inputs['x']", "there, as a Sharded", None, (3, 2, 2), (72, 48, 48)),
    ]
    assert leaf(plan, "out").shape == (7, 3)


def test_tied_tensors_are_one_tensor_inside():
    w = numbers(3)
    same: list[bool] = []

    def fn(params: Point, x: Tensor) -> Tensor:
        same.append(params.x is params.y)
        return x

    fdp.explain(fn, Point(w, w), numbers(4, 3), SLOTS)
    assert same == [True] * 3


def test_params_of_autograd():
    w = nn.Parameter(numbers(3, 2))
    kinds: list[Any] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        kinds.append((isinstance(w, nn.Parameter), w.requires_grad))
        return torch.autograd.grad((x @ w).square().sum(), w)[0]

    plan = fdp.explain(fn, w, numbers(6, 3), SLOTS, out_dims="sum")
    assert kinds == [(True, True)] * 3
    assert leaf(plan, "out").shape == (3, 2)


# ---- outputs


def last_dim(_: Tensor) -> int:
    return -1


OUT: dict[str, tuple[Any, Any, str]] = {
    "0": (lambda x: x.float(), 0, "concatenated along dim 0"),
    "-1": (lambda x: x.T, -1, "concatenated along dim -1"),
    "none": (lambda x: x.sum(), None, "that of slot 0"),
    "mean": (lambda x: x.mean(0), "mean", "mean by rows"),
    "sum": (lambda x: x.sum(0).to(torch.complex64), "sum", "sum"),
    "max": (lambda x: x.amax(0), "max", "maximum"),
    "min": (lambda x: x.amin(0), "min", "minimum"),
    "stack": (lambda x: x.argmax(), "stack", "stacked"),
    "function": (lambda x: x.unsqueeze(0), lambda _: 1, "concatenated along dim 1"),
}


@anywhere
@pytest.mark.parametrize("case", OUT)
@pytest.mark.parametrize("rows", [1, 7])
def test_outputs_are_those_of_the_call(case: str, rows: int, devices: Any):
    make, dims, how = OUT[case]
    x = numbers(rows, 3)

    def fn(_: Any, x: Tensor) -> Any:
        return {"a": make(x), "b": (make(x), 3)}

    plan = fdp.explain(fn, None, x, devices, out_dims=dims)
    out = fdp.dp_apply(fn, None, x, SLOTS, out_dims=dims)
    assert plan.outputs is not None
    assert [leaf.path for leaf in plan.outputs] == ["out['a']", "out['b'][0]", "out['b'][1]"]
    for planned, real in zip(plan.outputs, [out["a"], out["b"][0]], strict=False):
        assert (planned.shape, planned.dtype, planned.how) == (tuple(real.shape), real.dtype, how)
        shards = [make(shard) for shard in fdp.scatter(x, SLOTS).shards]
        assert planned.nbytes == tuple(shard.nbytes for shard in shards)
        if case in ("0", "-1", "function"):
            assert planned.rows == fdp.scatter(x, SLOTS).sizes
    assert plan.outputs[2].how == "one for all"
    assert plan.outputs[2].dtype is None


@anywhere
def test_outputs_that_become_lists(devices: Any):
    def fn(_: Any, x: Tensor) -> Any:
        return x, list(x), len(x)

    plan = fdp.explain(fn, None, numbers(7, 3), devices, out_dims=("list", "items", "list"))
    assert plan.outputs is not None
    assert [(leaf.path, leaf.shape, leaf.how, leaf.nbytes) for leaf in plan.outputs] == [
        ("out[0]", None, "a list", (72, 48, 48)),
        ("out[1]", None, "lists joined", (72, 48, 48)),
        ("out[2]", None, "a list", (0, 0, 0)),
    ]


def test_dims_of_the_function():
    apply, state = fdp.functional(nn.BatchNorm1d(3))
    assert isinstance(apply.out_dims, tuple)
    plan = fdp.explain(apply, state, numbers(7, 3).float(), SLOTS)
    assert leaf(plan, "out[0]").how == "concatenated along dim 0"
    assert leaf(plan, "out[1]['running_mean']").how == "mean by rows"


def test_the_output_device():
    plan = fdp.explain(linear, numbers(3, 2), numbers(7, 3), GPUS, output_device="cpu")
    assert [str(copy.target) for copy in plan.copies if copy.path == "out"] == ["cpu"] * 3


# ---- collectives


@anywhere
def test_collectives_in_order(devices: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        total = fdp.psum({"a": x.sum(0), "b": x.sum()})
        everything = fdp.all_gather(x)
        return x + total["a"] + fdp.pmean(everything.mean(0).float(), weight="rows")

    plan = fdp.explain(fn, None, numbers(7, 3), devices)
    assert plan.problem is None
    assert [tuple(entry) for entry in plan.collectives] == [("psum", 2, 32), ("all_gather", 1, 72), ("pmean", 1, 12)]
    assert leaf(plan, "out").shape == (7, 3)


def test_what_an_inner_call_copies_is_not_counted_twice():
    """Inner arguments are called as outer ones are; those of the outer leaves are counted alone."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return fdp.dp_apply(linear, w, x, ["cpu", "meta"], output_device="cpu")

    plan = fdp.explain(fn, numbers(3, 2), numbers(8, 3), SLOTS[:2])
    assert len(plan.copies) == 6  # params, inputs and out in each of two calls
    assert plan.outputs is not None
    assert [leaf.copies for leaf in (*plan.arguments, *plan.outputs)] == [0, 0, 0]


# ---- what cannot be known


@anywhere
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: x * x.sum().item(),
        lambda w, x: x if x.sum() > 0 else -x,
        lambda w, x: x.masked_select(x > 0),
        lambda w, x: x.sum(0).tolist(),
        lambda w, x: x.sum().item(),
    ],
    ids=["item", "if", "mask", "tolist", "number"],
)
def test_functions_of_values(fn: Any, devices: Any):
    plan = fdp.explain(fn, numbers(3), numbers(7, 3), devices)
    assert plan.outputs is None
    assert plan.problem is not None
    assert plan.problem.startswith("the function depends on values: aten.")
    assert "(test_explain.py, line " in plan.problem
    assert plan.collectives == ()
    assert plan.sizes == (3, 2, 2)
    assert {copy.path for copy in plan.copies} == ({"params", "inputs"} if devices is GPUS else set())


@anywhere
def test_numpy(devices: Any):
    plan = fdp.explain(lambda w, x: torch.from_numpy(x.numpy() * 2), None, numbers(7, 3), devices)
    assert plan.problem is not None
    assert ".numpy() is not supported" in plan.problem


def test_no_zeros_are_computed_with_in_place_of_values():
    """There is a fallback in torch that does."""
    plan = fdp.explain(lambda w, x: torch.bincount(x), None, torch.tensor([1, 5, 2]), SLOTS[:2], out_dims="sum")
    assert plan.outputs is None


@anywhere
def test_a_function_that_raises(devices: Any, caplog: Any, capfd: Any):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        fdp.psum(x.sum())
        if fdp.axis_index() == 1:
            raise ValueError("no such model")
        return x

    text: Any = "1"
    with caplog.at_level(logging.DEBUG, "torch._subclasses.fake_tensor"):
        plan = fdp.explain(fn, numbers(3), numbers(7, 3), devices)
        mismatch = fdp.explain(lambda w, x: w @ x, numbers(3, 2), numbers(7, 3), devices)
        wrong = fdp.explain(lambda w, x: torch.add(x, text), numbers(3), numbers(7, 3), devices)
    assert plan.problem is not None
    assert plan.problem.startswith("ValueError: no such model (test_explain.py, line ")
    assert (plan.outputs, plan.collectives) == (None, ())
    assert "same reduction dim" in str(mismatch)
    assert (wrong.problem or "").startswith("TypeError: ")
    assert not [r for r in caplog.records if r.exc_info is not None]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_torch_says_what_it_has_to_say_afterwards():
    before = list(logging.getLogger("torch._subclasses.fake_tensor").filters)
    fdp.explain(linear, numbers(3, 2), numbers(7, 3), SLOTS)
    assert logging.getLogger("torch._subclasses.fake_tensor").filters == before


def test_gradients_on_devices_that_torch_knows_nothing_of_do_not_end_the_process():
    if torch.cuda.is_available():
        pytest.skip("there are such devices here")

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (x @ w).square().sum())(w)

    plan = fdp.explain(fn, numbers(3), numbers(7, 3), GPUS, out_dims="sum")
    assert "gradients, which cannot be explained on devices that are not here" in (plan.problem or "")
    assert fdp.explain(fn, numbers(3), numbers(7, 3), SLOTS, out_dims="sum").problem is None


# ---- errors


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (linear, {"in_dims": 5}, "dim 5 is out of range for inputs of shape"),
        (linear, {"in_dims": "rows"}, "the dim for inputs is 'rows'; expected an int"),
        (linear, {"out_dims": 5}, "out has shape .*, for which out_dim 5 is out of range"),
        (linear, {"out_dims": "median"}, "the out_dim for out is 'median'; expected an int"),
        (linear, {"weights": [1, 2]}, "2 weights for 3 slots; expected one a slot"),
        (linear, {"kwargs": {"m": 1}, "kwarg_dims": {"n": 0}}, r"kwarg_dims names \['n'\]"),
        (linear, {"output_device": "nowhere"}, "'nowhere' is no device that torch knows"),
        (linear, {"executor": "many"}, "executor"),
        (linear, {"seed": 1.5}, "seed"),
        (lambda w, x: {fdp.axis_index(): x}, {}, "shards differ in structure"),
        (lambda w, x: x.sum(), {}, "out"),
        (nn.Linear(3, 2), {}, "got the nn.Module Linear"),
        (3, {}, "expected a function, got int"),
        (lambda w, x: x.add_(1), {}, "the function wrote in place to inputs"),
        (lambda w, x: x + w.mul_(2).sum(), {}, "the function wrote in place to params"),
    ],
)
def test_messages_are_those_of_the_call(fn: Any, options: dict[str, Any], message: str):
    w, x = numbers(3, 2), numbers(7, 3)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as real:
        fdp.dp_apply(fn, w.clone(), x.clone(), SLOTS, **options)
    for devices in (SLOTS, GPUS):
        with unharmed(w, x), pytest.raises(type(real.value), match=message):
            fdp.explain(fn, w, x, devices, **options)


def test_rows_that_differ():
    with pytest.raises(ValueError, match=r"explain: rows differ: inputs\[0\] has 7 along dim 0, inputs\[1\] has 6"):
        fdp.explain(linear, None, (numbers(7), numbers(6)), GPUS)


def test_in_a_transform():
    def explained(x: Tensor) -> Tensor:
        fdp.explain(linear, numbers(3, 2), numbers(7, 3), SLOTS)
        return x.sum()

    for call in (torch.func.grad(explained), torch.func.vmap(explained)):
        with pytest.raises(
            RuntimeError, match=r"explain: inside a transform of torch\.func\. Explain the call outside"
        ):
            call(numbers(7, 3))


def test_a_mesh_of_one_process_is_its_devices():
    with init(devices=SLOTS) as mesh:
        plan = fdp.explain(linear, numbers(3, 2), numbers(7, 3), mesh)
        assert plan.sizes == (3, 2, 2)


# ---- modules


def modules() -> dict[str, tuple[nn.Module, Tensor, Any]]:
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))
    return {
        "norm": (norm, torch.randn(7, 3), None),
        "lstm": (nn.LSTM(3, 4, batch_first=True), torch.randn(5, 6, 3), ((0, (1, 1)), "mean")),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(5, 6, 8), None),
        "attention-eval": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(5, 6, 8), None),
        "convolution": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), torch.randn(4, 2, 5, 5), None),
    }


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("name", modules())
def test_a_module_is_as_before(name: str, executor: Any):
    """The call after `explain` gives the numbers of a call without it; parameters, buffers and random state stay."""
    torch.manual_seed(0)
    module, x, dims = modules()[name]
    options = {"executor": executor, "seed": 3} | ({} if dims is None else {"out_dims": dims})
    plain, state = fdp.functional(module)
    want = fdp.dp_apply(plain, state, x, SLOTS, **options)
    apply, _ = fdp.functional(module)
    values, random_state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    with unharmed(state, x), many_cores():
        for _ in range(2):
            plan = fdp.explain(apply, state, x, SLOTS, **options)
            assert plan.outputs is not None, plan.problem
            found = [(leaf.shape, leaf.dtype) for leaf in plan.outputs]
            assert found == [(tuple(t.shape), t.dtype) for t in sorted_of(want)]
            assert_same_tree(fdp.dp_apply(apply, state, x, SLOTS, **options), want)
    assert_same_tree(dict(module.state_dict()), values)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(isinstance(tensor, FakeTensor) for tensor in [*module.parameters(), *module.buffers()])


def sorted_of(tree: Any) -> list[Tensor]:
    """Tensors of a tree, dicts by their keys."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree) for tensor in sorted_of(tree[key])]
    return [tensor for child in children_of(tree) or [] for tensor in sorted_of(child)]


# ---- nothing is left


def test_random_numbers_are_not_drawn():
    generator = torch.Generator().manual_seed(1)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape) + torch.rand(x.shape, generator=generator) + torch.randperm(3)
        return nn.functional.dropout(x + noise) + torch.empty(3).uniform_() + torch.bernoulli(x)

    before = torch.get_rng_state(), generator.get_state(), random.getstate()
    for seed in (None, 3):
        assert fdp.explain(fn, None, torch.rand(7, 3), SLOTS, seed=seed).problem is None
        torch.set_rng_state(before[0]) if seed is None else None
        before = torch.get_rng_state(), *before[1:]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert random.getstate() == before[2]


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "rows": lambda held, w, x: held.add_(x.sum()),
    "number": lambda held, w, x: held.mul_(2),
    "fill": lambda held, w, x: held.fill_(7),
    "part": lambda held, w, x: held[0].add_(1),
    "copy": lambda held, w, x: held.copy_(x[0]),
    "out": lambda held, w, x: torch.add(x[0], 1, out=held),
    "history": lambda held, w, x: held.add_((x @ w).sum()),
    "data": lambda held, w, x: held.data.add_(1),
    "zero": lambda held, w, x: held.zero_(),
}


@pytest.mark.parametrize("shape", [(3,), ()], ids=["vector", "number"])
@pytest.mark.parametrize("write", WRITES)
def test_tensors_from_elsewhere_are_not_written_to(write: str, shape: tuple[int, ...]):
    held, w = numbers(*shape).clone(), numbers(3).requires_grad_()  # torch detaches no view in place
    if not shape and write in ("part", "copy", "out"):
        return

    def fn(w: Tensor, x: Tensor) -> Tensor:
        WRITES[write](held, w, x)
        return x

    with unharmed(held, w):
        plan = fdp.explain(fn, w, numbers(7, 3), SLOTS)
    assert plan.problem is None
    assert (held.requires_grad, held.grad_fn, type(held)) == (False, None, Tensor)


def test_gradients_of_tensors_from_elsewhere_are_not_there():
    held = numbers(3).requires_grad_()

    def fn(_: Any, x: Tensor) -> Tensor:
        (x @ held).sum().backward()
        return x

    assert fdp.explain(fn, None, numbers(7, 3), SLOTS).problem is None
    assert held.grad is None


def test_a_tensor_from_elsewhere_on_another_device_is_told():
    held = numbers(3)
    plan = fdp.explain(lambda w, x: x * held, None, numbers(7, 3), GPUS)
    assert "cuda:0" in (plan.problem or "")
    assert "cpu" in (plan.problem or "")


def test_compiled_functions_are_not_compiled_nor_run():
    """Their kernels would read data that is not there."""
    count: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        count.append(len(inputs))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda w, x: (x @ w).sin(), backend=backend)
    w, x = numbers(3, 2), numbers(7, 3)
    for _ in range(2):
        assert leaf(fdp.explain(compiled, w, x, SLOTS), "out").shape == (7, 2)
    assert count == []
    torch.testing.assert_close(compiled(w, x), (x @ w).sin())
    assert len(count) == 1
    assert fdp.explain(compiled, w, x, SLOTS).problem is None


def test_several_at_once():
    w, x, plans = numbers(3, 2), numbers(7, 3), list[fdp.Plan]()
    threads = [threading.Thread(target=lambda: plans.append(fdp.explain(linear, w, x, SLOTS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(plan) for plan in plans}) == 1
    assert len(plans) == 4


def test_open_logs_see_nothing():
    with fdp.transfers() as log:
        plan = fdp.explain(linear, numbers(3, 2), numbers(7, 3), GPUS)
        assert log == []
        fdp.scatter(numbers(2), ["meta"])
    assert len(plan.copies) == 8
    assert len(log) == 1


def test_the_functions_own_transforms_and_an_inner_explain():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        fdp.explain(linear, w, x, GPUS)
        return torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x)

    x, w = numbers(7, 3), numbers(3, 2)
    out = fdp.dp_apply(fn, w, x, SLOTS)
    plan = fdp.explain(lambda w, x: torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x), w, x, SLOTS)
    assert leaf(plan, "out").shape == tuple(out.shape)


# ---- how it looks


def test_text():
    plan = fdp.explain(lambda w, x: (x @ w, fdp.psum(x.sum())), numbers(3, 2), numbers(7, 3), GPUS, out_dims=(0, None))
    assert str(plan) == repr(plan) == TEXT.strip()


TEXT = """
Plan: 7 rows on 3 slots
slot   device   from:to   rows   bytes
──────────────────────────────────────
   0   cuda:0       0:3      3   120 B
   1   cuda:1       3:5      2    96 B
   2   cuda:2       5:7      2    96 B

Runs: all shards alive at once: they meet in psum

Arguments
leaf     tensor          how                 rows           bytes a slot      copies
────────────────────────────────────────────────────────────────────────────────────
params   float64[3, 2]   whole                                  3 x 48 B   3 (144 B)
inputs   float64[7, 3]   split along dim 0   3 + 2 x 2   72 B + 2 x 48 B   3 (168 B)

Outputs
leaf     tensor          how                        rows           bytes a slot     copies
──────────────────────────────────────────────────────────────────────────────────────────
out[0]   float64[7, 2]   concatenated along dim 0   3 + 2 x 2   48 B + 2 x 32 B   2 (64 B)
out[1]   float64[]       that of slot 0                                 3 x 8 B

Collectives
name   tensors   bytes a slot
─────────────────────────────
psum         1            8 B

Copies between devices: 12 (408 B)
"""


def long_plan() -> fdp.Plan:
    params = {"encoder.layers.11.self_attention.output_projection.weight": numbers(3, 2), "b": numbers(2)}
    return fdp.explain(lambda p, x: x, params, numbers(37, 3), [f"cuda:{i}" for i in range(8)])


def test_text_is_not_folded_and_has_no_escape_codes():
    text = str(long_plan())
    assert "\x1b" not in text
    assert "params['encoder.layers.11.self_attention.output_projection.weight']   float64[3, 2]" in text
    assert "…" not in text


def test_html():
    for html in (long_plan()._repr_html_(), fdp.scatter(numbers(3), SLOTS)._repr_html_()):
        assert html.startswith("<pre style=")
        assert html.endswith("</pre>")
        assert "<html" not in html
        assert "\x1b" not in html
    assert "output_projection.weight&#x27;]" in long_plan()._repr_html_()


# ---- what is left behind


def test_casts_made_meanwhile_are_forgotten():
    net, x = nn.Linear(3, 2), numbers(6, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert fdp.explain(lambda _, x: net(x), None, x, fdp.virtual_devices(2)).problem is None
        out = net(x)
    assert type(out) is Tensor
    out.float().sum().backward()
    assert net.weight.grad is not None
    assert type(net.weight.grad) is Tensor


def test_a_tensor_that_a_cache_keeps_is_an_error_when_it_is_used():
    cache: list[Tensor] = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        if not cache:
            cache.append(torch.ones(3))
        return x * w * cache[0]

    w, x = numbers(3), numbers(6, 3)
    assert fdp.explain(fn, w, x, fdp.virtual_devices(2)).problem is None
    with pytest.raises(RuntimeError, match=r"without data: fdp.explain has called .* Clear that, or make it anew"):
        fdp.dp_apply(fn, w, x, fdp.virtual_devices(2))
    cache.clear()
    assert_same_tree(fdp.dp_apply(fn, w, x, fdp.virtual_devices(2)), x * w)


@pytest.mark.parametrize(
    "convert", [nn.Module.double, nn.Module.half, lambda net: net.to("meta")], ids=["64", "16", "to"]
)
def test_a_module_that_the_function_converts_keeps_its_data(convert: Any):
    net = nn.Sequential(nn.Linear(3, 2), nn.LSTM(2, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plan = fdp.explain(lambda _, x: convert(net)[0](x), None, numbers(6, 3).float(), fdp.virtual_devices(2))
    assert plan.problem is not None
    assert "converts a" in plan.problem
    assert_same_tree(dict(net.state_dict()), before)
    net.double()  # as ever outside


def test_a_lazy_module_stays_lazy():
    net = nn.LazyLinear(2)
    plan = fdp.explain(lambda _, x: net(x), None, numbers(6, 3).float(), fdp.virtual_devices(2))
    assert plan.problem is not None
    assert "call it once before" in plan.problem
    assert net(numbers(6, 3).float()).shape == (6, 2)


def test_sparse_tensors_are_planned_where_they_are():
    w = torch.eye(3).to_sparse()
    plan = fdp.explain(lambda w, x: x * 2, w, numbers(6, 3), fdp.virtual_devices(2))
    assert plan.arguments[0].nbytes == (3 * 8 * 2 + 3 * 4,) * 2
    with pytest.raises(ValueError, match="params is a sparse tensor on cpu, whose copies to others cannot be planned"):
        fdp.explain(lambda w, x: x * 2, w, numbers(6, 3), ["cuda:0", "cuda:1"])


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="params is a nested tensor, which cannot be planned with"):
        fdp.explain(lambda w, x: x, nested, numbers(6, 3), fdp.virtual_devices(2))


@pytest.mark.parametrize("width", [20, 40, 59])
def test_narrow_terminals_lose_nothing(width: int):
    plan = fdp.explain(lambda w, x: x @ w, numbers(3, 2), numbers(7, 3), fdp.virtual_devices(2))
    file = io.StringIO()
    Console(file=file, width=width).print(plan)
    shown = "".join(file.getvalue().split())
    assert shown == "".join(str(plan).split())
