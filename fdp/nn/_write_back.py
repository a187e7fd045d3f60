"""What a step has computed, put where a module and its optimizer look: `set_grads`, `set_buffers`."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fdp._placement.moves import is_expanded, layers
from fdp._placement.replicated import Replicated
from fdp._placement.sharded import summary
from fdp._trees import torch_private
from fdp._trees.listing import listed, names
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
    where = "set_grads"
    _check_kinds(module, grads, where, "the gradients")
    params = dict(module.named_parameters())
    trained = {name: p for name, p in params.items() if p.requires_grad}
    if params and not trained:
        raise ValueError(f"{where}: no parameter requires a gradient. Call {type(module).__name__}.requires_grad_()")
    what = "for a parameter without a gradient pass None"
    _check_names("grads", grads, params, list(trained), where, what)
    found = {name: grad for name in trained if (grad := grads[name]) is not None}
    _check_tensors("grads", found, params, where, ("dtype", "shape", "device"))
    before = _SEEN.get(id(module), (None, {}))[1]
    moved = [name for name in found if before.get(name, own := _memory(params[name])) != own]
    if moved:
        raise ValueError(
            f"{where}: the parameters {names(moved)} have other memory than when functional(module) was called, so the "
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
    where = "set_buffers"
    _check_kinds(module, buffers, where, "the buffers")
    own = dict(module.named_buffers())
    _check_names("buffers", buffers, own, list(own), where, "pass all that apply has returned")
    _check_tensors("buffers", {name: buffers[name] for name in own}, own, where, ("dtype", "shape"))
    expanded = [name for name, old in own.items() if is_expanded(old)]
    changed = [name for name in expanded if not is_same(own[name], buffers[name].detach().to(own[name].device))]
    if changed:
        raise ValueError(f"{where}: {names(changed)} are expanded: register tensor.clone() in their place")
    memory = set(map(_memory, own.values()))
    news = {name: buffers[name].detach() for name in own if name not in expanded}
    for name, new in news.items():  # all before the first write: one may be what another was
        news[name] = new.clone() if _memory(new) in memory else new
    for name, new in news.items():
        write(own[name], new)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta:
        return a.is_meta
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN here


def write(own: Tensor, value: Tensor) -> None:
    """Give a buffer other values, in place."""
    with torch.inference_mode(own.is_inference()), torch.no_grad():
        if value.shape != own.shape:
            own.resize_(value.shape)
        own.copy_(value)


def _check_kinds(module: Any, tree: Any, where: str, what: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected a torch.nn.Module first, got {kind(module)}")
    if isinstance(tree, Replicated):
        raise TypeError(f"{where}: {what} are on every slot. Pass fdp.unreplicate(...) of them")
    if not isinstance(tree, Mapping):
        raise TypeError(f"{where}: expected {what} as a dict by name, as functional(module) returns, got {kind(tree)}")


def _check_names(
    name: str, tree: Mapping[str, Any], own: Mapping[str, Any], needed: Sequence[str], where: str, hint: str
) -> None:
    missing = [key for key in needed if key not in tree]
    unexpected = [key for key in tree if key not in own]
    problems = [f"{name} lacks {names(missing)}"] * bool(missing)
    problems += [f"{name} has unexpected {names(unexpected)}"] * bool(unexpected)
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}. The names are those of functional(module); {hint}")


def _check_tensors(
    name: str, tree: Mapping[str, Any], own: Mapping[str, Tensor], where: str, alike: Sequence[str]
) -> None:
    odd = [key for key, new in tree.items() if not isinstance(new, Tensor)]
    if odd:
        raise TypeError(
            f"{where}: expected tensors: {listed(odd, lambda key: f'{name}[{key!r}] is {kind(tree[key])}')}"
        )
    if any(map(torch_private.is_functorch_wrapped_tensor, tree.values())):
        raise TypeError(f"{where}: {name} are those of a transform that is under way. Call it outside of torch.func")
    odd = [key for key, new in tree.items() if any(getattr(new, a) != getattr(own[key], a) for a in alike)]
    if odd:
        each = listed(odd, lambda key: f"{name}[{key!r}] is {_seen(tree[key])}, the module has {_seen(own[key])}")
        raise ValueError(f"{where}: {each}. After module.to(...) call functional(module) again")


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
