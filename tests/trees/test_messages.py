"""Messages about a thousand leaves: ten are named, among them the odd one, and the others counted."""

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(2)
MANY = 1000
W = torch.tensor(2.0, dtype=torch.float64)


def many(make: Callable[[], Any]) -> dict[str, Any]:
    return {f"leaf{i}": make() for i in range(MANY)}


class Opaque:
    def __init__(self) -> None:
        self.x = torch.ones(1)


def writes(w: Any, x: Any) -> Any:
    for tensor in x.values():
        tensor.add_(1)
    return x


def loss(w: Any, x: Any) -> torch.Tensor:
    return x.mean()


FAILURES: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "opaque": (TypeError, lambda: fdp.scatter(many(Opaque), SLOTS)),
    "dims out of range": (ValueError, lambda: fdp.scatter(many(lambda: numbers(4)), SLOTS, 3)),
    "rows": (ValueError, lambda: fdp.scatter([many(lambda: numbers(4)), many(lambda: numbers(3))], SLOTS)),
    "written": (RuntimeError, lambda: fdp.dp_apply(writes, W, many(lambda: numbers(4)), SLOTS)),
    "not joined": (
        ValueError,
        lambda: fdp.dp_apply(lambda w, x: many(lambda: torch.ones(())), W, numbers(4), SLOTS),
    ),
    "not differentiable": (TypeError, lambda: fdp.grad(loss, devices=SLOTS)(many(lambda: 3), numbers(4))),
    "aux of rows": (
        ValueError,
        lambda: fdp.grad(lambda w, x: ((w * x).mean(), many(lambda: x)), has_aux=True, devices=SLOTS)(W, numbers(4)),
    ),
    "not exchanged": (
        TypeError,
        lambda: fdp.dp_apply(lambda w, x: fdp.psum(many(lambda: "text")), W, numbers(4), SLOTS),
    ),
    "no mean": (TypeError, lambda: fdp.dp_apply(lambda w, x: fdp.pmean(many(lambda: x > 0)), W, numbers(4), SLOTS)),
    "state": (
        ValueError,
        lambda: fdp.functional(torch.nn.Linear(1, 1))[0]((many(lambda: numbers(1)), {}), numbers(4, 1)),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_few_of_many_leaves_are_named(name: str):
    kind, fail = FAILURES[name]
    with pytest.raises(kind, match=r"[,;] (990|1,990|1,996) more") as caught:
        fail()
    message = str(caught.value)
    assert len(re.findall(r"leaf\d+", message)) in (4, 10, 20), message  # twice, where it also says what is inside
    assert len(message) < 3000


# ---- trees of a thousand leaves that differ in one


def with_odd(x: Any, odd: Any) -> dict[str, Any]:
    """A tree in which `leaf7` has another name where this slot is odd."""
    tree = dict.fromkeys((f"leaf{i}" for i in range(MANY)), x)
    if odd:
        tree["other"] = tree.pop("leaf7")
    return tree


def odd_tree(x: torch.Tensor) -> dict[str, Any]:
    return with_odd(x, fdp.axis_index())


def slots(fn: Callable[[torch.Tensor], Any], **options: Any) -> Any:
    return lambda: fdp.dp_apply(lambda w, x: fn(x), None, numbers(4), SLOTS, **options)


def misfit(name: str) -> str:
    return rf"{name} is a dict with 1,000 keys, among them \['leaf7'\], but .* a dict with 1,000 keys.*\['other'\]"


def with_loss(w: torch.Tensor, x: torch.Tensor) -> Any:
    return (w * x).mean(), with_odd(w, odd=False)


TREE, OTHER = with_odd(numbers(4), odd=False), with_odd(0, odd=True)
LONG_STRUCTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "outputs": (
        r"out is a dict with 1,000 keys, among them \['leaf7'\] in shard 0, .*, among them \['other'\] in shard 1",
        slots(odd_tree),
    ),
    "other outputs": (
        r"among them \['other0', .*, 990 more\] in shard 0",
        slots(lambda x: {f"{'leaf' if fdp.axis_index() else 'other'}{i}": x for i in range(MANY)}),
    ),
    "order of outputs": (
        r"keys, \.\.\..*'leaf7': \*, 'leaf8': .*\.\.\. in shard 0, .*'leaf6': \*, 'leaf8': .*\.\.\. in shard 1",
        slots(lambda x: OrderedDict.fromkeys([*TREE] if fdp.axis_index() == 0 else [*[*OTHER][:-1], "leaf7"], x)),
    ),
    "in_dims": (misfit("inputs"), lambda: fdp.dp_apply(torch.add, None, TREE, SLOTS, in_dims=OTHER)),
    "in_dims of a tuple": (
        r"inputs is a dict with 1,000 keys, but in_dims has a list of 1000 there",
        lambda: fdp.dp_apply(torch.add, None, TREE, SLOTS, in_dims=[0] * MANY),
    ),
    "out_dims": (misfit("out"), slots(lambda x: with_odd(x, odd=False), out_dims=OTHER)),
    "kwarg_dims": (
        misfit(r"kwargs\['x'\]"),
        lambda: fdp.grad(loss, devices=SLOTS, kwarg_dims={"x": OTHER})(W, x=TREE),
    ),
    "names of kwarg_dims": (
        r"kwarg_dims names \['other'\], but the keyword arguments are \['leaf0', .*, 990 more\]",
        lambda: fdp.grad(loss, devices=SLOTS, kwarg_dims=OTHER)(W, **TREE),
    ),
    "aux_dims": (
        misfit("aux"),
        lambda: fdp.grad(with_loss, has_aux=True, devices=SLOTS, aux_dims=dict.fromkeys(OTHER, "mean"))(W, numbers(4)),
    ),
    "in_dims of names": (
        r"in_dims names \['other'\], but inputs\[0\] is a Many with fields \['leaf0', .*, 990 more\]",
        lambda: fdp.dp_apply(torch.add, None, [namedtuple("Many", TREE)(**TREE)], SLOTS, in_dims=[OTHER]),
    ),
    "psum": (
        r"tree\['leaf7'\] float64\[2\] in shard 0, tree\['leaf70'\] float64\[2\] in shard 1",
        slots(lambda x: fdp.psum(odd_tree(x))),
    ),
    "psum of numbers": (
        r"tree\['leaf7'\] a number in shard 0, tree\['leaf70'\] a number in shard 1",
        slots(lambda x: fdp.psum(with_odd(1, fdp.axis_index()))),
    ),
    "psum of lists": (
        r"tree\['x'\] is a list of 1000 in shard 0, tree\['x'\] is a list of 1001 in shard 1",
        slots(lambda x: fdp.psum({"w": x, "x": [x] * (MANY + fdp.axis_index())})),
    ),
    "pmean": (r"tree\['leaf7'\] .* in shard 0, tree\['leaf70'\] .*", slots(lambda x: fdp.pmean(odd_tree(x)))),
    "all_gather": (r"tree\['leaf7'\] .* in shard 0, tree\['leaf70'\] .*", slots(lambda x: fdp.all_gather(odd_tree(x)))),
    "ppermute": (
        r"ppermute: .* tree\['leaf7'\] float64\[2\] in shard 0, tree\['leaf7'\] float64\[1\] in shard 1",
        slots(lambda x: fdp.ppermute({**TREE, "leaf7": x[fdp.axis_index() :]}, [(0, 1)])),
    ),
    "containers": (
        r"tree is a OrderedDict with keys \['a'\] in shard 0, tree is a dict with keys \['a'\] in shard 1",
        slots(lambda x: fdp.psum([OrderedDict, dict][fdp.axis_index()](a=x))),
    ),
}


