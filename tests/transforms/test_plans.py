"""Plans: one for each signature, that of a call and of no other; and what they say of how shards run."""

import contextlib
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import optree
import pytest
import torch
from torch import Tensor

import fdp
from tests.common.comparing import assert_same_tree
from tests.common.functions import anew
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(2)


def linear(w: Any, x: Any) -> Any:
    return x @ w


def call(fn: Any, params: Any, inputs: Any, devices: Any = SLOTS, **options: Any) -> None:
    """One that may fail: then it was planned all the same."""
    with contextlib.suppress(Exception):
        fdp.dp_apply(fn, params, inputs, devices, **options)


def plans() -> int:
    """How many there are."""
    return sum(isinstance(each, fdp.Plan) for each in gc.get_objects())


def made_by(*args: Any, **options: Any) -> int:
    """How many more there are after a call."""
    gc.collect()
    before = plans()
    call(*args, **options)
    return plans() - before


def test_the_same_signature_has_the_same_plan():
    fn = anew(linear)
    assert made_by(fn, numbers(3, 2), numbers(7, 3)) == 1
    assert made_by(fn, numbers(3, 2) + 1, numbers(7, 3) + 1) == 0


def test_a_function_that_is_defined_anew_has_the_same_plan():
    def define() -> Callable[..., Tensor]:
        return lambda w, x: x @ w

    assert made_by(define(), numbers(3, 2), numbers(7, 3)) == 1
    assert made_by(define(), numbers(3, 2), numbers(7, 3)) == 0


