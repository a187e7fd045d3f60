"""What a call will do, before anything runs: its `Plan`, and what the same code shows on tensors that have no data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fdp._execution.seeds import seed_of
from fdp._placement.plan import Plan
from fdp._transforms.apply import Joining
from fdp._transforms.arguments import IN_ORDER, check_order, input_args
from fdp._transforms.call import Call, Options
from fdp._transforms.differentiate import Differentiation, settings_of
from fdp._transforms.explained import explained
from fdp._trees.tracebacks import OF_JAX, api_boundary, inside_boundary
from fdp._trees.types import AUTO, Auto, DeviceLike, Devices, Dims, Executor, Function, Randomness, Tree


@api_boundary(OF_JAX | IN_ORDER)
def explain(
    fn: Function,
    params: Tree,
    inputs: Tree,
    devices: Devices = None,
    *,
    kwargs: Mapping[str, Tree] | None = None,
    in_dims: Dims = 0,
    kwarg_dims: Dims = 0,
    out_dims: Dims | Auto = AUTO,
    output_device: DeviceLike | None = None,
    weights: Sequence[float] | None = None,
    executor: Executor = "auto",
    seed: int | None = None,
    randomness: Randomness = "different",
    axis_name: str = "data",
) -> Plan:
    """Say what `dp_apply` with the same arguments would do: what is split, what is copied, what comes out.

    Nothing is computed and nothing moves: `fn` is called once per slot, with tensors that have a shape, a dtype and a
    device, and no data (torch's fake tensors). So are those that it takes from elsewhere; what it does to other objects
    is done. A tensor that it leaves in a cache has no data, and whoever uses it later gets an error. The devices need
    not exist, but where torch is built without their type, some operations and gradients inside `fn` are a `problem`:
    use `virtual_devices` there.

    `explain(fn, ...).copies` is what `transfers()` counts in `dp_apply(fn, ...)`.

    What `value_and_grad`, `grad` and `grad_and_value` return is explained with what it was told, and with no other
    options: `explain(value_and_grad(loss, devices=...), params, (x, y))`. Its gradients are among the outputs.

    >>> import fdp, torch
    >>> def predict(w, x):
    ...     return x @ w
    >>> plan = fdp.explain(predict, torch.ones(3, 2), torch.ones(7, 3), ["cuda:0", "cuda:1"])
    >>> plan.sizes
    (4, 3)
    >>> [(copy.path, copy.nbytes, str(copy.target)) for copy in plan.copies]
    [('params', 24, 'cuda:0'), ('params', 24, 'cuda:1'),
     ('inputs', 48, 'cuda:0'), ('inputs', 36, 'cuda:1'), ('out', 24, 'cuda:0')]

    Args:
        fn, params, inputs, devices: As in `dp_apply`; for a gradient function, `params` is its first argument, and
            `inputs` are the others.
        kwargs, in_dims, kwarg_dims, out_dims, output_device, weights, executor: As in `dp_apply`.
        seed, randomness, axis_name: Likewise.

    Returns:
        The plan; it prints itself. Where `fn` depends on values (`x.item()`, `if x.sum() > 0`), or fails, `outputs` is
        None, `problem` says why, and what else there is holds for the arguments.

    Raises:
        ValueError, TypeError, RuntimeError: What `dp_apply` would raise for these arguments, or for outputs that
            cannot be joined; a mesh, or a transform of torch.func around the call.
    """
    where, options = "explain", locals()
    check_order(inputs, devices, where)
    given = {} if kwargs is None else kwargs
    settings = settings_of(fn)
    if settings is not None:
        _check_said(settings, options)
        own = (params, *inputs) if type(inputs) is tuple else (params, inputs)
        return explained(dataclasses.replace(settings, where=where).call(own, dict(given)))
    how = Options(where, devices, weights, executor, seed_of(seed, randomness, where), axis_name)
    args = input_args(params, inputs, in_dims, given, kwarg_dims, where)
    return explained(Call(fn, args, how, Joining(fn, out_dims, output_device, where)))


def _check_said(settings: Differentiation, options: Mapping[str, Any]) -> None:
    """Options of a gradient function are those that it was made with."""
    usual = {"devices": None, **inside_boundary(explain).__kwdefaults__}
    given = [name for name, value in usual.items() if name != "kwargs" and options[name] != value]
    if given:
        raise TypeError(
            f"explain: {', '.join(given)}: a gradient function is explained with what it was made with. Write "
            f"{settings.where}(loss, {given[0]}=...)"
        )
