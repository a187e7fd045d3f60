"""`explain`: what it says is what `dp_apply` does (copies: tests/accelerator)."""

import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fdp
from fdp.distributed import init
from tests.common.comparing import unharmed
from tests.common.containers import Point, tensors_of
from tests.common.depth import few
from tests.common.hard_trees import TREES
from tests.common.numbers import numbers

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


@few()
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
        ("inputs['x']", "there, as a Sharded", (7, 3), (3, 2, 2), (72, 48, 48)),
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


@few(2)
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
        (linear, {"out_dims": "median"}, "out has the out_dim 'median'; expected an int"),
        (linear, {"weights": [1, 2]}, "2 weights for 3 slots; expected one per slot"),
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


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_plan_can_be_sent_to_another_process(microbatches: Any):
    fn = linear
    if microbatches:
        fn = fdp.value_and_grad(lambda w, x: (x @ w).mean(), devices=SLOTS, microbatches=microbatches)
    plan = fdp.explain(fn, numbers(3), numbers(7, 3), *([] if microbatches else [SLOTS]))
    assert str(pickle.loads(pickle.dumps(plan))) == str(plan)