BASE: dict[str, Any] = {"params": {"w": numbers(3, 2)}, "inputs": numbers(6, 3), "devices": SLOTS}
CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"inputs": numbers(6, 3).float()},
    "shape": {"inputs": numbers(5, 3)},
    "shape of what is whole": {"params": {"w": numbers(3, 1)}},
    "device": {"inputs": numbers(6, 3).to("meta")},
    "requires_grad": {"params": {"w": numbers(3, 2).requires_grad_()}},
    "subclass": {"params": {"w": torch.nn.Parameter(numbers(3, 2), requires_grad=False)}},
    "layout": {"params": {"w": numbers(3, 2).to_sparse()}},
    "slots": {"devices": fdp.virtual_devices(3)},
    "spec": {"in_dims": 1},
    "spec that is no int": {"in_dims": None},
    "weights": {"weights": (1, 2)},
    "axis": {"axis_name": "rows"},
    "key": {"params": {"v": numbers(3, 2)}},
    "container": {"params": OrderedDict(w=numbers(3, 2))},
    "kind of a leaf": {"params": {"w": 2.0}},
    "sharded": {"inputs": fdp.scatter(numbers(6, 3), SLOTS)},
    "sharded otherwise": {"inputs": fdp.scatter(numbers(6, 3), SLOTS, weights=(1, 2))},
    "replicated": {"params": fdp.replicate({"w": numbers(3, 2)}, SLOTS)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_decision_that_differs_has_another_plan(change: dict[str, Any]):
    fn = anew(linear)
    assert [made_by(fn, **(BASE | each)) for each in ({}, change, change, {})] == [1, 1, 0, 0]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_call_does_the_same_after_others(change: dict[str, Any]):
    def outcome(fn: Any) -> Any:
        options = dict(BASE | change)
        try:
            return fdp.dp_apply(fn, options.pop("params"), options.pop("inputs"), out_dims="list", **options)
        except Exception as error:
            return repr(error)

    def used(w: Any, x: Any) -> Any:
        return repr(w), x

    def fresh(w: Any, x: Any) -> Any:
        return repr(w), x

    for each in ({}, *CHANGES.values()):
        call(used, **(BASE | each))
    one, other = outcome(used), outcome(fresh)
    assert type(one) is type(other)
    if isinstance(one, str):
        assert one == other
    else:
        assert_same_tree(one, other)


def test_plans_hold_no_values():
    def scaled(w: Any, x: Any) -> Any:
        return x * w["n"] + w["w"]

    w, x = numbers(3), numbers(4, 3)
    for n in (2, 3):
        assert torch.equal(fdp.dp_apply(scaled, {"n": n, "w": w + n}, x, SLOTS), x * n + (w + n))


def test_what_is_tied_is_found_in_each_call():
    def differ(w: Any, x: Any) -> Any:
        return torch.tensor(w[0] is not w[1]), x

    def rows_differ(_: Any, x: Any, y: Any) -> Any:
        return torch.tensor(x is not y), x

    w, x = numbers(3), numbers(4, 3)
    for other in (w, w.clone(), w):
        assert fdp.dp_apply(differ, (w, other), x, SLOTS, out_dims=("max", 0))[0] == (other is not w)
    for other in (x, x.clone(), x):
        assert fdp.dp_apply(rows_differ, None, (x, other), SLOTS, out_dims=("max", 0))[0] == (other is not x)


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


def test_objects_are_looked_into_in_each_call():
    np = pytest.importorskip("numpy")

    def use(_: Any, x: Any, holder: Holder) -> Any:
        return x

    assert fdp.dp_apply(use, None, (numbers(4), Holder(1)), SLOTS).shape == (4,)
    with pytest.raises(TypeError, match="a numpy array of shape"):
        fdp.dp_apply(use, None, (numbers(4), Holder(np.ones(4))), SLOTS)


def test_specs_that_are_functions_are_called_in_each_call():
    asked = []

    def dim(x: Tensor) -> int:
        asked.append(x)
        return 0

    for _ in range(2):
        fdp.dp_apply(linear, numbers(3, 2), numbers(4, 3), SLOTS, in_dims=dim)
    assert len(asked) == 2


def test_true_is_no_dim_although_one_is():
    x = numbers(3, 4)
    assert torch.equal(fdp.dp_apply(lambda _, x: x, None, x, SLOTS, in_dims=1, out_dims=1), x)
    with pytest.raises(ValueError, match="the dim for inputs is True"):
        fdp.dp_apply(lambda _, x: x, None, x, SLOTS, in_dims=True, out_dims=1)


@pytest.mark.parametrize("weights", [{1: 2, 2: 3}, {1, 2}, "12", 2, iter([1, 2])])
def test_what_is_no_sequence_of_weights_although_one_was(weights: Any):
    x = numbers(6)
    assert torch.equal(fdp.dp_apply(lambda _, x: x, None, x, SLOTS, weights=[1, 2]), x)
    if isinstance(weights, Iterator):
        assert torch.equal(fdp.dp_apply(lambda _, x: x, None, x, SLOTS, weights=cast(Any, weights)), x)
    else:
        with pytest.raises(TypeError, match="weights must be a sequence of numbers"):
            fdp.dp_apply(lambda _, x: x, None, x, SLOTS, weights=weights)


def test_no_weights_at_all_are_an_error_although_none_are_not():
    x = numbers(6)
    assert torch.equal(fdp.dp_apply(lambda _, x: x, None, x, SLOTS), x)
    with pytest.raises(ValueError, match="0 weights for 2 slots"):
        fdp.dp_apply(lambda _, x: x, None, x, SLOTS, weights=[])


def test_what_parallel_apply_returns_has_a_signature():
    state = fdp.parallel_apply(lambda x: x, fdp.scatter(numbers(6), SLOTS))
    fn = anew(linear)
    assert [made_by(fn, state, numbers(6, 1)) for _ in range(2)] == [1, 0]


def test_tensors_as_weights_are_read_in_each_call():
    weights = torch.tensor([1.0, 1.0])
    sizes = []

    def note(_: Any, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    for _ in range(2):
        fdp.dp_apply(note, None, numbers(4), SLOTS, weights=cast(Any, list(weights)))
        weights[1] = 3.0
    assert sizes == [2, 2, 1, 3]


def test_a_plan_keeps_no_tensor_and_no_function():
    def call() -> list[Any]:
        def own(w: Any, x: Any) -> Any:
            return x * w

        w, x, apply = numbers(3), numbers(4, 3), fdp.functional(torch.nn.Linear(3, 2))
        fdp.dp_apply(own, w, x, SLOTS)
        fdp.dp_apply(apply[0], apply[1], x.float(), SLOTS)
        return [weakref.ref(each) for each in (own, w, x, apply[0], apply[1][0]["weight"])]

    held = call()
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


class Node:
    """A container whose metadata says of no other whether it is equal."""

    def __init__(self, x: Any, extra: Any) -> None:
        self.x, self.extra = x, extra


register: Any = optree.register_pytree_node
register(
    Node, lambda node: ((node.x,), node.extra), lambda extra, parts: Node(next(iter(parts)), extra), namespace="fdp"
)


def test_metadata_that_cannot_be_compared():
    def use(_: Any, node: Node) -> Any:
        return node.x

    x = numbers(4)
    for extra in (torch.ones(2), 1, torch.ones(2), (torch.ones(2),)):
        assert torch.equal(fdp.dp_apply(use, None, Node(x, extra), SLOTS), x)


def test_a_plan_keeps_no_keys():
    def use(params: Any, x: Any) -> Any:
        return x

    def call() -> list[Any]:
        key = torch.nn.Parameter(numbers(3))
        fdp.dp_apply(use, {key: numbers(2)}, numbers(4), SLOTS)
        return [weakref.ref(key)]

    held = call()
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_many_signatures_are_forgotten():
    def own(_: Any, x: Any) -> Any:
        return x

    for rows in range(2, 80):
        call(own, None, numbers(rows))
    assert made_by(own, None, numbers(79)) == 0
    assert made_by(own, None, numbers(2)) == 0  # one was made, and another one has gone for it
    assert made_by(anew(own), None, numbers(2)) == 1


# ---- how shards run


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (linear, {}, "one shard after the other: executor='auto'"),
        (functools.partial(linear), {"executor": "threads"}, "side by side in threads"),
        (linear, {"executor": "threads"}, "side by side in threads"),
        (linear, {"executor": "threads", "seed": 0}, "one shard after the other: they are seeded"),
        (linear, {"executor": "sequential"}, "one shard after the other: executor='sequential'"),
        (
            lambda w, x: fdp.psum(x @ w),
            {},
            "one shard after the other: executor='auto'; they wait for each other in psum",
        ),
        (
            lambda w, x: fdp.psum(x @ w),
            {"executor": "threads"},
            "side by side in threads; they wait for each other in psum",
        ),
    ],
)
def test_says_how_shards_run_and_why(fn: Any, options: Any, said: str):
    plan = fdp.explain(fn, numbers(3, 2), numbers(6, 3), SLOTS, **options)
    assert plan.executor.startswith(said)
    assert f"Runs: {said}" in str(plan)


