"""Gradients of a loss over a batch that is split: those of the whole batch, exactly."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

import torch

from fdp._transforms.differentiate import Differentiation
from fdp._transforms.signatures import GradOptions, Mapped
from fdp._trees.tracebacks import OF_JAX, api_boundary
from fdp._trees.types import AUTO, Auto, AuxWeight, DeviceLike, Devices, Dims, Executor, Function, Randomness, Reduction

P = ParamSpec("P")
A = TypeVar("A", bound=Any)  # the argument that a loss is differentiated in; of a lambda nothing is known
Aux = TypeVar("Aux")


@overload
def value_and_grad(
    fn: Callable[Concatenate[A, P], torch.Tensor],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], tuple[torch.Tensor, A]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[A, P], tuple[torch.Tensor, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], tuple[tuple[torch.Tensor, Aux], A]]: ...
@overload
def value_and_grad(
    fn: Callable[P, Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Mapped[P, Any]: ...
@api_boundary(OF_JAX)
def value_and_grad(
    fn: Function,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    devices: Devices = None,
    in_dims: Dims | Auto = AUTO,
    kwarg_dims: Dims = 0,
    reduction: Reduction = "mean",
    count: Function | None = None,
    aux_dims: Dims | Auto = AUTO,
    aux_weight: AuxWeight = "rows",
    create_graph: bool | None = None,
    microbatches: int = 1,
    reduce_dtype: torch.dtype | None = None,
    output_device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Function:
    """Turn a loss into a function that returns it with its gradients, computed on several devices.

    For a loss that is a mean over rows, any devices and any split,
    `value_and_grad(loss, devices=ds)(params, batch) == torch.func.grad_and_value(loss)(params, batch)[::-1]`.

    >>> import fdp, torch
    >>> def loss(w, x, y):
    ...     return ((x * w - y) ** 2).mean()
    >>> x = torch.arange(5.0)
    >>> fdp.value_and_grad(loss, devices=fdp.virtual_devices(2))(torch.tensor(1.0), x, 3 * x)
    (tensor(24.), tensor(-24.))

    Args:
        fn: The loss of a batch: a real 0-dim tensor, or `(loss, aux)` with `has_aux`. It must not write to its
            arguments.
        argnums: Which positional arguments to differentiate in; their leaves are floating-point tensors.
        has_aux: Whether `fn` returns `(loss, aux)`.
        devices: One device per slot, as in `dp_apply`.
        in_dims: One spec for all positional arguments or a tuple with one for each, as in `shard_map`. By default None
            (whole) for those in `argnums`, and 0 for the others.
        kwarg_dims: The same for keyword arguments.
        reduction: `"mean"`: the loss is a mean over the rows of its batch. `"sum"`: a sum over them.
        count: If the loss is a mean over something else than rows, how many there are in a batch: called with the
            arguments of `fn`. For a mean over tokens that are not padding, their number.
        aux_dims: How aux is joined, as out_dims in `dp_apply`: `"mean"` for new buffers and averages, 0 for rows. By
            default leaves of 0 dims are means, and one with dims is an error that says what to write. With
            microbatches each of them counts as a shard.
        aux_weight: What a shard counts in the mean of aux: its `"rows"`, or its `"count"`, as in the loss.
        create_graph: None: results are differentiable if grad mode is on and they depend on something that requires
            grad, as in torch.func. False: they are detached. True: keep the graph.
        microbatches: Run each shard in this many pieces and accumulate: less memory, the same numbers.
        reduce_dtype: As what gradients are added up over the processes of a mesh. None: in their own dtype, half
            precision in float32. `torch.bfloat16` sends half the bytes of float32; each entry is rounded once in each
            process and once a sum, to 8 bits. Calls with collectives, and what is summed within a process, do not use
            it.
        output_device: Where the value, aux and gradients go. By default the value and aux go to the device of slot 0,
            and gradients to where the arguments are.
        weights: Relative rows of each slot, as in `dp_apply`.
        executor, seed, randomness, axis_name: As in `dp_apply`.

    Returns:
        A function with the arguments of `fn` that returns `(value, grads)`, or `((value, aux), grads)`. `grads` is a
        tree like the argument, a tuple of such if `argnums` is one. Leaves that are not used have zeros. The gradient
        of a `Replicated` is a `Replicated`, with the whole gradient on each of its slots.

    Raises:
        ValueError: No rows, or a count of zero in all; a loss that is not 0-dim; aux with dims and no aux_dims;
            what `dp_apply` raises.
        TypeError: A leaf to differentiate in that is no floating-point tensor; a module instead of a function.
        RuntimeError: `fn` wrote in place to an argument.
    """
    settings = Differentiation(where="value_and_grad", **locals())  # its fields are the arguments
    return settings.transform(lambda value, grads: (value, grads))


@overload
def grad_and_value(
    fn: Callable[Concatenate[A, P], torch.Tensor],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], tuple[A, torch.Tensor]]: ...
@overload
def grad_and_value(
    fn: Callable[Concatenate[A, P], tuple[torch.Tensor, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], tuple[A, tuple[torch.Tensor, Aux]]]: ...
@overload
def grad_and_value(
    fn: Callable[P, Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Mapped[P, Any]: ...
@api_boundary(OF_JAX)
def grad_and_value(
    fn: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Function:
    """`value_and_grad` in the order of torch.func: `(grads, value)`, or `(grads, (value, aux))`.

    >>> import fdp, torch
    >>> loss = lambda w, x: (w * x).mean()
    >>> fdp.grad_and_value(loss, devices=fdp.virtual_devices(2))(torch.tensor(2.0), torch.ones(3))
    (tensor(1.), tensor(2.))

    Arguments and errors are those of `value_and_grad`.
    """
    _check_names(options, "grad_and_value")
    settings = Differentiation(where="grad_and_value", fn=fn, argnums=argnums, has_aux=has_aux, **options)
    return settings.transform(lambda value, grads: (grads, value))


@overload
def grad(
    fn: Callable[Concatenate[A, P], torch.Tensor],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], A]: ...
@overload
def grad(
    fn: Callable[Concatenate[A, P], tuple[torch.Tensor, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Mapped[Concatenate[A, P], tuple[A, Aux]]: ...
@overload
def grad(
    fn: Callable[P, Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Mapped[P, Any]: ...
@api_boundary(OF_JAX)
def grad(
    fn: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Function:
    """`value_and_grad` without the value: `grads`, or `(grads, aux)`.

    >>> import fdp, torch
    >>> fdp.grad(lambda w, x: (w * x).mean(), devices=fdp.virtual_devices(2))(torch.tensor(2.0), torch.arange(3.0))
    tensor(1.)

    Arguments and errors are those of `value_and_grad`.
    """
    _check_names(options, "grad")
    settings = Differentiation(where="grad", fn=fn, argnums=argnums, has_aux=has_aux, **options)
    return settings.transform(lambda value, grads: (grads, value[1]) if has_aux else grads)


def _check_names(options: GradOptions, where: str) -> None:
    if unknown := [name for name in options if name not in GradOptions.__annotations__]:
        hint = OF_JAX.get(unknown[0], "help(fdp.value_and_grad) lists them")
        raise TypeError(f"{where}() got an unexpected keyword argument {unknown[0]!r}. {hint}")
