"""A mesh, and what is on it, where they cannot be used."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import torch

import fdp
from tests.distributed.pool import Pool
from tests.distributed.test_disagreement import PATIENCE, mean, works, x_of


def misused(mesh: Any) -> list[str]:
    """What is said where a mesh, or what is on it, is used wrongly; nobody talks meanwhile."""
    p, x = fdp.replicate(torch.ones(3), mesh), fdp.scatter(x_of(mesh), mesh)
    alone = fdp.scatter(x_of(mesh), fdp.virtual_devices(1))
    other = fdp.distributed.init(devices=fdp.virtual_devices(1), timeout=PATIENCE)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("args?.* not on it|not on it", lambda: fdp.parallel_apply(torch.add, x, alone)),
        ("is on .* mesh", lambda: fdp.dp_apply(mean, p, alone, out_dims="mean")),
        ("on a mesh", lambda: fdp.dp_apply(mean, torch.ones(3), x, fdp.virtual_devices(1), out_dims="mean")),
        ("is on a mesh, but params is not on it", lambda: fdp.dp_apply(mean, p, x, other, out_dims="mean")),
        ("explain: a mesh of several processes", lambda: fdp.explain(mean, torch.ones(3), x_of(mesh), mesh)),
        ("explain: a mesh of several processes", lambda: fdp.explain(mean, p, x_of(mesh))),
        ("cannot be pickled; pickle its .shards", lambda: pickle.dumps(x)),
        ("cannot be pickled|pickle", lambda: pickle.dumps(mesh)),
    ]
    found, on_other = [said(pattern, call) for pattern, call in calls], fdp.scatter(x_of(mesh), other)
    other.close()
    used: list[Callable[[], Any]] = [
        lambda: fdp.dp_apply(mean, torch.ones(3), x_of(mesh), other, out_dims="mean"),
        lambda: fdp.scatter(x_of(mesh), other),
        lambda: fdp.replicate(torch.ones(3), other),
        lambda: fdp.value_and_grad(mean, devices=other)(torch.ones(3), x_of(mesh)),
        lambda: fdp.parallel_apply(torch.sum, torch.ones(3), devices=other),
        lambda: fdp.gather(on_other),
        lambda: fdp.parallel_apply(len, on_other),
    ]
    assert "closed" in repr(other)
    return found + [said("mesh is closed", call) for call in used]


def said(pattern: str, call: Callable[[], Any]) -> str:
    try:
        return f"no error, where {pattern!r} was expected: {call()}"
    except Exception as error:
        return "" if re.search(pattern, str(error)) else f"not {pattern!r}: {type(error).__name__}: {error}"


def test_a_mesh_that_is_used_wrongly(two: Pool):
    for found in two(misused):
        assert not any(found), "\n".join(filter(None, found))
    assert two(works) == [1.0, 1.0]
