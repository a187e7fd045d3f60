"""Where fdp puts what, on several devices: no operation sees two of them, and nothing is copied that need not be."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fdp
from tests.common.comparing import assert_close_tree
from tests.common.containers import tensors_of
from tests.common.numbers import numbers
from tests.common.virtual import Copied, record_copies, traffic

EXECUTORS = ("sequential", "threads")
DEVICES = [torch.device("virtual", i) for i in range(4)]
CPU = torch.device("cpu")
SLOTS: dict[str, list[Any]] = {
    "all": DEVICES,
    "one": DEVICES[2:3],
    "reversed": [DEVICES[1], DEVICES[0]],
    "two-on-one": [DEVICES[3], DEVICES[1], DEVICES[3]],
    "with-cpu": [DEVICES[1], CPU, DEVICES[0], CPU],
}

executors = pytest.mark.parametrize("executor", EXECUTORS)
slots = pytest.mark.parametrize("devices", SLOTS.values(), ids=SLOTS)


def to(tree: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(device), tree)


def on(tree: Any) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of(tree)}


PARAMS = {"w": numbers(3, 2), "b": numbers(2)}
ROWS = numbers(10, 3)


def model(p: Any, x: Tensor) -> Any:
    return {"y": (x @ p["w"] + p["b"]).sin(), "mean": (x @ p["w"]).mean()}


def loss(p: Any, x: Tensor) -> Tensor:
    return model(p, x)["y"].square().mean()


THERE = to(PARAMS, DEVICES[1])
DIMS = {"y": 0, "mean": "mean"}


# ---- devices


def test_all_devices_are_used_by_default():
    assert fdp.available_devices() == tuple(DEVICES)
    assert fdp.scatter(ROWS, None).devices == tuple(DEVICES)
    assert fdp.scatter(ROWS, [2, "virtual:1", "virtual"]).devices == (DEVICES[2], DEVICES[1], DEVICES[0])
    with torch.accelerator.device_index(3):
        assert fdp.scatter(ROWS, "virtual").devices == (DEVICES[3],)
    with pytest.raises(ValueError, match=r"'virtual:4' is not available. Available here: 'virtual:0', .*'cpu'"):
        fdp.scatter(ROWS, ["virtual:4"])


@pytest.mark.parametrize("devices", [None, "virtual", DEVICES[2], DEVICES[1:3], ["cpu", 1]])
def test_compiled_calls_onto_devices(devices: Any):
    compiled = torch.compile(
        lambda p, x: fdp.dp_apply(model, p, x, devices, out_dims=DIMS), fullgraph=True, backend="eager"
    )
    assert_close_tree(to(compiled(PARAMS, ROWS), "cpu"), model(PARAMS, ROWS))


@executors
@slots
def test_the_slots_device_is_the_current_one(devices: list[Any], executor: Any):
    def where(x: Tensor) -> Any:
        return x.sum(0, keepdim=True), torch.accelerator.current_device_index()

    before = torch.accelerator.current_device_index()
    _, seen = fdp.parallel_apply(where, fdp.scatter(ROWS, devices), executor=executor)
    assert all(index == d.index for index, d in zip(seen.shards, devices, strict=True) if d.type == "virtual")
    assert torch.accelerator.current_device_index() == before


@executors
def test_a_device_without_index_is_the_slots_own(executor: Any):
    def mask(x: Tensor) -> Tensor:
        return x * torch.ones(3, device="virtual", dtype=x.dtype) + torch.tensor([1.0], device="virtual").to("virtual")

    out = fdp.shard_map(mask, devices=DEVICES, executor=executor)(ROWS)
    assert_close_tree(out.cpu(), ROWS + 1)


# ---- what was one tensor, and what is written to


def shared(tree: Any) -> list[int]:
    """For each tensor the place where the same object stands first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors_of(tree))]


def test_tensors_that_are_tied_stay_tied():
    x, name = numbers(4, 4), numbers(2)
    tree, dims = (x, x, x, [name, name, x[0], name], name), (0, 1, None, "items", None)
    for devices, tied, copies in ((DEVICES[:1], [0, 0, 0, 3, 3, 5, 3, 3], 2), (DEVICES[:2], [0, 1, 2, 3, 3, 3], 7)):
        sharded = fdp.scatter(tree, devices, dims)
        assert shared(sharded[0]) == shared(fdp.scatter(tree, ["cpu"] * len(devices), dims)[0]) == tied
        with record_copies() as log:
            fdp.scatter(tree, devices, dims)
        assert len(log) == copies
    assert shared(fdp.gather(sharded, ("list", "list", None, "items", None))[3])[:2] == [0, 0]


