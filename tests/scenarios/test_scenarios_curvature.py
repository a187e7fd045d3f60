"""Private training and curvature: transforms inside and outside of a mapped model, against one device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import fdp
from tests.common.comparing import assert_close_tree, unharmed
from tests.common.containers import tensors_of
from tests.common.depth import few
from tests.common.numbers import COUNTS, numbers
from tests.common.threads import side_by_side

VOCABULARY, LENGTH, WIDTH = 5, 4, 4
BOUND = 2.0
each_executor = pytest.mark.parametrize("executor", ["sequential", "threads"])
each_count = pytest.mark.parametrize("slots", COUNTS)


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    with side_by_side(7):
        yield


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)  # (B, heads, T, ...)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position))


def model() -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        apply, (params, _) = fdp.functional(Transformer().double())
    return apply, params


APPLY, PARAMS = model()
TANGENT = {name: numbers(*value.shape) for name, value in PARAMS.items()}
TOKENS = (numbers(32, LENGTH) * 1000).long() % VOCABULARY
LABELS = TOKENS.roll(-1, 1)


def losses(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """One a row."""
    logits, _ = APPLY((params, {}), tokens)
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def loss(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return losses(params, tokens, labels).mean()


def row_loss(params: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(params, tokens[None], labels[None])


def clipped(chunk_size: int | None) -> Callable[..., Any]:
    """The sum of the gradients of the rows, none of which is longer than `BOUND`; and how many were."""

    def fn(params: Any, tokens: Tensor, labels: Tensor) -> Any:
        grads = vmap(grad(row_loss), in_dims=(None, 0, 0), chunk_size=chunk_size)(params, tokens, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)  # (rows,)
        factors = (BOUND / norms).clamp(max=1)
        summed = {name: torch.einsum("b,b...->...", factors, g) for name, g in grads.items()}
        return summed, norms

    return fn


@functools.cache
def clipped_by_hand(rows: int) -> Any:
    """One row after the other, by plain autograd."""
    sums, norms = {name: torch.zeros_like(value) for name, value in PARAMS.items()}, []
    for i in range(rows):
        params = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
        grads = torch.autograd.grad(row_loss(params, TOKENS[i], LABELS[i]), list(params.values()))
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
        for name, g in zip(params, grads, strict=True):
            sums[name] = sums[name] + g * min(1.0, BOUND / float(norms[-1]))
    return sums, torch.stack(norms)


# ---- private training


@few(3)
@pytest.mark.parametrize("executor", ["auto", "sequential", "threads"])
@pytest.mark.parametrize("chunk_size", [None, 4])
@each_count
@pytest.mark.parametrize("rows", [32, 8, 3, 1])
def test_clipped_gradients_of_rows(rows: int, slots: int, chunk_size: int | None, executor: Any):
    """32 rows: on 3 slots 11, 11 and 10, which 4 does not divide."""
    with unharmed(PARAMS, TOKENS, LABELS):
        got = fdp.dp_apply(
            clipped(chunk_size),
            *(PARAMS, (TOKENS[:rows], LABELS[:rows]), fdp.virtual_devices(slots)),
            out_dims=("sum", 0),
            executor=executor,
        )
    assert_close_tree(got, clipped_by_hand(rows))
    want = clipped_by_hand(32)
    assert want[1].min() < BOUND < want[1].max()  # some rows are clipped, others are not


@each_executor
def test_private_training(executor: Any):
    """Ten steps with the same noise: the parameters of one device."""

    def train(gradients: Callable[..., Any]) -> Any:
        params, generator = PARAMS, torch.Generator().manual_seed(0)
        for _ in range(10):
            sums, _ = gradients(params, TOKENS, LABELS)
            noise = {name: torch.randn(v.shape, generator=generator, dtype=v.dtype) for name, v in params.items()}
            params = {name: v - 0.3 * (sums[name] + 0.1 * noise[name]) / 32 for name, v in params.items()}
        return params

    fn = clipped(None)
    mapped = fdp.shard_map(
        fn, devices=fdp.virtual_devices(3), in_dims=(None, 0, 0), out_dims=("sum", 0), executor=executor
    )
    assert_close_tree(train(mapped), train(fn), rtol=1e-9)


# ---- transforms outside


def hvp_forward(fn: Callable[..., Any], params: Any) -> Any:
    return jvp(grad(fn), (params,), (TANGENT,))[1]


def hvp_reverse(fn: Callable[..., Any], params: Any) -> Any:
    return vjp(grad(fn), params)[1](TANGENT)[0]


def stack(params: Any) -> Any:
    return {name: torch.stack([value, value * 0.5, value + 0.1]) for name, value in params.items()}


def some(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As a function of one block's parameters only, so that Jacobians stay small."""
    return lambda part: fn(PARAMS | part)


