"""What dp_apply holds at its peak: 8 virtual slots beside one, and the bytes that scatter copies.

Target: within 5 % of one slot plus the joined output; scatter on one device copies nothing.
"""

from collections.abc import Callable

import torch
from _measure import peak_bytes

import fdp

ROWS, WIDTH = 16384, 1024
Params = dict[str, torch.Tensor]


def mlp(params: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ params["in"]) @ params["out"]


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return mlp(params, x).square().mean()


def report(title: str, run: Callable[[int], object], joined: int) -> None:
    run(1)
    one, eight = (min(peak_bytes(lambda k=k: run(k)) for _ in range(3)) for k in (1, 8))
    allowed = one + joined
    print(
        f"{title:36} {one / 2**20:8.0f} MiB {eight / 2**20:8.0f} MiB {eight / allowed:8.1%} of one slot + joined output"
    )


def main() -> None:
    x = torch.randn(ROWS, WIDTH)
    params = {"in": torch.randn(WIDTH, 4 * WIDTH), "out": torch.randn(4 * WIDTH, WIDTH)}
    tracked = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    output = x.numel() * x.element_size()
    print(f"{'':36} {'1 slot':>12} {'8 slots':>12}")
    with torch.no_grad():
        report("dp_apply", lambda k: fdp.dp_apply(mlp, params, x, fdp.virtual_devices(k)), output)
    report("dp_apply, graph kept", lambda k: fdp.dp_apply(mlp, tracked, x, fdp.virtual_devices(k)), output)
    report("value_and_grad", lambda k: fdp.value_and_grad(loss, devices=fdp.virtual_devices(k))(params, x), 0)
    scattered = peak_bytes(lambda: fdp.scatter(x, fdp.virtual_devices(8)))
    views = all(
        s.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for s in fdp.scatter(x, ["cpu"] * 8).shards
    )
    print(f"scatter of {output / 2**20:.0f} MiB to 8 slots: {scattered / 2**20:.1f} MiB more; all views: {views}")


if __name__ == "__main__":
    main()