def test_one_shard_has_no_choice():
    assert (
        fdp.explain(linear, numbers(3, 2), numbers(6, 3), "cpu").executor == "one shard after the other: there is one"
    )


# ---- gradient functions


def loss_and_aux(w: Any, x: Any) -> Any:
    value = (x * w["w"]).tanh().mean() + 0 * torch.rand(())
    return value, {"index": fdp.axis_index() + 0.0 * value.detach(), "rows": value.detach() * len(x)}


GRADIENT: dict[str, Any] = {"has_aux": True, "devices": SLOTS, "aux_dims": "mean", "around": contextlib.nullcontext}
GRADIENT_CHANGES: dict[str, dict[str, Any]] = {
    "argnums": {"argnums": 1},
    "argnums in a tuple": {"argnums": (0,)},
    "both arguments": {"argnums": (1, 0)},
    "has_aux": {"has_aux": False},
    "slots": {"devices": fdp.virtual_devices(3)},
    "in_dims": {"in_dims": (None, 1)},
    "reduction": {"reduction": "sum"},
    "count": {"count": lambda w, x: len(x) ** 2},
    "aux_weight": {"count": lambda w, x: len(x) ** 2, "aux_weight": "count"},
    "aux_dims": {"aux_dims": "list"},
    "create_graph": {"create_graph": True},
    "no create_graph": {"create_graph": False},
    "microbatches": {"microbatches": 2},
    "output_device": {"output_device": "meta"},
    "weights": {"weights": (1, 2)},
    "executor": {"executor": "threads"},
    "seed": {"seed": 3},
    "randomness": {"seed": 3, "randomness": "same"},
    "randomness of rows": {"seed": 3, "randomness": "rows"},
    "axis_name": {"axis_name": "rows"},
    "grad mode": {"around": torch.no_grad},
    "create_graph without grad mode": {"around": torch.no_grad, "create_graph": True},
    "inference mode": {"around": torch.inference_mode},
}


def gradient(fn: Any, w: Any, x: Any, options: dict[str, Any]) -> Any:
    """What a gradient function returns, with whether it has a graph, or its error."""
    options = GRADIENT | options
    around = options.pop("around")
    loss = fn if options["has_aux"] else (lambda *args: fn(*args)[0])
    if not options["has_aux"]:
        loss = functools.wraps(fn)(loss)
    try:
        with around():
            found = fdp.value_and_grad(loss, **options)(w, x)
    except Exception as error:
        return repr(error)
    return found, [(leaf.requires_grad, leaf.device) for leaf in optree.tree_leaves(cast(Any, found))]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("change", GRADIENT_CHANGES.values(), ids=GRADIENT_CHANGES.keys())
def test_a_gradient_function_does_the_same_after_others(change: dict[str, Any], needs_grad: bool):
    """Whatever a kept plan depends on is in its signature."""
    w, x = {"w": numbers(3).requires_grad_(needs_grad)}, numbers(7, 3)
    used, fresh = anew(loss_and_aux), anew(loss_and_aux)
    for each in ({}, *GRADIENT_CHANGES.values(), {}):
        gradient(used, w, x, each)
        gradient(used, {"w": numbers(3)}, x, each)
    one, other = gradient(used, w, x, change), gradient(fresh, w, x, change)
    assert type(one) is type(other)
    if isinstance(one, str):
        assert one == other
        return
    assert one[1] == other[1]
    if all(device.type != "meta" for _, device in one[1]):
        assert_same_tree(one[0], other[0])