PART = {name: value for name, value in PARAMS.items() if name.startswith("blocks.1.norm")}

OUTSIDE: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda fn: grad(fn)(PARAMS),
    "jacrev": lambda fn: jacrev(some(fn))(PART),
    "jvp": lambda fn: jvp(fn, (PARAMS,), (TANGENT,)),
    "Hessian-vector, forward over reverse": lambda fn: hvp_forward(fn, PARAMS),
    "Hessian-vector, reverse over reverse": lambda fn: hvp_reverse(fn, PARAMS),
    "vmap over parameters": lambda fn: vmap(fn)(stack(PARAMS)),
    "vmap of grad over parameters": lambda fn: vmap(grad(fn))(stack(PARAMS)),
    "Gauss-Newton-vector": lambda fn: vjp(fn, PARAMS)[1](jvp(fn, (PARAMS,), (TANGENT,))[1])[0],
}
BATCH = TOKENS[:8], LABELS[:8]


def assert_right(outside: str, mapped: Callable[..., Any], plain: Callable[..., Any], repeat: int = 1) -> None:
    want = OUTSIDE[outside](plain)
    assert max(float(tensor.abs().max()) for tensor in tensors_of(want)) > 1e-3
    for _ in range(repeat):
        assert_close_tree(OUTSIDE[outside](mapped), want, rtol=1e-9)


@few()
@each_executor
@each_count
@pytest.mark.parametrize("outside", OUTSIDE)
def test_transforms_of_the_mapped_loss(outside: str, slots: int, executor: Any):
    """8 rows; `"mean"` weights the shards by their rows."""
    devices = fdp.virtual_devices(slots)
    mapped = fdp.shard_map(loss, devices=devices, in_dims=(None, 0, 0), out_dims="mean", executor=executor)
    assert_right(outside, lambda p: mapped(p, *BATCH), lambda p: loss(p, *BATCH), repeat=2)