@pytest.mark.parametrize("name", LONG_STRUCTURES)
def test_trees_that_differ_in_one_of_many_leaves(name: str):
    message, fail = LONG_STRUCTURES[name]
    with pytest.raises(ValueError, match=message) as caught:
        fail()
    assert all(len(text) < 2000 for text in (str(caught.value), *getattr(caught.value, "__notes__", ())))


def test_many_slots_that_differ_are_counted():
    def fn(w: Any, x: torch.Tensor) -> Any:
        return fdp.psum(torch.ones(2 + (fdp.axis_index() == 15)))

    message = r"float32\[2\] in shard 0, float32\[3\] in shard 15, float32\[2\] in shard 1, .*, 6 more\n"
    with pytest.raises(ValueError, match=message):
        fdp.dp_apply(fn, None, numbers(16), fdp.virtual_devices(16))


def test_the_odd_leaf_is_named_first():
    tree = [numbers(7)] * MANY + [numbers(3)] + [numbers(7)] * MANY
    message = (
        r"rows differ: tree\[0\] has 7 along dim 0, tree\[1000\] has 3 along dim 0, tree\[1\] has 7 .*, 1,997 more\."
    )
    with pytest.raises(ValueError, match=message):
        fdp.scatter(tree, SLOTS)


def test_the_odd_leaf_is_named_among_a_few():
    tree = [numbers(7)] * 9 + [numbers(3)]
    with pytest.raises(ValueError, match=r"tree\[0\] has 7 along dim 0, tree\[9\] has 3 .*tree\[2\] has 7 .*, 6 more"):
        fdp.scatter(tree, SLOTS)


