"""Writes in place that a mapped function does."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from tests.common.comparing import assert_same_tree, unharmed
from tests.common.containers import Batch
from tests.common.functions import scores
from tests.common.numbers import numbers

W = numbers(4)

SLOTS = fdp.virtual_devices(3)


def recorder() -> tuple[list[Any], Callable[..., None]]:
    seen: list[Any] = []
    return seen, lambda *args, **kwargs: seen.append((args, kwargs))


def in_place(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.add_(1)
    return x


def through_a_view(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.view(-1)[:1].zero_()
    return x


def by_out(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.mul(w, 2, out=w)
    return x


def by_foreach(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([w], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    return x


def without_grad(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w.zero_()
    return x


def by_index(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w[0] = x.sum()
    return x


def wrote(where: str, path: str) -> str:
    path = re.escape(path)
    return (
        rf"^{where}: the function wrote in place to {path}\. It must be pure: work on x\.clone\(\), or return the new"
    )


WRITES = [in_place, through_a_view, by_out, by_foreach, without_grad, by_index]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("slots", [1, 3])
def test_writes_in_place_are_found(write: Any, slots: int):
    devices = fdp.virtual_devices(slots)
    x = numbers(5)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "params['b'][1]")):
        fdp.dp_apply(lambda p, x: write(p["b"][1], x), {"a": W, "b": [W, numbers(4)]}, x, devices)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs['y']")):
        fdp.dp_apply(lambda w, i: write(i["y"], i["x"]), W, {"x": x, "y": numbers(5, 3)}, devices)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "kwargs['y']")):
        fdp.dp_apply(lambda p, x, y: write(y, x), W, x, devices, kwargs={"y": numbers(5, 3)})
    with pytest.raises(RuntimeError, match=wrote("shard_map", "args[0].x")):
        fdp.shard_map(lambda b: write(b.x, b.x), devices=devices)(Batch(numbers(5, 3)))


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_shards_of_state_are_found(write: Any):
    x = numbers(5)
    with pytest.raises(RuntimeError, match="dp_apply: the function wrote in place to params"):
        fdp.dp_apply(lambda p, x: write(p["w"], x), fdp.replicate({"w": W, "v": W}, SLOTS), x)
    with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to inputs\[1\]"):
        fdp.dp_apply(lambda p, x, y: write(y, x), W, (x, fdp.scatter(numbers(5, 2), SLOTS)))


def test_writes_to_shards_of_state_are_named_by_leaf():
    with pytest.raises(RuntimeError, match=r"wrote in place to params.*\['w'\]"):
        fdp.dp_apply(lambda p, x: in_place(p["w"], x), fdp.replicate({"w": W, "v": W}, SLOTS), numbers(5))


def test_writes_to_items_are_found():
    with pytest.raises(RuntimeError, match=r"dp_apply: the function wrote in place to inputs"):
        fdp.dp_apply(
            lambda p, items: in_place(items[0]["a"], p),
            W,
            [{"a": numbers(2)} for _ in range(4)],
            SLOTS,
            in_dims="items",
        )


def test_all_leaves_that_were_written_are_named():
    def fn(p: Any, x: torch.Tensor) -> None:
        p["a"].zero_()
        p["c"].zero_()

    params = {"a": numbers(2), "b": numbers(2), "c": numbers(2)}
    with pytest.raises(RuntimeError, match=r"wrote in place to params\['a'\], params\['c'\]\. "):
        fdp.dp_apply(fn, params, numbers(3), SLOTS)


def test_writes_to_a_copy_on_another_device_are_found():
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return in_place(w, x) if w.device.type == "meta" else x

    with unharmed(W), pytest.raises(RuntimeError, match=wrote("dp_apply", "params['w']")):
        fdp.dp_apply(lambda p, x: fn(p["w"], x), {"w": W}, numbers(4), ["cpu", "meta"], out_dims=None)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs")):
        fdp.dp_apply(lambda w, x: fn(x, x), W, numbers(4), ["cpu", "meta"], out_dims=None)


def test_writes_under_vmap_are_found():
    xs = numbers(2, 5)
    with pytest.raises(RuntimeError, match=wrote("dp_apply", "inputs")):
        torch.func.vmap(lambda x: fdp.dp_apply(lambda w, x: x.add_(1), W, x, SLOTS))(xs)


def test_writes_to_what_the_function_made_are_its_own():
    def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1).mul_(p.sum())

    with unharmed(W):
        assert_same_tree(fdp.dp_apply(fn, W, numbers(5), SLOTS), (numbers(5) + 1) * W.sum())


@pytest.mark.parametrize("slots", [1, 3])
def test_containers_of_the_caller_are_not_those_of_the_function(slots: int):
    def fn(p: dict[str, Any], x: list[Any]) -> torch.Tensor:
        p["new"] = p.pop("w")
        x.append(1)
        return x[0]

    params, x = {"w": W}, [numbers(5)]
    fdp.dp_apply(fn, params, x, fdp.virtual_devices(slots))
    assert list(params) == ["w"]
    assert len(x) == 1


def test_slots_on_one_device_share_the_parameters():
    seen, fn = recorder()
    fdp.dp_apply(fn, {"w": W}, numbers(5), SLOTS)
    assert all(args[0]["w"] is W for args, _ in seen)


def test_inference_tensors_are_no_obstacle():
    with torch.inference_mode():
        x = numbers(5, 4)
    assert_same_tree(fdp.dp_apply(scores, W, x, SLOTS), scores(W, x))
