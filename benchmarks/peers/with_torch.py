"""The contenders that are torch: plain, fdp and DistributedDataParallel. Each runs in a process of its own."""

import datetime
import os
import shutil
import sys
from typing import Any

import torch
from torch.nn import functional as F

import fdp
from benchmarks.peers.models import Figures, build, loss_and_gradients
from benchmarks.peers.process import Case, Job, Unavailable

# A rank whose partner has failed gives up after this.
GLOO_TIMEOUT = datetime.timedelta(seconds=120)


def plain(job: Job, name: str) -> Case:
    """The whole batch, all cores."""
    return _module_case(name, parts=1)


def one_shard(job: Job, name: str) -> Case:
    """The share of one slot, with the cores of one slot and nothing beside it."""
    return _module_case(name, parts=job.slots)


def _module_case(name: str, parts: int) -> Case:
    model, x, y = build(name)
    x, y = x.tensor_split(parts)[0].clone(), y.tensor_split(parts)[0].clone()
    names = [name for name, _ in model.named_parameters()]

    def read(out: tuple[torch.Tensor, list[torch.Tensor]]) -> Figures:
        return out[0].item(), dict(zip(names, out[1], strict=True))

    return Case(lambda: loss_and_gradients(model, x, y), read)


def fdp_sequential(job: Job, name: str) -> Case:
    return _fdp_case(job, name, "sequential", compiled=False)


def fdp_threads(job: Job, name: str) -> Case:
    return _fdp_case(job, name, "threads", compiled=False)


def fdp_compiled(job: Job, name: str) -> Case:
    _begin_to_compile()
    return _fdp_case(job, name, "threads", compiled=True)


def fdp_compiled_step(job: Job, name: str) -> Case:
    """Split, shards, gradients and their sum in one graph, which JAX's `jit` has in one too."""
    if name == "LSTM":
        raise Unavailable("the compiler unrolls an LSTM, step by step: minutes until it has compiled")
    _begin_to_compile()
    model, x, y = build(name)
    step, args = fdp_step(model, fdp.virtual_devices(job.slots), "sequential")
    compiled = torch.compile(lambda *args: step(*args), fullgraph=True, dynamic=False)
    return Case(lambda: compiled(*args, x, y), lambda out: (out[0].item(), out[1]))


def _begin_to_compile() -> None:
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise Unavailable("no C++ compiler for torch.compile")
    torch.compiler.reset()


def _fdp_case(job: Job, name: str, executor: Any, *, compiled: bool) -> Case:
    model, x, y = build(name)
    step, args = fdp_step(model, fdp.virtual_devices(job.slots), executor, compiled=compiled)
    return Case(lambda: step(*args, x, y), lambda out: (out[0].item(), out[1]))


def fdp_step(model: torch.nn.Module, devices: Any, executor: Any, *, compiled: bool = False) -> tuple[Any, Any]:
    """What a user of fdp writes: a function of `(params, buffers, x, y)`, and the first two of its arguments."""
    apply, state = fdp.functional(model)

    def loss(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, _ = apply((params, buffers), x)
        return F.cross_entropy(out, y)

    fn = torch.compile(loss) if compiled else loss
    return fdp.value_and_grad(fn, in_dims=(None, None, 0, 0), devices=devices, executor=executor), state


def fdp_mesh(job: Job, name: str) -> Case:
    """One process of a mesh over gloo, with one slot."""
    _join(job)
    model, x, y = build(name)
    x, y = x.tensor_split(job.slots)[job.rank].clone(), y.tensor_split(job.slots)[job.rank].clone()
    step, args = fdp_step(model, fdp.distributed.init(), "auto")
    return Case(lambda: step(*args, x, y), lambda out: (out[0].item(), out[1]))


def ddp(job: Job, name: str) -> Case:
    """One rank of DistributedDataParallel over gloo, at its best: gradients are views of its buckets.

    Running statistics are not broadcast, since the others do not keep them in step either.
    """
    from torch import distributed as dist

    _join(job)
    model, x, y = build(name)
    x, y = x.tensor_split(job.slots)[job.rank].clone(), y.tensor_split(job.slots)[job.rank].clone()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)

    def step() -> torch.Tensor:
        wrapped.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        return loss.detach()

    def read(loss: torch.Tensor) -> Figures:
        mean = loss.clone()
        dist.all_reduce(mean)  # outside of what is timed: users of DDP do not average the loss at each step
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return mean.item() / job.slots, grads

    return Case(step, read)


def _join(job: Job) -> None:
    """Find the other processes of a contender."""
    from torch import distributed as dist

    if not dist.is_gloo_available():
        raise Unavailable("this torch has no gloo")
    if not dist.is_initialized():
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        url = f"file://{job.rendezvous}-{job.function}"  # a TCP store would listen on all interfaces
        dist.init_process_group("gloo", init_method=url, rank=job.rank, world_size=job.slots, timeout=GLOO_TIMEOUT)