# ---- dtypes that depend on the rows


def depends(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w * x).mean().to(torch.bfloat16 if len(x) == 2 else torch.float32)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("transformed", [False, True])
def test_losses_of_different_dtypes_are_promoted(slots: int, transformed: bool):
    """As under autocast, where the choice of an operation may depend on the shape."""
    w, x = torch.tensor(2.0), torch.arange(3.0)
    with torch.inference_mode(transformed):
        value, grad = fdp.value_and_grad(depends, devices=fdp.virtual_devices(slots))(w, x)
    torch.testing.assert_close((value, grad), (torch.tensor(2.0), torch.tensor(1.0)), rtol=1e-2, atol=0)


def test_outputs_of_different_dtypes_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"has dtypes that differ, torch.bfloat16 in shard 0, torch.float32 in shard 1: convert it .*\.float\(\)",
    ):
        fdp.dp_apply(depends, torch.ones(()), torch.ones(3), SLOTS, out_dims="mean")


# ---- no rows


def test_gather_of_no_rows_with_their_weights():
    x = fdp.scatter(torch.zeros(0, 3), SLOTS)
    doubled = fdp.parallel_apply(lambda x: x * 2, x)
    assert isinstance(doubled, fdp.Sharded)
    assert fdp.gather(doubled, 0, weights=x.sizes).shape == (0, 3)
    with pytest.raises(ValueError, match="there are no rows: the mean over zero rows is not defined"):
        fdp.gather(doubled.map(torch.sum), "mean", weights=x.sizes)


# ---- tracing


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_tracing_a_split_is_refused(executor: Any):
    """What it recorded would hold for batches of this size."""
    w, x = numbers(3), numbers(5, 3)
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    message = "torch.jit traces here, and would record how this one batch is split.*map the traced one"
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(lambda w, x: fdp.dp_apply(torch.mul, w, x, SLOTS, executor=executor), (w, x))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(lambda w, x: fdp.grad(lambda w, x: (w * x).mean(), devices=SLOTS)(w, x), (w, x))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.trace(fdp.DataParallel(module, ["cpu", "cpu"], executor=executor), x)
    inner: Any = torch.jit.trace(module, x)
    torch.testing.assert_close(fdp.dp_apply(lambda _, x: inner(x), None, numbers(8, 3), SLOTS), module(numbers(8, 3)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_on_one_slot():
    traced: Any = torch.jit.trace(lambda w, x: fdp.dp_apply(torch.mul, w, x, "cpu"), (numbers(3), numbers(5, 3)))
    torch.testing.assert_close(traced(numbers(3), numbers(8, 3)), numbers(3) * numbers(8, 3))
