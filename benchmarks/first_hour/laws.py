"""Laws and loops of the first hour: the numbers of one device, and nothing that waits for ever."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fdp

Case = Callable[[Any, Any], Any]
Tree = Any


def net(device: Any, *, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.Tanh(), nn.Linear(16, 1)).double().to(device)


def batch(device: Any, rows: int = 13) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, rows * 8, dtype=torch.float64).reshape(rows, 8)
    return x.to(device), x.sum(1).sin().to(device)


def gradients(devices: Sequence[Any], how: Any, fn: Callable[..., Tensor] | None = None, **options: Any) -> Tree:
    """Loss and gradients of the net on these devices."""
    x, y = batch(devices[0])
    module = net(devices[0])
    apply, (params, _) = fdp.functional(module)
    loss = fn or (lambda p, x, y: F.mse_loss(apply((p, {}), x)[0][:, 0], y))
    return fdp.value_and_grad(loss, devices=devices, executor=how, **options)(params, x, y)


def module_step(devices: Sequence[Any], how: Any, module: nn.Module, x: Tensor, y: Tensor, context: Any = None) -> Tree:
    """Loss and gradients by `fdp.backward`."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with context() if context else contextlib.nullcontext():
            return F.mse_loss(model(x).flatten(1).mean(1), y)

    value = fdp.backward(module, loss, devices=devices, executor=how)(x, y)
    return value, [p.grad for p in module.parameters()]


def checkpointed(devices: Any, how: Any, *, keeps: bool = False) -> Tree:
    module = net(devices[0])
    apply, _ = fdp.functional(module)

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        inner: Any = lambda p, x: apply((p, {}), x)[0]  # noqa: E731
        out: Any = checkpoint(inner, p, x, use_reentrant=False, preserve_rng_state=keeps)
        return F.mse_loss(out[:, 0], y)

    return gradients(devices, how, loss)


def rows_draw(devices: Any, how: Any) -> Tree:
    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) @ p["0.weight"].T).square().mean()

    return gradients(devices, how, loss, seed=3, randomness="rows")


def synchronised_norm(devices: Any, how: Any) -> Tree:
    module = fdp.nn.convert_sync_batchnorm(net(devices[0], norm=nn.BatchNorm1d))
    return module_step(devices, how, module, *batch(devices[0]))


def channels_last(devices: Any, how: Any) -> Tree:
    torch.manual_seed(0)
    module: Any = nn.Conv2d(3, 4, 3, padding=1).double().to(devices[0])
    module = module.to(memory_format=torch.channels_last)
    x = torch.linspace(-1, 1, 12 * 3 * 64, dtype=torch.float64).reshape(12, 3, 8, 8).to(devices[0])
    x = x.to(memory_format=torch.channels_last)
    return module_step(devices, how, module, x, x.mean((1, 2, 3)))


def sparse(devices: Any, how: Any) -> Tree:
    torch.manual_seed(0)
    table = torch.randn(20, 4, dtype=torch.float64).to(devices[0])
    ids = torch.arange(26).reshape(13, 2).remainder(20).to(devices[0])

    def loss(w: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, w, sparse=True).square().mean()

    value, grad = fdp.value_and_grad(loss, devices=devices, executor=how)(table, ids)
    return value, grad.to_dense()


def autocast(devices: Any, how: Any) -> Tree:
    def context() -> Any:
        return torch.autocast(devices[0].type, torch.bfloat16)

    x, y = (t.float() for t in batch(devices[0]))
    return module_step(devices, how, net(devices[0]).float(), x, y, context)


def meeting(devices: Any, how: Any) -> Tree:
    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        out = torch.tanh(x @ p["0.weight"].T + p["0.bias"])
        out = out - fdp.pmean(out.mean(0), weight="rows")
        return out.square().mean()

    return gradients(devices, how, loss)


LAWS: dict[str, tuple[Case, float]] = {
    "value and gradient": (gradients, 1e-9),
    "microbatches": (lambda d, how: gradients(d, how, microbatches=3), 1e-9),
    "activation checkpoint": (checkpointed, 1e-9),
    "collective in the loss": (meeting, 1e-9),
    "rows draw their own": (rows_draw, 1e-9),
    "synchronised batch norm": (synchronised_norm, 1e-9),
    "channels last": (channels_last, 1e-9),
    "sparse gradient": (sparse, 1e-9),
    "autocast to bfloat16": (autocast, 3e-2),
}


def law(name: str, devices: Sequence[Any], how: Any) -> str:
    """Whether the numbers on these devices are those of the first alone."""
    case, tolerance = LAWS[name]
    want, got = tensors(case(devices[:1], "sequential")), tensors(case(devices, how))
    worst = max(
        float((a.cpu() - b.cpu()).abs().max() / (1 + b.cpu().abs().max())) for a, b in zip(got, want, strict=True)
    )
    return "right" if worst <= tolerance else f"WRONG: off by {worst:.2g}"


def seeds(devices: Sequence[Any], how: Any) -> str:
    """Two runs with a seed are the same, and the caller's generators are untouched."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) @ p["0.weight"].T).square().mean()

    before = torch.get_rng_state()
    first, second = (tensors(gradients(devices, how, loss, seed=1)) for _ in range(2))
    same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))
    return "right" if same and torch.equal(before, torch.get_rng_state()) else "WRONG"


def tensors(tree: Tree) -> list[Tensor]:
    return [x.detach() for x in tree_leaves(tree) if isinstance(x, Tensor)]


# ---- what has waited for ever on stand-ins


class InPlace(nn.Module):
    """Its hook leads back to it, so that it is called in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_forward_hook(lambda module, args, out: self and None)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.5))


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"seed": 3}, {"seed": 3, "randomness": "rows"})


def loops(devices: Sequence[Any], how: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A checkpoint around what each of these does. In threads it keeps no generator: that is refused."""
    keeps = how != "threads"
    x, y = batch(devices[0])
    plain, odd = net(devices[0]), InPlace().double().to(devices[0])
    inside = {
        "functional_call": (plain, lambda p, x: torch.func.functional_call(plain, p, (x,))),
        "a module called in place": (odd, lambda p, x: torch.func.functional_call(odd, p, (x,))),
        "dropout": (plain, lambda p, x: F.dropout(x @ p["0.weight"].T, 0.5).sum(1, keepdim=True)),
    }
    for name, (module, call) in inside.items():
        for options in OPTIONS:
            params = {key: p.detach() for key, p in module.named_parameters()}

            def loss(p: Tree, x: Tensor, y: Tensor, call: Any = call) -> Tensor:
                out: Any = checkpoint(call, p, x, use_reentrant=False, preserve_rng_state=keeps)
                return F.mse_loss(out[:, 0], y)

            step = fdp.value_and_grad(loss, devices=devices, executor=how, **options)
            said = ", ".join(f"{key}={value!r}" for key, value in options.items())
            yield f"{name}{' with ' if said else ''}{said}", lambda step=step, params=params: step(params, x, y)

    def meets(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        def block(p: Tree, x: Tensor) -> Tensor:
            return x @ p["0.weight"].T - fdp.pmean((x @ p["0.weight"].T).mean(0))

        context: Any = fdp.checkpoint_context
        out: Any = checkpoint(block, p, x, use_reentrant=False, preserve_rng_state=keeps, context_fn=context)
        return out.square().mean()

    params = {key: p.detach() for key, p in plain.named_parameters()}
    step = fdp.value_and_grad(meets, devices=devices, executor=how)
    yield "a collective", lambda: step(params, x, y)
