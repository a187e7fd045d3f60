# pyright: reportMissingImports=false
"""The contender that is JAX: the five models in jax.numpy, and their gradients under jit and shard_map.

Parameters have torch's names and layouts, but convolutions have the layout that XLA prefers: NHWC and HWIO.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.peers.models import Figures, build
from benchmarks.peers.process import Case, Job, Unavailable

Params = dict[str, Any]


def jax_shard_map(job: Job, name: str) -> Case:
    """One process with a virtual CPU device for each slot; arguments are on their devices before the clock starts."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.slots}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        import jax
    except ImportError:
        raise Unavailable('JAX is not installed: pip install -e ".[bench]"') from None
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((job.slots,), ("data",))
    whole, split = PartitionSpec(), PartitionSpec("data")
    model, images, labels = build(name)
    params = {key: to_jax(value.detach()) for key, value in model.named_parameters()}
    forward = FORWARDS[name]

    def shard(params: Params, x: Any, y: Any) -> Any:
        def loss(params: Params) -> Any:
            picked = jax.nn.log_softmax(forward(params, x))[np.arange(y.shape[0]), y]
            return -picked.mean()

        return jax.lax.pmean(jax.value_and_grad(loss)(params), "data")

    # Without the check of what varies: with it, the gradient of a replicated argument is summed already.
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(whole, split, split), out_specs=whole, check_vma=False)
    compiled = jax.jit(mapped)
    placed = jax.device_put(params, NamedSharding(mesh, whole))
    x = images.permute(0, 2, 3, 1) if images.ndim == 4 else images
    rows = jax.device_put((x.contiguous().numpy(), labels.int().numpy()), NamedSharding(mesh, split))

    def read(out: Any) -> Figures:
        return float(out[0]), {key: to_torch(value) for key, value in out[1].items()}

    return Case(lambda: jax.block_until_ready(compiled(placed, *rows)), read)


def to_jax(weight: torch.Tensor) -> np.ndarray:
    return (weight.permute(2, 3, 1, 0) if weight.ndim == 4 else weight).contiguous().numpy()


def to_torch(grad: Any) -> torch.Tensor:
    found = torch.from_numpy(np.array(grad))
    return found.permute(3, 2, 0, 1) if found.ndim == 4 else found


def mlp(p: Params, x: Any) -> Any:
    from jax.nn import relu

    return linear(p, "4", relu(linear(p, "2", relu(linear(p, "0", x)))))


def cnn(p: Params, x: Any) -> Any:
    from jax.nn import relu

    for i in (0, 4, 8):
        x = pool(relu(batch_norm(p, str(i + 1), conv(p[f"{i}.weight"], x))))
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)  # flattened as torch does
    return linear(p, "13", x)


def encoder(p: Params, x: Any) -> Any:
    from jax.nn import relu

    for i in range(2):
        at = f"encoder.layers.{i}"
        x = layer_norm(p, f"{at}.norm1", x + attention(p, f"{at}.self_attn", x))
        x = layer_norm(p, f"{at}.norm2", x + linear(p, f"{at}.linear2", relu(linear(p, f"{at}.linear1", x))))
    return linear(p, "head", x.mean(1))


def recurrent(p: Params, x: Any) -> Any:
    import jax
    from jax import numpy as jnp

    bias = p["lstm.bias_ih_l0"] + p["lstm.bias_hh_l0"]
    projected = (x @ p["lstm.weight_ih_l0"].T + bias).swapaxes(0, 1)  # (length, rows, 4 * hidden)
    weight = p["lstm.weight_hh_l0"].T

    def cell(state: Any, at: Any) -> Any:
        hidden, memory = state
        i, f, g, o = jnp.split(at + hidden @ weight, 4, axis=-1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

    zeros = jnp.zeros((x.shape[0], weight.shape[0]), x.dtype)
    (hidden, _), _ = jax.lax.scan(cell, (zeros, zeros), projected)
    return linear(p, "head", hidden)


FORWARDS: dict[str, Callable[[Params, Any], Any]] = {
    "small MLP": mlp,
    "wide MLP": mlp,
    "CNN": cnn,
    "transformer": encoder,
    "LSTM": recurrent,
}


def linear(p: Params, at: str, x: Any) -> Any:
    return x @ p[f"{at}.weight"].T + p[f"{at}.bias"]


def conv(weight: Any, x: Any) -> Any:
    import jax

    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x: Any) -> Any:
    """A maximum over 2 x 2, by a reshape: much faster on CPU than reduce_window and its gradient."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def batch_norm(p: Params, at: str, x: Any) -> Any:
    return _normalised(x, (0, 1, 2)) * p[f"{at}.weight"] + p[f"{at}.bias"]


def layer_norm(p: Params, at: str, x: Any) -> Any:
    return _normalised(x, (-1,)) * p[f"{at}.weight"] + p[f"{at}.bias"]


def _normalised(x: Any, axes: tuple[int, ...]) -> Any:
    import jax

    mean = x.mean(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def attention(p: Params, at: str, x: Any, heads: int = 4) -> Any:
    import jax
    from jax import numpy as jnp

    n, length, width = x.shape
    joined = x @ p[f"{at}.in_proj_weight"].T + p[f"{at}.in_proj_bias"]
    q, k, v = (part.reshape(n, length, heads, -1) for part in jnp.split(joined, 3, axis=-1))
    scores = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(width // heads), axis=-1)
    mixed = jnp.einsum("nhqk,nkhd->nqhd", scores, v).reshape(n, length, width)
    return linear(p, f"{at}.out_proj", mixed)
