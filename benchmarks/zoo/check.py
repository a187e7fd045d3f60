"""One model on one device, and on three slots in two ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import fdp
from benchmarks.zoo.model import SIZES, LeftOut, Model, Ways

DEVICES = fdp.virtual_devices(len(SIZES))
CLOSE = 1e-5  # of the largest entry: many models compute in float32 inside, whatever the dtype of their parameters
NOISE = 1e-8  # of the largest gradient of all: a gradient that is zero but for rounding


class Verdict(NamedTuple):
    """What came of a model, and why."""

    kind: str
    why: str = ""


WORKS, CACHE = "works", "works, with use_cache=False"
BUILD, ALONE = "cannot be built", "does not run by itself"
MEETS, DRAWS, KEEPS = "rows meet", "draws random numbers", "keeps results"
RAISES, DIFFERS, SLOW = "fdp raises", "fdp differs", "stopped"
FAULTS = (RAISES, DIFFERS)
TRIED = (WORKS, CACHE, RAISES, DIFFERS)


class Differs(Exception):
    """Numbers or classes that are not those of one device."""


def verdict(ways: Ways) -> Verdict:
    """Try the ways of building a model, and then compare."""
    problems: list[Verdict] = []
    for way in ways:
        try:
            model = way()
        except Exception as error:
            problems.append(Verdict(BUILD, said(error)))
            continue
        try:
            whole = alone(model)
        except Exception as error:
            problems.append(out_of_memory(error) or Verdict(ALONE, said(error)))
            continue
        return compared(model, whole)
    further = [problem for problem in problems if problem.kind != BUILD]
    return (further or problems or [Verdict(BUILD, "no way to build it is known")])[0]


def out_of_memory(error: Exception) -> Verdict | None:
    """The verdict if that is what has happened."""
    return Verdict(SLOW, "out of memory") if "can't allocate memory" in str(error) else None


def said(error: BaseException) -> str:
    """The kind of an error and how its message begins."""
    first = " ".join(map(str.strip, str(error).strip().split("\n")[:2]))
    return (first if isinstance(error, LeftOut | Differs) else f"{type(error).__name__}: {first}")[:300]


def compared(model: Model, whole: Any) -> Verdict:
    """The verdict on a model that runs by itself."""
    if differs_from(whole, alone(model, seed=1)):
        return Verdict(DRAWS, "two calls by itself differ in eval mode")
    try:
        gradients(model.module, whole)
    except Exception as error:
        return Verdict(ALONE, f"no gradients: {said(error)}")
    if why := meeting(model, whole):
        return Verdict(MEETS, why)
    if why := kept_by(model, whole):
        return Verdict(KEEPS, why)
    try:
        as_it_is = [runs_as_it_is(way, model, whole) for way in (with_data_parallel, in_functions)]
        return Verdict(WORKS if all(as_it_is) else CACHE)
    except LeftOut as error:
        return Verdict(ALONE, said(error))
    except Differs as error:
        return Verdict(DIFFERS, said(error))
    except Exception as error:
        return out_of_memory(error) or Verdict(RAISES, said(error))


def alone(model: Model, seed: int = 0) -> Any:
    """The output on one device, which must say something."""
    torch.manual_seed(seed)
    out = model.module(**model.batch)
    tensors = [tensor for _, tensor in tensors_of(out) if tensor.is_floating_point()]
    if not tensors or not all(tensor.isfinite().any() for tensor in tensors):
        raise LeftOut("its output has no finite number")
    return out


def meeting(model: Model, whole: Any) -> str:
    """Why no split gives what the whole batch gives, if so: seen without fdp, by calls with the rows of each slot."""
    names = list(model.batch)
    columns = [model.batch[name].split(SIZES) for name in names]
    try:
        outs = [model.module(**dict(zip(names, part, strict=True))) for part in zip(*columns, strict=True)]
    except Exception as error:
        return f"with fewer rows it does not run by itself: {said(error)}"
    parts = [dict(tensors_of(out)) for out in outs]
    for path, expected in tensors_of(whole):
        if any(path not in part for part in parts):
            return f"{path} is not there with fewer rows"
        shards = [part[path] for part in parts]
        if [len(shard) if shard.ndim else -1 for shard in shards] != list(SIZES):
            return f"{path} of shape {list(expected.shape)} has no row for each sample"
        if not all(shard.shape[1:] == expected.shape[1:] for shard in shards) or not close(torch.cat(shards), expected):
            return f"{path} of a row depends on the other rows"
    joined = {path: torch.cat([part[path] for part in parts]) for path, _ in tensors_of(whole)}
    return gradients_differ(gradients(model.module, whole), gradients(model.module, joined))


def kept_by(model: Model, whole: Any) -> str:
    """What torch's own `functional_call` changes on one device: an earlier call has left results in the module."""
    own = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.module.named_parameters()}
    out = functional_call(model.module, own, (), model.batch)
    where = "torch.func.functional_call differs too"
    if why := differs_from(whole, out):
        return f"{where}: {why}"
    expected = gradients(model.module, whole)
    trained = {name: own[name] for name in expected}
    why = gradients_differ(expected, gradients_in(trained, out))
    return f"{where}: {why}" if why else ""


