"""What collectives say where they are used wrongly."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fdp
from tests.collectives.cases import X, each_executor, everywhere
from tests.common.depth import few

Say = Callable[[], Any]


def test_outside_of_any_call():
    calls: dict[str, Say] = {
        "axis_index": fdp.axis_index,
        "axis_size": fdp.axis_size,
        "axis_rows": fdp.axis_rows,
        "psum": lambda: fdp.psum(X),
        "pmean": lambda: fdp.pmean(X),
        "pmax": lambda: fdp.pmax(X),
        "pmin": lambda: fdp.pmin(X),
        "all_gather": lambda: fdp.all_gather(X),
        "psum_scatter": lambda: fdp.psum_scatter(X),
        "all_to_all": lambda: fdp.all_to_all(X, split_dim=0, concat_dim=0),
        "ppermute": lambda: fdp.ppermute(X, [(0, 0)]),
    }
    for name, call in calls.items():
        with pytest.raises(NameError, match=f"{name}: this code runs in no slot"):
            call()
    for n in (1, 2):
        with pytest.raises(NameError, match=r"psum: there is no axis 'rows' here\. There is 'data'"):
            everywhere(lambda i: fdp.psum(X, "rows"), n=n)


def as_any(x: Any) -> Any:
    """What the type checker would refuse too."""
    return x


WRONG: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "shapes": (lambda i: fdp.psum({"a": torch.ones(2 + i)}), ValueError, r"psum.*shard 0.*shard 1"),
    "shapes-that-broadcast": (lambda i: fdp.psum(torch.ones(1 + i)), ValueError, r"psum.*shard 0.*shard 1"),
    "dtypes": (
        lambda i: fdp.psum(torch.ones(2, dtype=(torch.float32, torch.float64)[i])),
        ValueError,
        r"psum.*float32.*shard 0.*float64.*shard 1",
    ),
    "structures": (lambda i: fdp.psum([X] if i else {"a": X}), ValueError, r"psum.*shard 0.*shard 1"),
    "keys": (lambda i: fdp.psum({"ab"[i]: X}), ValueError, r"psum.*'a'.*shard 0.*'b'.*shard 1"),
    "counts": (lambda i: fdp.psum([X] * (i + 1)), ValueError, r"psum.*shard 0.*shard 1"),
    "number-and-tensor": (lambda i: fdp.psum(X if i else 1), ValueError, r"psum.*shard 0.*shard 1"),
    "how-many-numbers": (lambda i: fdp.psum([1] * (i + 1)), ValueError, r"psum.*shard 0.*shard 1"),
    "where-numbers-are": (lambda i: fdp.psum([1] if i else {"a": 1}), ValueError, r"psum.*shard 0.*shard 1"),
    "dims": (lambda i: fdp.all_gather(torch.ones(2, 2), dim=i), ValueError, r"all_gather.*shard 0.*shard 1"),
    "stack": (
        lambda i: fdp.all_gather(torch.ones(2, 2), stack=i == 1),
        ValueError,
        r"all_gather.*shard 0.*shard 1",
    ),
    "other-dims": (lambda i: fdp.all_gather(torch.ones(2, 2 + i)), ValueError, r"all_gather.*shard 0.*shard 1"),
    "to-all": (
        lambda i: fdp.all_to_all(torch.ones(2, 2 + i), split_dim=1, concat_dim=0),
        ValueError,
        r"all_to_all.*shard 0.*shard 1",
    ),
    "perms": (lambda i: fdp.ppermute(X, [(0, i)]), ValueError, r"ppermute.*shard 0.*shard 1"),
    "perm-slots": (lambda i: fdp.ppermute(X, as_any([0, 1])), TypeError, r"pairs \(from, to\) of slots.*got \[0, 1\]"),
    "perm-dict": (lambda i: fdp.ppermute(X, as_any({0: 1})), TypeError, r"pairs \(from, to\) of slots.*got \{0: 1\}"),
    "perm-floats": (
        lambda i: fdp.ppermute(X, as_any([(0.7, 1.2)])),
        TypeError,
        r"pairs \(from, to\) of slots.*got \[\(0\.7",
    ),
    "perm-twice": (lambda i: fdp.ppermute(X, [(0, 1), (1, 1)]), ValueError, r"ppermute.*twice on one side"),
    "perm-range": (lambda i: fdp.ppermute(X, [(0, 2)]), ValueError, r"ppermute.*there are 2"),
    "perm-negative": (lambda i: fdp.ppermute(X, [(0, -1)]), ValueError, r"ppermute.*there are 2"),
    "weight-typo": (
        lambda i: fdp.pmean(X, weight="row"),
        TypeError,
        r"pmean: weight must be a number, a 0-dim tensor or 'rows', got 'row'",
    ),
    "weight-list": (lambda i: fdp.pmean(X, weight=[1, 2]), TypeError, r"pmean: weight must be.*got \[1, 2\]"),
    "weight-vector": (
        lambda i: fdp.pmean(X, weight=torch.ones(2)),
        TypeError,
        r"pmean: weight must be.*got a tensor of torch.float32 with shape \(2,\)",
    ),
    "weight-complex": (lambda i: fdp.pmean(X, weight=1j), TypeError, r"pmean: weight must be.*got 1j"),
    "weight-negative": (
        lambda i: fdp.pmean(X, weight=1 - 2 * i),
        ValueError,
        r"pmean: weight must be finite and not negative, got -1",
    ),
    "weight-nan": (
        lambda i: fdp.pmean(X, weight=torch.tensor(float("nan"))),
        ValueError,
        r"pmean: weight must be finite and not negative, got nan",
    ),
    "weight-kinds": (
        lambda i: fdp.pmean(X, weight=torch.tensor(1.0) if i else 1.0),
        ValueError,
        r"weight of pmean: the shards do not fit together: a number in shard 0, float64\[\] in shard 1",
    ),
    "weight-or-none": (
        lambda i: fdp.pmean(X, weight=None if i else 1.0),
        RuntimeError,
        r"different collectives: weight of pmean in shard 0, pmean in shard 1",
    ),
    "others": (
        lambda i: fdp.psum(X) if i else fdp.all_gather(X),
        RuntimeError,
        r"different collectives: all_gather in shard 0, psum in shard 1",
    ),
    "strings": (
        lambda i: fdp.psum({"a": "s", "b": 1}),
        TypeError,
        r"psum: only tensors, ints and floats can be exchanged, not tree\['a'\] \(str\)",
    ),
    "complex-number": (lambda i: fdp.psum([1j]), TypeError, r"psum: only.*not tree\[0\] \(complex\).*torch\.as_tensor"),
    "no-arithmetic": (
        lambda i: fdp.pmax(torch.ones(2).to(torch.uint16)),
        TypeError,
        r"pmax: torch has no arithmetic for torch\.uint16",
    ),
    "gathered-number": (lambda i: fdp.all_gather({"a": 1}), TypeError, r"all_gather: only tensors.*tree\['a'\]"),
    "gathered-0-dim": (
        lambda i: fdp.all_gather(torch.ones(())),
        ValueError,
        r"all_gather: dim 0 is out of range for a tensor of 0 dimensions; pass stack=True",
    ),
    "dim": (lambda i: fdp.psum_scatter(X, dim=2), ValueError, r"psum_scatter: dim 2 is out of range"),
    "dim-type": (lambda i: fdp.psum_scatter(X, dim=True), TypeError, r"psum_scatter: a dim must be an int"),
    "some": (lambda i: fdp.psum(X) if i else None, RuntimeError, r"psum.*shard 0, which has returned"),
    "more": (
        lambda i: [fdp.psum(X) for _ in range(2 - i)],
        RuntimeError,
        r"psum in shard 0.*shard 1, which has returned",
    ),
}


@few()
@each_executor
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_messages(wrong: Any, executor: Any):
    fn, kind, match = wrong
    with pytest.raises(kind, match=match) as caught:
        everywhere(fn, n=2, executor=executor)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert not re.search("PyTreeSpec|Follows", text)  # of nothing private


ALONE = (
    *("strings", "complex-number", "no-arithmetic", "gathered-number", "gathered-0-dim", "dim", "dim-type"),
    *("perm-range", "perm-twice", "perm-slots", "perm-dict", "perm-floats"),
    *("weight-typo", "weight-list", "weight-vector", "weight-complex", "weight-nan"),
)


@pytest.mark.parametrize("name", ALONE)
def test_messages_with_one_slot(name: str):
    fn, kind, match = WRONG[name]
    with pytest.raises(kind, match=match.replace("there are 2", "there are 1")):
        everywhere(fn, n=1)


@each_executor
def test_forward_mode_inside_says_so(executor: Any):
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda w: fdp.psum((w * x).sum()), (w,), (w,))[1] * x

    match = "psum: inside forward-mode" if executor == "sequential" else "executor='threads': the function calls .*jvp"
    with pytest.raises(RuntimeError, match=match):
        fdp.dp_apply(forward, torch.ones(()), torch.ones(3), fdp.virtual_devices(2), executor=executor)


@each_executor
def test_a_gradient_after_the_call(executor: Any):
    kept = []

    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = fdp.psum((w * x).sum())
        kept.append(y)
        return y * x

    w = torch.ones((), requires_grad=True)
    fdp.dp_apply(fn, w, torch.arange(3.0), fdp.virtual_devices(2), executor=executor)
    kept[-1].square().backward()
    assert w.grad == 18


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_names_of_axes_that_are_none(name: str):
    call = getattr(fdp, name)
    message = rf"^{name}: axis_name must be the name of an axis or a tuple of names, got "
    for wrong in (None, 0, ("data", 1)):
        with pytest.raises(TypeError, match=message):
            fdp.dp_apply(lambda _, x, wrong=wrong: call(x, wrong), None, torch.ones(2), fdp.virtual_devices(2))
    with pytest.raises(ValueError, match=rf"^{name}: axis_name names an axis twice: \('data', 'data'\)"):
        fdp.dp_apply(lambda _, x: call(x, ("data", "data")), None, torch.ones(2), fdp.virtual_devices(2))


def test_a_collective_that_meets_a_gradient():
    """Slot 0 skips the first, and comes with its gradient to where slot 1 still goes forward."""

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def loss(w: torch.Tensor) -> torch.Tensor:
            w = w * 1 if fdp.axis_index() == 0 else fdp.psum(w)
            return fdp.psum(w).sum()

        return torch.func.grad(loss)(w)

    with pytest.raises(RuntimeError, match="different collectives: the gradient of psum in shard 0, psum in shard 1"):
        fdp.dp_apply(fn, torch.ones(2), torch.ones(2), fdp.virtual_devices(2), out_dims="list")


@pytest.mark.parametrize("slot", [0, 1])
def test_a_transform_in_one_slot_only(slot: int):
    """Its shapes may fit by accident, and then numbers of other rows would be added."""

    def fn(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(fdp.psum)(x) if fdp.axis_index() == slot else fdp.psum(x)

    said = f"inside {1 - slot} transforms of torch.func in shard 0, inside {slot} transforms of torch.func in shard 1"
    with pytest.raises(ValueError, match=f"^psum: the shards do not fit together: {said}"):
        fdp.dp_apply(fn, None, torch.ones(4, 2), fdp.virtual_devices(2))
