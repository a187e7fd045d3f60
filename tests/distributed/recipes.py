"""What the recipes of the docs give on a mesh, and what one device gives, in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.common.numbers import numbers
from tests.common.pages import recipe

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
RATE = 0.1


def start() -> Params:
    return {"w": numbers(3, 5), "v": numbers(5, 1), "unused": numbers(2)}


def batches(rows: Sequence[int], *steps: int) -> list[Batch]:
    return [(numbers(*steps, n, 3) * (i + 1), numbers(*steps, n, 1) - i) for i, n in enumerate(rows)]


def leaves(params: Params) -> Params:
    return {name: p.clone().requires_grad_() for name, p in params.items()}


def stepped(loss: Any, params: Params, batch: Batch) -> Params:
    """SGD on one device."""
    grads = torch.func.grad(loss)(params, *batch)
    return {name: p - RATE * grads[name] for name, p in params.items()}


def zero(mesh: Any, rows: Sequence[int]) -> Params:
    return recipe("zero").train(mesh, batches(rows), start())[0]


def zero_on_one_device(rows: Sequence[int]) -> Params:
    params = leaves(start())
    optimizer = torch.optim.Adam(params.values(), lr=0.01)
    for x, y in batches(rows):
        optimizer.zero_grad()
        (recipe("zero").loss(params, x, y) / len(x)).backward()
        params["unused"].grad = torch.zeros(2, dtype=torch.float64)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def local_sgd(mesh: Any, rows: Sequence[int], steps: int) -> Params:
    return recipe("local_sgd").local_sgd(mesh, batches(rows, steps), start())


def diloco(mesh: Any, rows: Sequence[int], steps: int) -> Params:
    return recipe("local_sgd").diloco(mesh, batches(rows, steps), start())


def local_sgd_by_hand(rows: Sequence[int], steps: int, slots: int) -> Params:
    params = start()
    for x, y in batches(rows, steps):
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        for own_x, own_y in zip(x.tensor_split(slots, 1), y.tensor_split(slots, 1), strict=True):
            if own_x.shape[1]:
                own = recipe("local_sgd").local_steps(params, own_x, own_y)
                sums = {name: total + own[name] * own_x.shape[1] / x.shape[1] for name, total in sums.items()}
        params = sums
    return params


def diloco_by_hand(rows: Sequence[int], steps: int, slots: int) -> Params:
    outer_params, copies = leaves(start()), [leaves(start()) for _ in range(slots)]
    outer = torch.optim.SGD(outer_params.values(), lr=0.7, momentum=0.9, nesterov=True)
    inner = [torch.optim.AdamW(copy.values(), lr=0.01) for copy in copies]
    for x, y in batches(rows, steps):
        for p in outer_params.values():
            p.grad = torch.zeros_like(p)
        parts = list(zip(x.tensor_split(slots, 1), y.tensor_split(slots, 1), strict=True))
        for copy, optimizer, part in zip(copies, inner, parts, strict=True):
            for name, p in copy.items():
                p.data.copy_(outer_params[name].data)
            for own_x, own_y in zip(*part, strict=True):
                optimizer.zero_grad()
                recipe("local_sgd").loss(copy, own_x, own_y).backward()
                copy["unused"].grad = torch.zeros(2, dtype=torch.float64)
                optimizer.step()
            for name, p in outer_params.items():
                assert p.grad is not None
                p.grad += (p - copy[name]).detach() * part[0].shape[1] / x.shape[1]
        outer.step()
    return {name: p.detach() for name, p in outer_params.items()}


def average(mesh: Any, rows: Sequence[int], decay: float) -> Params:
    return recipe("moving_average").train(mesh, batches(rows), start(), decay, RATE)[1]


def average_by_formula(rows: Sequence[int], decay: float) -> Params:
    seen = [start()]
    for batch in batches(rows):
        seen.append(stepped(recipe("moving_average").loss, seen[-1], batch))
    n = len(rows)
    weights = [decay**n, *((1 - decay) * decay ** (n - k) for k in range(1, n + 1))]
    return {name: torch.stack([w * p[name] for w, p in zip(weights, seen, strict=True)]).sum(0) for name in seen[0]}


def stopping(mesh: Any, rows: Sequence[int], patience: int) -> tuple[int, Params]:
    validation = batches([7])[0]
    number, watch = recipe("early_stopping").train(mesh, batches(rows), validation, start(), RATE, patience=patience)
    return number, watch["params"]


def stopping_on_one_device(rows: Sequence[int], patience: int) -> tuple[int, Params]:
    loss, validation = recipe("early_stopping").loss, batches([7])[0]
    params, seen, best = start(), [], 0
    for batch in batches(rows):
        params = stepped(loss, params, batch)
        seen.append((loss(params, *validation).item(), params))
        best = min(range(len(seen)), key=lambda i: seen[i][0])
        if len(seen) - 1 - best > patience:
            break
    return len(seen), seen[best][1]
