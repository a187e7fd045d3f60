"""A mesh of two processes, each with a device of its own, whose group has the manners of NCCL."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fdp
from tests.accelerator.double import host_waits, install
from tests.accelerator.double.group import process_group
from tests.common.comparing import assert_close_tree
from tests.common.numbers import numbers

core: Any = dist
X, Y = numbers(7, 3), numbers(7).cos()
PARAMS = {"w": numbers(3), "b": numbers()}


def in_process(takes_host: bool) -> dict[str, Any]:
    """What each program gives in this process, one after the other."""
    install(4)
    rank = int(os.environ["RANK"])
    store = core.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    device, found = torch.device("virtual", rank), {}
    with process_group(takes_host=takes_host, rank=rank, size=2, store=store):
        for name, (work, slots) in PROGRAMS.items():
            mesh = fdp.distributed.init(devices=[device] * slots, timeout=20)
            found[name] = work(mesh, device)
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["for both", "for accelerators alone"])
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What two processes give, by program, with a group for the host too or without."""
    each = fdp.distributed.launch(in_process, 2, request.param, timeout=200, start_method="spawn")
    return {name: [own[name] for own in each] for name in PROGRAMS}


def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"] + p["b"]) - y).square().mean()


def counted(p: Any, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    return ((torch.tanh(x @ p["w"] + p["b"]) - y).square() * mask).sum() / mask.sum().clamp(min=1)


def met(p: Any, x: Tensor, y: Tensor) -> Tensor:
    out = x @ p["w"] + p["b"]
    return (out - fdp.psum(out.sum()) / fdp.psum(len(x)) - y).square().mean()


def centred(p: Any, x: Tensor, y: Tensor) -> Tensor:
    out = x @ p["w"] + p["b"]
    return (out - out.mean() - y).square().mean()


def own(mesh: Any, device: torch.device, rows: tuple[int, int]) -> list[Tensor]:
    return [part.split(rows)[mesh.rank].to(device) for part in (X[: sum(rows)], Y[: sum(rows)])]


def params_on(device: torch.device) -> dict[str, Tensor]:
    return {name: p.to(device) for name, p in PARAMS.items()}


def steps(mesh: Any, device: torch.device) -> Any:
    found = []
    for fn, count in ((loss, None), (counted, lambda p, x, y: (y > 0).sum()), (met, None)):
        step = fdp.value_and_grad(fn, devices=mesh, count=count)
        for rows in ((4, 3), (4, 3), (2, 5), *([(7, 0)] if fn is loss else [])):
            value, grads = step(params_on(device), *own(mesh, device, rows))
            assert {value.device, *(grad.device for grad in grads.values())} == {device}
            found.append((value.cpu(), {name: grad.cpu() for name, grad in grads.items()}))
    return found


def test_steps(found: dict[str, list[Any]]):
    expected = []
    for fn in (loss, counted, centred):
        grads, value = torch.func.grad_and_value(fn)(PARAMS, X, Y)
        expected += [(value, grads)] * (4 if fn is loss else 3)
    for own in found["steps"]:
        assert_close_tree(own, expected)


def calls(mesh: Any, device: torch.device) -> Any:
    x, _ = own(mesh, device, (4, 3))
    p = fdp.replicate({name: q * (1 + mesh.rank) for name, q in params_on(device).items()}, mesh)

    def fn(p: Any, x: Tensor) -> Any:
        out = x @ p["w"]
        return out, out.mean(), out.sum(), out.amax(), torch.tensor(3, device=out.device), fdp.axis_index()

    dims = 0, "mean", "sum", "max", None, "list"
    *whole, places = fdp.dp_apply(fn, p, x, mesh, out_dims=dims)
    w = PARAMS["w"].to(device).requires_grad_()
    fdp.dp_apply(lambda w, x: (x @ w).sin().sum(), w, x, mesh, out_dims="sum").backward()
    assert w.grad is not None
    rows = fdp.gather(fdp.scatter(x, mesh), across=True)
    return [part.cpu() for part in whole], places, w.grad.cpu(), rows.cpu()


@pytest.mark.parametrize("slots", [1, 2])
def test_other_calls(found: dict[str, list[Any]], slots: int):
    out = X @ PARAMS["w"]
    whole = [out.mean(), out.sum(), out.amax(), torch.tensor(3)]
    grad = torch.func.grad(lambda w: (X @ w).sin().sum())(PARAMS["w"])
    for rank, own in enumerate(found[f"calls on {slots}"]):
        places = list(range(rank * slots, (rank + 1) * slots))
        assert_close_tree(own, ([out.split((4, 3))[rank], *whole], places, grad, X))


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(mesh: Any, device: torch.device) -> Any:
    step = fdp.value_and_grad(loss, devices=mesh)
    wider = {**params_on(device), "more": torch.ones(2 + mesh.rank, device=device)}
    return said(lambda: step(wider, *own(mesh, device, (4, 3))))


def failing(mesh: Any, device: torch.device) -> Any:
    odd = [False]

    def fn(p: Any, x: Tensor, y: Tensor) -> Tensor:
        if odd[0]:
            raise KeyError("odd")
        return loss(p, x, y)

    step = fdp.value_and_grad(fn, devices=mesh)
    arguments = params_on(device), *own(mesh, device, (4, 3))
    step(*arguments)
    odd[0] = mesh.rank == 1
    return said(lambda: step(*arguments)), said(lambda: step(*arguments))


def test_what_is_refused_before_anything_was_sent_ends_nothing(found: dict[str, list[Any]]):
    for text in found["refused"]:
        assert "do not fit together: args[0]['more'] float32[2] in process 0, " in text
        assert "end the program" not in text


def test_a_failure_is_said_and_ends_the_job(found: dict[str, list[Any]]):
    """The connections between accelerators cannot be made anew."""
    (first, *_), (second, *_) = found["failing"]
    assert "fails: process 1 has raised KeyError: 'odd'" in first
    assert second == "KeyError: 'odd'"
    for _, after in found["failing"]:
        assert "The connections between accelerators cannot be made anew: end the program" in after


def waits(mesh: Any, device: torch.device) -> Any:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    apply, (params, _) = fdp.functional(module)
    params = {name: numbers(*p.shape).to(device) for name, p in params.items()}
    x, y = own(mesh, device, (4, 3))

    def fn(p: Any, x: Tensor, y: Tensor) -> Any:
        out = apply((p, {}), x)[0][:, 0]
        return F.mse_loss(out, y), {"mean": out.mean(0), "largest": out.amax()}

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "microbatches": {"microbatches": 2},
        "seed": {"seed": 1},
        "count": {"count": lambda p, x, y: (y > 0).sum()},
    }
    found = {}
    for name, options in kinds.items():
        how: Any = {"has_aux": True, "aux_dims": {"mean": "mean", "largest": "sum"}, "devices": mesh, **options}
        step = fdp.value_and_grad(fn, **how)
        step(params, x, y)
        with host_waits.counted() as counts:
            step(params, x, y)
        found[name] = dict(counts)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1), nn.Flatten(0)).double().to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(numbers(*p.shape))
    backward = fdp.backward(model, lambda model, x, y: F.mse_loss(model(x), y), devices=mesh)
    backward(x, y)
    with host_waits.counted() as counts:
        backward(x, y)
    return found | {"backward": dict(counts)}


def test_steps_wait_for_their_device_where_a_count_is_read_alone(found: dict[str, list[Any]]):
    for own in found["waits"]:
        ((line, times),) = own.pop("count").items()
        assert line.startswith("copy to the host in _transforms/")
        assert times == 1
        assert own == {"plain": {}, "microbatches": {}, "seed": {}, "backward": {}}


PROGRAMS: dict[str, tuple[Callable[[Any, torch.device], Any], int]] = {
    "refused": (refused, 1),  # the first
    "steps": (steps, 1),
    "calls on 1": (calls, 1),
    "calls on 2": (calls, 2),
    "waits": (waits, 1),
    "failing": (failing, 1),  # the last
}
