# pyright: strict
"""A program of a user's that calls every public function once: `make check-types` reads it in strict mode.

An argument that loses its type, or a result that has none, is an error here before users see it.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fdp


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().mean()


def loss_with_aux(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return loss(w, x), loss(w, x)


def rows_of(w: Tensor, x: Tensor) -> int:
    return len(x)


def devices_and_seeds() -> None:
    devices: tuple[torch.device, ...] = fdp.virtual_devices(2)
    assert fdp.available_devices()
    seed: int = fdp.fold_in(0, 1)
    assert seed != fdp.fold_in(0, len(devices))


def functions(w: Tensor, x: Tensor, devices: tuple[torch.device, ...]) -> None:
    out: Tensor = fdp.dp_apply(torch.mul, w, x, devices)
    also: Tensor = fdp.shard_map(torch.mul, devices=devices, in_dims=(None, 0), out_dims=fdp.AUTO)(w, x)
    torch.testing.assert_close(out, also)
    value, grad = fdp.value_and_grad(loss, devices=devices)(w, x)
    step = fdp.value_and_grad(loss_with_aux, has_aux=True, devices=devices, count=rows_of, aux_weight="count")
    (_, aux), _ = step(w, x)
    torch.testing.assert_close(aux, value)
    for other in (fdp.grad(loss, devices=devices)(w, x), fdp.grad_and_value(loss, devices=devices)(w, x)[0]):
        torch.testing.assert_close(other, grad)
    plan: fdp.Plan = fdp.explain(loss, w, x, devices, out_dims="mean")
    leaf: fdp.PlannedLeaf = plan.arguments[0]
    assert leaf.path in str(plan)
    assert value.ndim == 0


def data(x: Tensor) -> None:
    batches: fdp.Batches = fdp.Batches(len(x), 2, seed=0, shuffle=True, drop_last=False)
    rows: Tensor = batches[batches.per_epoch]
    for own in batches.loader(x, None, start=0, steps=1, num_workers=0):
        assert len(own) == len(rows)


def state(w: Tensor, x: Tensor, devices: tuple[torch.device, ...]) -> None:
    sharded: fdp.Sharded = fdp.scatter(x, devices)
    everywhere: fdp.Replicated = fdp.replicate(w, devices)
    with fdp.transfers() as log:
        products = fdp.parallel_apply(torch.mul, everywhere, sharded)
    doubled: fdp.Replicated = everywhere.map(torch.add, everywhere)
    assert len(doubled) == len(devices)
    moved: list[fdp.Transfer | fdp.Collective] = list(log)
    assert not moved  # all slots are on the CPU
    picture: fdp.Picture = fdp.visualize(products)
    assert str(picture)
    for batch in fdp.prefetch([x, x], devices):
        assert len(batch.shards) == len(devices)
    torch.testing.assert_close(fdp.gather(products, 0), fdp.unreplicate(everywhere) * x)


def collectives(x: Tensor, devices: tuple[torch.device, ...]) -> None:
    def mapped(x: Tensor) -> Tensor:
        index: int = fdp.axis_index()
        size: int = fdp.axis_size()
        assert 0 <= index < size
        assert fdp.axis_rows() == len(x)
        total: Tensor = fdp.psum(x.sum()) + fdp.pmax(x.amax()) + fdp.pmin(x.amin()) + fdp.pmean(x.mean(), weight=len(x))
        every: Tensor = fdp.all_gather(total, stack=True)
        own: Tensor = fdp.psum_scatter(every)
        crossed: Tensor = fdp.all_to_all(every, split_dim=0, concat_dim=0)
        return own + crossed.sum() + fdp.ppermute(total, [(0, 1), (1, 0)])

    fdp.shard_map(mapped, devices=devices)(x)

    for context in fdp.checkpoint_context():  # for torch.utils.checkpoint, whose types are not complete
        with context:
            pass


def modules(x: Tensor, devices: tuple[torch.device, ...]) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    synchronised: nn.Sequential = fdp.nn.convert_sync_batchnorm(network)
    assert isinstance(synchronised[1], fdp.nn.SyncBatchNorm)
    warnings.simplefilter("ignore", fdp.nn.BatchNormWarning)
    apply, (params, buffers) = fdp.functional(synchronised)
    out, _ = fdp.dp_apply(apply, (params, buffers), x, devices)
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    torch.testing.assert_close(fdp.functional_call(network, parameters, x), out)
    fdp.set_grads(network, parameters)
    fdp.set_buffers(synchronised, buffers)

    def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    value = fdp.backward(synchronised, mean, devices=devices, microbatches=2)(x)
    value.item()
    fdp.DataParallel(network, device_ids=["cpu", "cpu"])(x)
    fdp.data_parallel(network, x, ["cpu", "cpu"])
    inputs: Any = fdp.nn.scatter(x, ["cpu", "cpu"])
    fdp.nn.scatter_kwargs((x,), {}, ["cpu", "cpu"])
    copies: Any = fdp.nn.replicate(network, ["cpu", "cpu"])
    fdp.nn.gather(fdp.nn.parallel_apply(copies, inputs), "cpu")


def helpers(w: Tensor, x: Tensor) -> None:
    fdp.testing.assert_data_parallel(loss, w, x, out_dims="mean")
    assert not fdp.testing.find_nonfinite(torch.mul, w, x)
    with fdp.testing.fail_slot(1):
        pass
    assert callable(fdp.testing.install_virtual_accelerator)  # which stays for the life of the process


def processes(x: Tensor, folder: Path) -> None:
    with fdp.distributed.init(devices="cpu") as mesh:
        own: fdp.distributed.Mesh = mesh
        assert own.rank == 0
        checkpoints = fdp.distributed.Checkpoints(folder, mesh=own)
        checkpoints.save(1, {"x": own.local(x)})
        assert checkpoints.restore() is not None
    assert callable(fdp.distributed.launch)


def main(folder: Path) -> None:
    devices, w, x = fdp.virtual_devices(2), torch.ones(3), torch.randn(4, 3)
    devices_and_seeds()
    functions(w, x, devices)
    data(x)
    state(w, x, devices)
    collectives(x, devices)
    modules(x, devices)
    helpers(w, x)
    processes(x, folder)
