"""What a step has computed, put where a module and its optimizer look: `set_grads`, `set_buffers`."""

import weakref
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fdp._placement.moves import is_expanded, layers
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import summary
from fdp._trees import torch_private
from fdp._trees.message_lists import listed, names
from fdp.nn._functional_call import kind


def set_grads(module: nn.Module, grads: Mapping[str, Tensor | None], /) -> None:
    """Put gradients into `.grad` of a module's parameters, where optimizers look for them.

    With `apply, (params, buffers) = functional(module)` and a loss that calls `apply`:
    `set_grads(module, fdp.grad(loss)(params, x))` is `module.zero_grad()` and the loss's `backward()`.

    >>> import fdp, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> apply, (params, buffers) = fdp.functional(model)
    >>> loss = lambda params, x: apply((params, buffers), x)[0].mean()
    >>> fdp.set_grads(model, fdp.grad(loss, devices="cpu")(params, torch.ones(3, 2)))
    >>> model.weight.grad
    tensor([[1., 1.]])
    >>> optimizer.step()  # writes to the model, and so to params

    Gradients that were there are replaced, not added to, so `zero_grad` is not needed. They are detached, and share
    their memory with `grads`, but for those that share it among themselves or with a parameter: `clip_grad_norm_` and
    `GradScaler` would scale these more than once, and get copies. Hooks of parameters do not run.

    Args:
        module: What `functional` was given.
        grads: A gradient for each parameter, by name as in `params`; None for a parameter that has none. A parameter
            with `requires_grad=False` may be missing, and gets none, as in `backward()`.

    Raises:
        TypeError: `module` is no module, or `grads` no dict of tensors.
        ValueError: Names are missing or unexpected; a shape, dtype or device is not that of the parameter; no
            parameter requires a gradient; parameters have other memory than when `functional` was called.
    """
    params, found = _checked(module, "grads", grads, "set_grads")
    before = _SEEN.get(id(module), (None, {}))[1]
    moved = [name for name in found if before.get(name, own := _memory(params[name])) != own]
    if moved:
        raise ValueError(
            f"set_grads: the parameters {names(moved)} have other memory than when functional(module) was called, so "
            "gradients are of other tensors than an optimizer would update. After module.to(...), "
            "load_state_dict(assign=True) and the like call functional(module) again"
        )
    own = own_gradients(found, params)
    for name, p in params.items():
        p.grad = own.get(name)


