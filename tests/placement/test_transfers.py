"""What the log of copies sees. Counts on real devices are in `tests/accelerator`; here `meta` is the other device."""

import contextvars
import threading
from typing import Any

import pytest
import torch

import fdp
from fdp import Transfer

CPU, META = torch.device("cpu"), torch.device("meta")
DEVICES = [META, CPU]
ROWS = torch.ones(3, 2)


def paths(log: list[Transfer]) -> list[str]:
    return [transfer.path for transfer in log]


def test_each_copy_with_its_path():
    params = {"w": torch.ones(2, dtype=torch.float64), "n": 1}
    with fdp.transfers() as log:
        fdp.dp_apply(lambda p, x: {"y": x * p["w"], "n": 0}, params, {"x": ROWS}["x"], DEVICES)
    assert log == [
        Transfer("params['w']", 16, CPU, META),
        Transfer("inputs", 16, CPU, META),
        Transfer("out['y']", 16, CPU, META),
    ]


def test_nothing_moves_on_one_device():
    with fdp.transfers() as log:
        fdp.dp_apply(lambda p, x: x * p, torch.ones(2), ROWS, fdp.virtual_devices(3))
        fdp.replicate(ROWS, fdp.virtual_devices(2))
        fdp.value_and_grad(lambda w, x: (w * x).mean(), devices=fdp.virtual_devices(2))(torch.ones(2), ROWS)
    assert log == []


def test_paths_of_items_can_be_read_as_code():
    batch = {"images": [{"x": torch.ones(i)} for i in range(5)]}
    with fdp.transfers() as log:
        fdp.scatter(batch, [CPU, META], {"images": "items"})
    assert paths(log) == ["tree['images'][3:5][0]['x']", "tree['images'][3:5][1]['x']"]
    assert [eval(transfer.path, {"tree": batch}).nbytes for transfer in log] == [transfer.nbytes for transfer in log]


def test_paths_of_gradients():
    params = {"w": torch.ones(2)}
    with fdp.transfers() as log:
        fdp.grad(lambda p, x: (p["w"] * x).mean(), devices=[CPU, CPU], output_device=META)(params, ROWS)
    assert log[:2] == [Transfer("grad of args[0]['w']", 8, CPU, META)] * 2


def test_replicate_and_gather():
    with fdp.transfers() as log:
        copies = fdp.replicate((ROWS, [ROWS]), DEVICES)
        fdp.gather(fdp.Sharded((ROWS, ROWS.to(META)), (CPU, META)), 0, device="meta")
    assert paths(log) == ["tree[0]", "shard"]
    assert copies[0][0] is copies[0][1][0]


def test_sparse_tensors():
    with fdp.transfers() as log:
        fdp.replicate({"coo": torch.eye(4).to_sparse()}, [META])
    assert [transfer.nbytes for transfer in log] == [2 * 4 * 8 + 4 * 4]


def test_logs_inside_one_another():
    with fdp.transfers() as outer:
        fdp.replicate(ROWS, [META])
        with fdp.transfers() as inner:
            fdp.replicate(ROWS, [META])
    fdp.replicate(ROWS, [META])
    assert (len(outer), len(inner)) == (2, 1)


def test_a_log_closes_when_there_is_an_error():
    with pytest.raises(KeyError, match="lost"), fdp.transfers() as log:
        raise KeyError("lost")
    fdp.replicate(ROWS, [META])
    assert log == []


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_copies_inside_of_shards(executor: Any):
    def inner(x: torch.Tensor) -> torch.Tensor:
        fdp.replicate({"x": x}, [META])
        return x

    with fdp.transfers() as log:
        fdp.shard_map(inner, devices=fdp.virtual_devices(3), executor=executor)(ROWS)
    assert paths(log) == ["tree['x']"] * 3


def test_other_threads_are_not_seen():
    with fdp.transfers() as log:
        thread = threading.Thread(target=fdp.replicate, args=(ROWS, [META]))
        contextvars.Context().run(thread.start)  # a Python without the GIL gives it a copy of the context else
        thread.join()
    assert log == []


def test_under_a_transform_what_moves_is_counted():
    with fdp.transfers() as log:
        torch.func.vmap(lambda x: fdp.replicate(x, [META])[0])(torch.ones(5, 2))
    assert [transfer.nbytes for transfer in log] == [40]


def test_nothing_is_logged_while_compiling():
    def moved(x: torch.Tensor) -> torch.Tensor:
        return fdp.dp_apply(lambda _, y: y * 2, None, x, [META, META])

    with fdp.transfers() as log:
        torch.compile(moved, fullgraph=True, backend="eager")(ROWS)
    assert log == []
