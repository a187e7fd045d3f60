"""What a call will do, before anything runs: its `Plan`, and what the same code shows on tensors that have no data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp._execution.executor import check_executor
from fdp._execution.seeds import seed_of
from fdp._placement.peers import peers_of
from fdp._placement.plan import Plan
from fdp._placement.sharded import Slots
from fdp._transforms.apply import joining
from fdp._transforms.arguments import IN_ORDER, Arg, Options, check_function, check_order, input_args, keyword_args
from fdp._transforms.call import Call
from fdp._transforms.differentiate import Differentiation, settings_of
from fdp._transforms.explained import explained
from fdp._trees import torch_private
from fdp._trees.tracebacks import OF_JAX, api_boundary
from fdp._trees.tree import flatten
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
    check_order(inputs, devices, "explain")
    given = {} if kwargs is None else kwargs
    settings = settings_of(fn)
    if settings is not None:
        options: dict[str, Any] = {"devices": devices, "in_dims": in_dims, "kwarg_dims": kwarg_dims}
        options |= {"out_dims": out_dims, "output_device": output_device, "weights": weights, "executor": executor}
        _check_said(settings, options | {"seed": seed, "randomness": randomness, "axis_name": axis_name})
        args = (params, *inputs) if type(inputs) is tuple else (params, inputs)
        _check(settings.fn, settings.devices, *args, given)
        return explained(dataclasses.replace(settings, where="explain").call(args, dict(given)))
    _check(fn, devices, params, inputs, given)
    check_executor(executor, "explain")
    drawn = seed_of(seed, randomness, "explain")
    args = [Arg("params", params, None), *input_args(inputs, in_dims, "explain")]
    named = keyword_args(given, kwarg_dims, "explain")
    how = Options("explain", devices, weights, executor, drawn, axis_name)
    kind = joining(fn, out_dims, output_device, "explain")
    return explained(Call(fn, [*args, *named.values()], tuple(named), how, kind))


def _check_said(settings: Differentiation, options: Mapping[str, Any]) -> None:
    """Options of a gradient function are those that it was made with."""
    given = [name for name, value in options.items() if value != _DEFAULTS.get(name)]
    if given:
        raise TypeError(
            f"explain: {', '.join(given)}: a gradient function is explained with what it was made with. Write "
            f"{settings.where}(loss, {given[0]}=...)"
        )


_WORDS = {"executor": "auto", "randomness": "different", "axis_name": "data"}
_DEFAULTS = {"in_dims": 0, "kwarg_dims": 0, "out_dims": AUTO, **_WORDS}


def _check(fn: Function, devices: Devices, *trees: Tree) -> None:
    check_function(fn, "explain")
    if torch.compiler.is_compiling():
        raise RuntimeError("explain: inside torch.compile. Explain the call outside of it")
    if torch_private.is_transformed():
        raise RuntimeError("explain: inside a transform of torch.func. Explain the call outside of it")
    held = [leaf for tree in trees for leaf in flatten(tree, "tree", where="explain").leaves if isinstance(leaf, Slots)]
    for peers in (peers_of(devices), *(slots.peers for slots in held)):
        peers.refuse(
            "explain", "devices=mesh.devices, and shards that are not on the mesh, explain the part of this process"
        )