def runs_as_it_is(way: Callable[[Model, Any], None], model: Model, whole: Any) -> bool:
    """Whether a way works without other arguments; where its error says so, with no cache."""
    try:
        way(model, whole)
        return True
    except TypeError as error:
        if "use_cache=False" not in str(error):
            raise
    bare = Model(model.module, model.batch | {"use_cache": False})
    try:
        whole = alone(bare)
    except Exception as error:
        raise LeftOut(f"with use_cache=False {said(error)}") from error
    way(bare, whole)
    return False


def with_data_parallel(model: Model, whole: Any) -> None:
    """`fdp.DataParallel`, which gathers what the module returns."""
    wrapped = fdp.DataParallel(model.module, device_ids=["cpu"] * len(SIZES))
    out = wrapped(**model.batch)
    if why := differs_from(whole, out):
        raise Differs(f"DataParallel: {why}")
    if why := gradients_differ(gradients(model.module, whole), gradients(model.module, out)):
        raise Differs(f"DataParallel: {why}")


def in_functions(model: Model, whole: Any) -> None:
    """`fdp.functional` in `dp_apply` and `value_and_grad`."""
    apply, (params, buffers) = fdp.functional(model.module)

    def forward(params: Any, batch: Any) -> Any:
        return apply((params, buffers), **batch)[0]

    def loss(params: Any, batch: Any) -> Tensor:
        return scalar(forward(params, batch))

    out = fdp.dp_apply(forward, params, model.batch, DEVICES)
    if why := differs_from(whole, out):
        raise Differs(f"dp_apply: {why}")
    value, grads = fdp.value_and_grad(loss, devices=DEVICES)(params, model.batch)
    if not close(value, scalar(whole)):
        raise Differs("value_and_grad: the value")
    if why := gradients_differ(gradients(model.module, whole), grads):
        raise Differs(f"value_and_grad: {why}")


def scalar(out: Any) -> Tensor:
    """A mean over rows of all that an output holds."""
    floats = [t for _, t in tensors_of(out) if t.is_floating_point() and t.requires_grad]
    if not floats:
        raise LeftOut("its output has no gradient")
    return torch.stack([torch.where(t.isfinite(), t, 0).double().square().mean() for t in floats]).sum()


def gradients(module: nn.Module, out: Any) -> dict[str, Tensor]:
    """Of each parameter."""
    return gradients_in({name: p for name, p in module.named_parameters() if p.requires_grad}, out)


def gradients_in(named: Mapping[str, Tensor], out: Any) -> dict[str, Tensor]:
    """With respect to these; zero where one has no part."""
    grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True, retain_graph=True)
    return dict(zip(named, grad(scalar(out), list(named.values())), strict=True))


def gradients_differ(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """The first gradient that differs."""
    largest = max(map(largest_of, expected.values()), default=0.0)
    off = [name for name, grad in expected.items() if not close(found[name], grad, NOISE * largest)]
    return f"the gradients of {len(off)} of {len(expected)}, among them {off[0]}" if off else ""


def differs_from(expected: Any, found: Any) -> str:
    """Where an output differs in classes, tensors or numbers."""
    if kinds(found) != kinds(expected):
        return f"classes {kinds(found)[:5]} for {kinds(expected)[:5]}"
    here, there = dict(tensors_of(expected)), dict(tensors_of(found))
    if here.keys() != there.keys():
        return f"tensors {sorted(there)[:5]} for {sorted(here)[:5]}"
    return next((path for path, tensor in here.items() if not close(there[path], tensor)), "")


def close(found: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    """Equal but for rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.is_complex():
        return close(torch.view_as_real(found), torch.view_as_real(expected), least)
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    atol = CLOSE * largest_of(expected) + least
    return torch.allclose(found, expected, rtol=0.0, atol=atol, equal_nan=True)


def largest_of(tensor: Tensor) -> float:
    """The largest entry that is finite."""
    return torch.where(tensor.isfinite(), tensor, 0).abs().max().item() if tensor.numel() else 0.0


def kinds(out: Any) -> list[str]:
    """The classes of containers, by depth first."""
    return [type(each).__name__ for each, _ in nodes(out, "out")]


def tensors_of(out: Any) -> list[tuple[str, Tensor]]:
    """All tensors in an output with their paths, those in objects of other classes too."""
    return [(path, each) for each, path in nodes(out, "out") if isinstance(each, Tensor)]


def nodes(out: Any, path: str) -> Iterator[tuple[Any, str]]:
    """An object and what is in it."""
    if out is None or isinstance(out, str | int | float | torch.dtype | torch.device | nn.Module):
        return
    yield out, path
    inside: Any = ()
    if isinstance(out, Mapping):
        inside = out.items()
    elif isinstance(out, Sequence):
        inside = enumerate(out)
    elif not isinstance(out, Tensor) and hasattr(out, "__dict__") and not callable(out):
        inside = sorted(each for each in vars(out).items() if not each[0].startswith("_"))
    for name, each in inside:
        yield from nodes(each, f"{path}.{name}")