@pytest.mark.parametrize("transformed", [False, True])
def test_a_write_to_an_element_is_an_error(transformed: bool):
    def write(w: Tensor, items: list[Tensor]) -> Tensor:
        items[0].detach().add_(1)
        return w * items[0].sum()

    def call(w: Tensor) -> Tensor:
        return fdp.dp_apply(write, w, [numbers(2) for _ in range(4)], DEVICES[:2], in_dims="items", out_dims="sum")

    with pytest.raises(RuntimeError, match=r"wrote in place to inputs\[0\], inputs\[2\]"):
        (torch.func.grad(call) if transformed else call)(numbers())


# ---- values and places


@executors
@slots
@pytest.mark.parametrize("source", [CPU, DEVICES[2]], ids=str)
def test_the_call_of_one_device(devices: list[Any], executor: Any, source: torch.device):
    params, rows = to(PARAMS, source), ROWS.to(source)
    out = fdp.dp_apply(model, params, rows, devices, out_dims=DIMS, executor=executor)
    assert on(out) == {devices[0]}
    assert_close_tree(to(out, "cpu"), model(PARAMS, ROWS))
    for target in ("cpu", DEVICES[3]):
        out = fdp.dp_apply(model, params, rows, devices, out_dims=DIMS, executor=executor, output_device=target)
        assert on(out) == {torch.device(target)}


@executors
@slots
@pytest.mark.parametrize("source", [CPU, DEVICES[2]], ids=str)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_gradients_of_one_device(devices: list[Any], executor: Any, source: torch.device, microbatches: int):
    want = torch.func.grad_and_value(loss)(PARAMS, ROWS)[::-1]
    get = fdp.value_and_grad(loss, devices=devices, executor=executor, microbatches=microbatches)
    value, grads = get(to(PARAMS, source), ROWS.to(source))
    assert value.device == devices[0]
    assert on(grads) == {source}  # where the argument lives
    assert_close_tree(to((value, grads), "cpu"), want)


@executors
def test_gradients_on_the_output_device(executor: Any):
    get = fdp.value_and_grad(
        loss, (0, 1), devices=DEVICES, in_dims=(None, 0), output_device="virtual:3", executor=executor
    )
    value, grads = get(PARAMS, ROWS.to(DEVICES[1]))
    assert on((value, grads)) == {DEVICES[3]}
    assert_close_tree(to(grads, "cpu"), torch.func.grad(loss, (0, 1))(PARAMS, ROWS))


# ---- copies


@executors
def test_copies_of_a_forward(executor: Any):
    devices = [DEVICES[1], DEVICES[0], DEVICES[1], DEVICES[2]]
    with record_copies() as log:
        fdp.dp_apply(lambda p, x: x @ p["w"], PARAMS, ROWS, devices, executor=executor)
    w, b, row = 48, 16, 24
    parameters = [
        Copied(nbytes, CPU, device) for nbytes in (w, b) for device in DEVICES[:3]
    ]  # once per device, not a slot
    inputs = [Copied(n * row, CPU, device) for n, device in zip((3, 3, 2, 2), devices, strict=True)]
    outputs = [Copied(n * 16, device, devices[0]) for n, device in ((3, DEVICES[0]), (2, DEVICES[2]))]
    assert traffic(log) == traffic(parameters + inputs + outputs)


@executors
def test_what_is_there_is_not_copied(executor: Any):
    params, batch = fdp.replicate(PARAMS, DEVICES), fdp.scatter(ROWS, DEVICES)
    with record_copies() as log:
        fdp.parallel_apply(model, params, batch, executor=executor)
    assert log == []
    with record_copies() as log:
        fdp.dp_apply(model, params, batch, out_dims={"y": 0, "mean": None}, executor=executor)
    assert Counter(log) == Counter(
        Copied(n * 16, device, DEVICES[0]) for n, device in zip((3, 2, 2), DEVICES[1:], strict=True)
    )
    with record_copies() as log:
        fdp.replicate(PARAMS["b"].to(DEVICES[1]), DEVICES, copy=False)
    assert Counter(log[1:]) == Counter(Copied(16, DEVICES[1], device) for device in DEVICES if device != DEVICES[1])


