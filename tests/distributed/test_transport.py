"""Tensors go by the connections of their device; what processes say to each other goes between CPUs."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdp.distributed import _init, _waits_and_failures
from fdp.distributed._reports import Tag
from fdp.distributed._waits_and_failures import Epoch


class Work:
    """An operation that is over."""

    def wait(self, limit: Any = None) -> bool:
        return True


class Group:
    """Connections that keep what they were given."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, list[torch.Tensor]()

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self.sent += tensors
        return Work()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_go_by_their_device(device: str, monkeypatch: pytest.MonkeyPatch):
    """On meta, which stands for an accelerator."""
    world, own, made = Group("of all devices"), Group("between CPUs"), list[Any]()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    epoch = Epoch([store, store], 0, 0, 1, datetime.timedelta(seconds=5))
    monkeypatch.setattr(_waits_and_failures, "ProcessGroupGloo", lambda *args: made.append(args) or own)
    monkeypatch.setattr(_waits_and_failures.dist, "group", type("group", (), {"WORLD": world}))
    x = torch.ones(3, device=device)
    epoch.send(Tag("this"), x, lambda group: group.allreduce([x]))()
    assert world.sent == ([] if device == "cpu" else [x])
    assert len(made) == (device == "cpu")
    assert epoch.has_sent_elsewhere is (device != "cpu")


# ---- which accelerators are those of a process


SHARES = [
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 4, "2 3"),
    ({"LOCAL_RANK": "3"}, 4, "3"),
    ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 1, "0"),  # the launcher shows each process one
    ({}, 1, "0"),
    ({}, 4, "RANK is set, but not LOCAL_RANK"),
    ({"LOCAL_RANK": "4"}, 4, "LOCAL_RANK is 4, but there are 4"),
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 2, "init: 4 processes share the 2 accelerators"),
]


@pytest.mark.parametrize(("variables", "count", "expected"), SHARES)
def test_a_process_takes_its_accelerators(
    variables: dict[str, str], count: int, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_init, "available_devices", lambda: tuple(torch.device("cuda", i) for i in range(count)))
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    if expected[0].isdigit():
        assert _init._own_share() == tuple(torch.device("cuda", int(i)) for i in expected.split())
    else:
        with pytest.raises(ValueError, match=expected):
            _init._own_share()
