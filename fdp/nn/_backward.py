"""A module trains in two lines: `backward` in place of `loss.backward()`."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fdp._transforms.arguments import check_function, dims_by_name
from fdp._transforms.aux_dims import dims_of
from fdp._transforms.differentiate import Differentiation
from fdp._trees import torch_private
from fdp._trees.graph import captured
from fdp._trees.tracebacks import OF_JAX, api_boundary, warn
from fdp._trees.types import AUTO, Auto, AuxWeight, Devices, Dims, Executor, Function, Randomness, Reduction, Tree
from fdp.nn._functional import check_module
from fdp.nn._recipe import recipe_of
from fdp.nn._stand_in import stand_in
from fdp.nn._write_back import own_gradients, put_buffers

_OF_CLONE = "_is_of_a_clone_of_fdp"
_REST = "the module's"  # a keyword argument that nobody else has


@api_boundary(OF_JAX)
def backward(
    module: nn.Module,
    loss: Callable[..., Any],
    *,
    devices: Devices = None,
    has_aux: bool = False,
    in_dims: Dims | Auto = AUTO,
    kwarg_dims: Dims = 0,
    reduction: Reduction = "mean",
    count: Function | None = None,
    aux_dims: Dims | Auto = AUTO,
    aux_weight: AuxWeight = "rows",
    microbatches: int = 1,
    reduce_dtype: torch.dtype | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Callable[..., Any]:
    """Turn a loss of a module into a function that adds its gradients to `.grad`, computed on several devices.

    With `step = backward(module, loss)`: `value = step(x, y)` is `value = loss(module, x, y); value.backward()`.

    >>> import fdp, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loss(model, x, y):
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> step = fdp.backward(model, loss, devices=fdp.virtual_devices(2))
    >>> for x, y in [(torch.ones(6, 2), torch.ones(6, 1))]:
    ...     optimizer.zero_grad()
    ...     value = step(x, y)
    ...     optimizer.step()
    >>> model.weight.grad.shape, value.requires_grad
    (torch.Size([1, 2]), False)

    `loss` is called once a slot, with a clone of the module on the slot's device and the slot's rows. The clone has the
    attributes, methods, submodules and hooks of the module at that moment. Gradients are added to those that are there,
    as `Tensor.backward` does; hooks of parameters run once. A parameter that is frozen or that no slot uses gets none.
    The new buffers of all slots are joined and written to the module: floating-point ones are averaged. Attributes that
    forward or the loss sets on the clone are lost: make them buffers, or return them with `has_aux`. Nothing is kept
    between calls, so they follow `load_state_dict`, `.to()` and changes of the module. If the loss raises, gradients
    and buffers are as they were. With `seed=` each call draws the same: make the function anew in each step.

    Args:
        module: A module on one device, whose parameters have shapes.
        loss: Called as `loss(module, *args, **kwargs)`: a real 0-dim tensor, or `(loss, aux)` with `has_aux`. It must
            not write to its arguments.
        in_dims: One spec for all arguments after the module, by default 0, or a tuple with one for each.
        count: As in `value_and_grad`, called with the arguments after the module.
        devices, has_aux, kwarg_dims, reduction, aux_dims, aux_weight, microbatches, reduce_dtype, weights, executor,
            seed, randomness, axis_name: As in `value_and_grad`.

    Returns:
        A function of the arguments after the module that returns the value of the loss, detached, or `(value, aux)`.

    Raises:
        TypeError: Not a module, or one that cannot be called with other tensors.
        ValueError: A lazy module that has not seen an input. From the function: no parameter requires a gradient; the
            loss depends on none, or on a parameter of another module; what `value_and_grad` raises.
        RuntimeError: From the function: `loss` wrote in place to an argument or a parameter.
    """
    check_module(module, "backward")
    if isinstance(loss, nn.Module):
        raise TypeError("backward: the loss gets the module: write lambda module, x, y: loss(module(x), y)")
    check_function(loss, "backward")
    if count is not None:
        check_function(count, "backward: count")
    on_slot = _OnSlot(module, loss, has_aux, aux_dims)

    @functools.cache
    def settings(n_args: int, keywords: tuple[str, ...]) -> Differentiation:
        if type(in_dims) is tuple and len(in_dims) != n_args:
            raise ValueError(f"backward: in_dims has {len(in_dims)} entries for {n_args} arguments after the module")
        dims = in_dims if type(in_dims) is tuple else (0 if in_dims is AUTO else in_dims,) * n_args
        named = kwarg_dims if isinstance(kwarg_dims, Mapping) else dict.fromkeys(keywords, kwarg_dims)
        return Differentiation(
            where="backward",
            fn=on_slot,
            argnums=0,
            has_aux=True,
            devices=devices,
            in_dims=(None, *dims),
            kwarg_dims={**named, _REST: None},
            reduction=reduction,
            count=None if count is None else functools.partial(_count, count),
            aux_dims={"aux": "mean" if aux_dims is AUTO else aux_dims, "buffers": "mean"},
            aux_weight=aux_weight,
            microbatches=microbatches,
            reduce_dtype=reduce_dtype,
            weights=weights,
            executor=executor,
            seed=seed,
            randomness=randomness,
            axis_name=axis_name,
            unused="none",
        )

    settings(len(in_dims) if type(in_dims) is tuple else 0, ())  # says what is wrong with the options

    @api_boundary()
    @functools.wraps(loss, updated=())
    def step(*args: Tree, **kwargs: Tree) -> Any:
        if any(arg is module for arg in args):
            raise TypeError("backward: the function that it returns takes the arguments after the module: step(x, y)")
        dims_by_name(kwargs, kwarg_dims, "backward")  # says which names are wrong
        value, aux = _step(module, settings(len(args), tuple(kwargs)), args, kwargs)
        return (value, aux) if has_aux else value

    return step


def _step(module: nn.Module, settings: Differentiation, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Any:
    own, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    params = {name: p.detach() for name, p in own.items() if p.requires_grad}
    if not params:
        raise ValueError(f"backward: no parameter requires a gradient. Call {type(module).__name__}.requires_grad_()")
    rest: Any = {"frozen": {name: p for name, p in own.items() if name not in params}, "buffers": buffers}
    value, aux, grads = settings.compute((params, *args), {**kwargs, _REST: rest})
    found = {name: grad.detach() for name, grad in grads.items() if grad is not None}
    if not found:
        raise ValueError("backward: the loss depends on no parameter of the module that requires a gradient")
    left_out = [weakref.ref(x) for x in captured([value], [])] if value.requires_grad else []
    value, grads = value.detach(), None  # the graph goes, and with it what only the loss has had
    if others := [x for ref in left_out if (x := ref()) is not None]:
        _say_left_out(others)
    _accumulate(own, found)
    put_buffers(module, aux["buffers"])
    return value, aux["aux"]


def _say_left_out(others: list[Tensor]) -> None:
    """Say that there are tensors that require gradients and get none: an error for parameters of others."""
    text = (
        "backward: the loss depends on tensors that require gradients and are no parameters of the module: they get "
        "none. Put parameters into the module, several modules into an nn.ModuleDict"
    )
    if any(isinstance(x, nn.Parameter) and _OF_CLONE not in vars(x) for x in others):
        raise ValueError(f"{text}, or call requires_grad_(False)")
    warn(text)


def _accumulate(params: Mapping[str, nn.Parameter], grads: dict[str, Tensor]) -> None:
    """Add gradients to those of the parameters, as `Tensor.backward` does."""
    first = [name for name in grads if params[name].grad is None and not torch_private.has_hooks(params[name])]
    for name, grad in own_gradients({name: grads[name] for name in first}, params).items():
        params[name].grad = grad
    if others := [name for name in grads if name not in first]:
        torch.autograd.backward([params[name] for name in others], [grads[name] for name in others])


@dataclasses.dataclass(frozen=True)
class _OnSlot:
    """The loss as a function of parameters, which returns new buffers beside it."""

    module: nn.Module
    loss: Callable[..., Any]
    has_aux: bool
    aux_dims: Any = dataclasses.field(compare=False)

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        frozen, buffers = kwargs.pop(_REST).values()
        recipe, states = recipe_of(self.module)
        given = {**params, **frozen, **{name: buffer.clone() for name, buffer in buffers.items()}}
        _make_parameters(given, recipe.own(states) or dict(self.module.named_parameters()))
        with stand_in(self.module, recipe, states, given) as made:
            out = self.loss(made.modules[0], *args, **kwargs)
            now = dict.fromkeys(buffers) | dict(made.modules[0].named_buffers())  # None: forward has dropped it
        if any(p.grad is not None for p in params.values() if p.is_leaf):
            raise RuntimeError(
                "backward: the loss has called backward() itself. Return all that is to be differentiated"
            )
        if not self.has_aux and not isinstance(out, tuple):
            return out, {"aux": None, "buffers": now}
        if not self.has_aux or not isinstance(out, tuple) or len(out) != 2:
            hint = "return (loss, aux)" if self.has_aux else "return the loss alone. To return more pass has_aux=True"
            raise TypeError(f"backward: the loss must {hint}, got {type(out).__name__}")
        dims_of(out[1], self.aux_dims, "backward")
        return out[0], {"aux": out[1], "buffers": now}


def _make_parameters(given: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
    """Give tensors the class and the attributes of the parameters that they stand for: the loss may ask for them."""
    for name, p in own.items():
        if isinstance(p, nn.Parameter) and type(given.get(name)) is Tensor:
            given[name].__class__ = type(p)
            vars(given[name]).update(vars(p), **{_OF_CLONE: True})


def _count(count: Function, params: Any, /, *args: Any, **kwargs: Any) -> Any:
    return count(*args, **{name: value for name, value in kwargs.items() if name != _REST})