def test_a_tensor_that_is_tied_is_copied_once():
    w = PARAMS["w"]
    with record_copies() as log:
        fdp.dp_apply(lambda p, x: x @ p["a"] + x @ p["b"][0], {"a": w, "b": [w]}, ROWS[:1], [DEVICES[1]])
        fdp.replicate({"a": w, "b": [w]}, [DEVICES[1]])
    assert sorted(copied.nbytes for copied in log) == [24, 48, 48]

    def twice(x: Tensor) -> Any:
        y = x * 2
        return {"a": y, "b": y}

    rows = ROWS[:2].to(DEVICES[0])
    with record_copies() as log:
        fdp.shard_map(twice, devices=DEVICES[:2])(rows)
    assert len(log) == 2  # one row there, one row back


FORWARDS: dict[str, Any] = {
    "dp_apply": lambda d: fdp.dp_apply(model, PARAMS, ROWS, d, out_dims=DIMS),
    "output-device": lambda d: fdp.dp_apply(model, PARAMS, ROWS, d, out_dims=DIMS, output_device="virtual:2"),
    "from-a-device": lambda d: fdp.dp_apply(model, THERE, ROWS, d, out_dims={"y": "list", "mean": "max"}),
    "scatter-gather": lambda d: fdp.gather(fdp.scatter([ROWS, (ROWS, 1)], d, [0, 0])),
    "items": lambda d: fdp.gather(fdp.scatter([{"x": row} for row in ROWS], d, "items"), device="cpu"),
    "replicate": lambda d: fdp.replicate(PARAMS, d),
    "integers": lambda d: fdp.shard_map(lambda x: torch.full_like(x[0], 3).long(), devices=d, out_dims="mean")(ROWS),
    "list": lambda d: fdp.shard_map(lambda x: x.sum(), devices=d, out_dims="list")(ROWS),
    "first": lambda d: fdp.shard_map(lambda x: x.sum(), devices=d, out_dims=None)(ROWS),
    "gradients": lambda d: fdp.value_and_grad(loss, devices=d)(PARAMS, ROWS),
    "gradients-of-replicated": lambda d: fdp.value_and_grad(loss)(fdp.replicate(PARAMS, d), ROWS),
    "gradients-of-items": lambda d: fdp.grad(
        lambda xs: sum(x.sum() for x in xs), devices=d, in_dims="items", reduction="sum"
    )([row.clone() for row in ROWS]),
    "per-sample": lambda d: torch.func.vmap(
        lambda x: fdp.dp_apply(model, PARAMS, x[None].expand(4, 3), d, out_dims=DIMS)
    )(ROWS),
}


@slots
@pytest.mark.parametrize("name", FORWARDS)
def test_transfers_are_the_copies_that_are_made(name: str, devices: list[Any]):
    with record_copies() as real, fdp.transfers() as log:
        FORWARDS[name](devices)
    assert traffic(log) == traffic(real)
    assert all(t.path and t.source != t.target for t in log)


def test_paths_of_transfers():
    params = {"first": fdp.replicate(PARAMS, DEVICES[:2])}
    with fdp.transfers() as log:
        fdp.grad(lambda p, x: loss(p["first"], x))(params, ROWS)
    assert [(t.path, t.source, t.target) for t in log if "'w'" in t.path] == [
        ("grad of args[0]['first']['w']", DEVICES[1], DEVICES[0]),  # added up on the first slot
        ("grad of args[0]['first']['w']", DEVICES[0], DEVICES[1]),  # and given to the others
    ]


@executors
def test_transfers_inside_shards_are_seen(executor: Any):
    def inner(x: Tensor) -> Tensor:
        return fdp.dp_apply(lambda p, x: x * p, x.new_ones(1), x, DEVICES[:2], executor="sequential")

    with record_copies() as real, fdp.transfers() as log:
        fdp.shard_map(inner, devices=DEVICES[2:], executor=executor)(ROWS)
    assert traffic(log) == traffic(real)


# ---- seeds


def test_seeds_agree_on_all_devices():
    runs = [
        fdp.shard_map(lambda x: torch.rand_like(x), devices=devices, seed=3, executor=executor)(ROWS).cpu()
        for devices in (DEVICES, DEVICES[::-1], DEVICES[:1] * 4, [CPU] * 4)
        for executor in EXECUTORS
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)


# ---- threads of the caller


@executors
def test_calls_from_several_threads(executor: Any):
    want = torch.func.grad(loss)(PARAMS, ROWS)

    def work(i: int) -> None:
        with torch.accelerator.device_index(i % 4), fdp.transfers() as log:
            grads = fdp.grad(loss, devices=DEVICES[: 1 + i % 4], executor=executor)(PARAMS, ROWS)
            assert torch.accelerator.current_device_index() == i % 4
        assert {t.target for t in log} == {*DEVICES[: 1 + i % 4], CPU}  # of this thread only
        assert_close_tree(grads, want)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(16)))
    assert threading.active_count() < 40