@torch.no_grad()
def own_gradients(grads: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients that can be written to, one by one: those that share memory are copied."""
    memory = list(map(_memory, chain(grads.values(), params.values())))
    times = Counter(memory)
    return {
        key: _own(grad.detach(), params[key], alone=times[own] == 1)
        for (key, grad), own in zip(grads.items(), memory, strict=False)
    }


_SEEN: dict[int, tuple[Any, dict[str, int]]] = {}


def remember(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """`functional` has been called: gradients are those of parameters with this memory."""
    key = id(module)
    own = weakref.ref(module, lambda _: _SEEN.pop(key, None))
    _SEEN[key] = own, {name: _memory(tensor) for name, tensor in params.items()}


def set_buffers(module: nn.Module, buffers: Mapping[str, Tensor], /) -> None:
    """Write new buffers into a module, in place.

    With `apply, (params, buffers) = functional(module)`: after `out, new = apply((params, buffers), x)` and
    `set_buffers(module, new)` the module's buffers are those after `module(x)`, and so are `buffers`, which share their
    memory.

    >>> import fdp, torch
    >>> model = torch.nn.BatchNorm1d(2)
    >>> apply, (params, buffers) = fdp.functional(model)
    >>> out, new = fdp.dp_apply(apply, (params, buffers), torch.ones(6, 2), fdp.virtual_devices(3))
    >>> model.num_batches_tracked  # a pure function has left it alone
    tensor(0)
    >>> fdp.set_buffers(model, new)
    >>> model.state_dict()["num_batches_tracked"], buffers["num_batches_tracked"]
    (tensor(1), tensor(1))

    Args:
        module: What `functional` was given.
        buffers: A tensor for each buffer, by name. They may be on other devices.

    Raises:
        TypeError: `module` is no module, or `buffers` no dict of tensors.
        ValueError: Names are missing or unexpected; a shape or dtype is not that of the buffer; a buffer that has been
            expanded, to which nobody can write, would change.
    """
    own, found = _checked(module, "buffers", buffers, "set_buffers")
    expanded = [name for name, old in own.items() if is_expanded(old)]
    changed = [name for name in expanded if not torch.equal(own[name], found[name].detach().to(own[name].device))]
    if changed:
        raise ValueError(f"set_buffers: {names(changed)} are expanded: register tensor.clone() in their place")
    memory = set(map(_memory, own.values()))
    news = {name: new.detach() for name, new in found.items() if name not in expanded}
    for name, new in news.items():  # all before the first write: one may be what another was
        news[name] = new.clone() if _memory(new) in memory else new
    put_buffers(module, news)


def put_buffers(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Give a module other buffers. Those of modules that it does not have are left out."""
    parts = dict(module.named_modules()) if buffers else {}
    for name, new in buffers.items():
        path, _, key = name.rpartition(".")
        if path in parts:
            put_buffer(parts[path]._buffers, key, new)


def put_buffer(held: dict[str, Tensor | None], key: str, new: Tensor | None) -> None:
    """Give a module another buffer: in place where that can be."""
    own = held.get(key)
    if own is None or new is None or (own.dtype, own.shape) != (new.dtype, new.shape) or is_expanded(own):
        held[key] = None if new is None else new.detach()
        return
    with torch.inference_mode(own.is_inference()), torch.no_grad():
        own.copy_(new)


def _checked(module: Any, what: str, tree: Any, where: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The module's own tensors, and those that are given for them, by name."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected a torch.nn.Module first, got {kind(module)}")
    if isinstance(tree, Replicated):
        raise TypeError(f"{where}: {what} are on every slot. Pass fdp.unreplicate({what})")
    if not isinstance(tree, Mapping):
        raise TypeError(f"{where}: expected {what} as a dict by name, as functional(module) returns, got {kind(tree)}")
    of_params = what == "grads"
    own: dict[str, Tensor] = dict(module.named_parameters() if of_params else module.named_buffers())
    needed = [name for name, tensor in own.items() if not of_params or tensor.requires_grad]
    if own and not needed:
        raise ValueError(f"{where}: no parameter requires a gradient. Call {type(module).__name__}.requires_grad_()")
    if wrong := misnamed(what, tree, own, needed):
        hint = "for a parameter without a gradient pass None" if of_params else "pass all that apply has returned"
        raise ValueError(f"{where}: {'; '.join(wrong)}. The names are those of functional(module); {hint}")
    found: dict[str, Tensor] = {name: tree[name] for name in needed if tree[name] is not None or not of_params}
    if odd := [name for name, new in found.items() if not isinstance(new, Tensor)]:
        each = listed(odd, lambda name: f"{what}[{name!r}] is {kind(found[name])}")
        raise TypeError(f"{where}: expected tensors: {each}")
    if any(map(torch_private.is_functorch_wrapped_tensor, found.values())):
        raise TypeError(f"{where}: {what} are those of a transform that is under way. Call it outside of torch.func")
    alike = attrgetter("dtype", "shape", *["device"] * of_params)
    if odd := [name for name, new in found.items() if alike(new) != alike(own[name])]:
        each = listed(odd, lambda name: f"{what}[{name!r}] is {_seen(found[name])}, the module has {_seen(own[name])}")
        raise ValueError(f"{where}: {each}. After module.to(...) call functional(module) again")
    return own, found


def misnamed(what: str, tree: Mapping[str, Any], own: Container[str], needed: Sequence[str]) -> list[str]:
    """What is wrong with the names of a tree, which has `needed` ones and may have those of the module's `own`."""
    missing, unexpected = [name for name in needed if name not in tree], [name for name in tree if name not in own]
    problems = [f"{what} lacks {names(missing)}"] * bool(missing)
    return problems + [f"{what} has unexpected {names(unexpected)}"] * bool(unexpected)


def _seen(tensor: Tensor) -> str:
    return f"{summary(tensor)} on {tensor.device}"


def _memory(tensor: Tensor) -> int:
    inner = layers(tensor)[-1]
    return id(inner) if inner.layout is not torch.strided else torch_private.storage(inner)


def _own(grad: Tensor, p: Tensor, *, alone: bool) -> Tensor:
    """A gradient that can be written to. `backward()` makes it with the parameter's strides, too."""
    if grad.layout is not torch.strided:
        return grad if alone else grad.clone()
    return grad if alone and grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