@few()
@each_executor
@pytest.mark.parametrize("outside", OUTSIDE)
def test_transforms_of_clipped_gradients(outside: str, executor: Any):
    """Transforms on both sides: how long the private gradient is."""

    def length(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params: sum(g.pow(2).sum() for g in of(params, TOKENS[:4], LABELS[:4])[0].values())

    mapped = fdp.shard_map(
        clipped(2), devices=fdp.virtual_devices(3), in_dims=(None, 0, 0), out_dims=("sum", 0), executor=executor
    )
    assert_right(outside, length(mapped), length(clipped(None)))


# ---- gradient penalty


def critic(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["first"]) @ params["last"]  # (rows,)


CRITIC = {"first": numbers(3, 4), "last": numbers(4)}
POINTS = numbers(13, 3)


def penalty(params: Any, x: Tensor) -> Tensor:
    """(‖∂critic/∂x‖ - 1)², by plain autograd, as scripts have it."""
    x = x.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(critic(params, x).sum(), x, create_graph=True)
    return critic(params, x).mean() + 10 * (slopes.norm(dim=1) - 1).square().mean()


def differentiable(tree: Any) -> Any:
    return {name: value.clone().requires_grad_() for name, value in tree.items()}


@few()
@each_executor
@each_count
@pytest.mark.parametrize("rows", [13, 3])
def test_a_gradient_penalty_inside(rows: int, slots: int, executor: Any):
    x, options = POINTS[:rows], {"devices": fdp.virtual_devices(slots), "executor": executor}
    params = differentiable(CRITIC)
    value = penalty(params, x)
    value.backward()
    want = {name: tensor.grad for name, tensor in params.items()}
    got = fdp.value_and_grad(penalty, **options)(CRITIC, x)
    assert_close_tree(got, (value, want))
    mapped = differentiable(CRITIC)
    out = fdp.dp_apply(penalty, mapped, x, out_dims="mean", **options)
    out.backward()
    assert_close_tree((out, {name: tensor.grad for name, tensor in mapped.items()}), (value, want))


@few()
@each_executor
@each_count
@pytest.mark.parametrize("rows", [13, 3])
def test_a_gradient_penalty_outside(rows: int, slots: int, executor: Any):
    """The gradient of what `create_graph` made differentiable: of the whole batch, so it is not a mean over rows."""

    def step(of: Callable[..., Any]) -> Any:
        params = differentiable(CRITIC)
        value, grads = of(params, POINTS[:rows])
        total = value + (torch.stack([g.norm() for g in grads.values()]).norm() - 1).square()
        total.backward()
        return total.detach(), {name: tensor.grad for name, tensor in params.items()}

    def plain_loss(params: Any, x: Tensor) -> Tensor:
        return critic(params, x).square().mean()

    def plain(params: Any, x: Tensor) -> Any:
        value = plain_loss(params, x)
        found = torch.autograd.grad(value, list(params.values()), create_graph=True)
        return value, dict(zip(params, found, strict=True))

    options: Any = {"devices": fdp.virtual_devices(slots), "executor": executor, "create_graph": True}
    for microbatches in (1, 2):
        got = step(fdp.value_and_grad(plain_loss, microbatches=microbatches, **options))
        assert_close_tree(got, step(plain))


# ---- gradgradcheck


@each_count
def test_gradgradcheck_of_scatter(slots: int):
    """Each part in a nonlinear function of its own."""

    def fn(x: Tensor, y: Tensor) -> Any:
        sharded = fdp.scatter({"x": x, "y": [y]}, fdp.virtual_devices(slots), {"x": 0, "y": 1})
        return tuple((part["x"].sum() * (i + 1) * part["y"][0]).sin().sum() for i, part in enumerate(sharded.shards))

    inputs = numbers(5, 2).requires_grad_(), numbers(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


@few()
@each_count
@pytest.mark.parametrize("dims", [0, 1, "mean", "sum", "stack"])
def test_gradgradcheck_of_gather(dims: Any, slots: int):
    def fn(*parts: Tensor) -> Tensor:
        sharded = fdp.Sharded(tuple(part.sin() for part in parts), fdp.virtual_devices(slots))
        return fdp.gather(sharded, dims, weights=range(1, slots + 1) if dims == "mean" else None).square()

    inputs = tuple((numbers(2, 2) + i).requires_grad_() for i in range(slots))
    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


@each_count
@pytest.mark.parametrize("copy", [True, False])
def test_gradgradcheck_of_replicate(copy: bool, slots: int):
    def fn(w: Tensor) -> Any:
        replicated = fdp.replicate({"w": w}, fdp.virtual_devices(slots), copy=copy)
        return tuple((shard["w"] * (i + 1)).sin() for i, shard in enumerate(replicated.shards))

    assert torch.autograd.gradcheck(fn, numbers(3).requires_grad_())
    assert torch.autograd.gradgradcheck(fn, numbers(3).requires_grad_())
