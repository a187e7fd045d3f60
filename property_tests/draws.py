"""Operations that draw random numbers for the rows of a tensor of shape (rows, 6, 8), to make programs of."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fdp

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes weights (8, 8) and rows, and returns such rows."""

_rnn, _rnn_state = fdp.functional(torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True).double())


def _positive(x: Tensor) -> Tensor:
    return x.detach().abs() + 0.1


def _mixed(x: Tensor) -> Tensor:
    """In another order in memory."""
    turned = x.transpose(0, 2)
    return (turned + torch.empty_like(turned).normal_()).transpose(0, 2)


def _multinomial(x: Tensor, *, replacement: bool) -> Tensor:
    chosen = torch.multinomial(torch.softmax(x[:, 0].detach(), -1), 6, replacement=replacement)
    return x * F.one_hot(chosen, 8).to(x)


DRAWS: dict[str, Step] = {
    "dropout": lambda w, x: F.dropout(x @ w, 0.4),
    "dropout1d": lambda w, x: F.dropout1d(x @ w, 0.4),
    "dropout2d": lambda w, x: F.dropout2d((x @ w)[:, :, None], 0.4)[:, :, 0],
    "alpha_dropout": lambda w, x: F.alpha_dropout(x @ w, 0.4, training=True),
    "rand_like": lambda w, x: x + torch.rand_like(x),
    "rand of rows": lambda w, x: x * torch.rand(x.shape[0], 1, 1, dtype=x.dtype),
    "rand, out": lambda w, x: x * torch.rand(x.shape, out=torch.empty_like(x)),
    "randn in half precision": lambda w, x: x + torch.randn(x.shape, dtype=torch.bfloat16).to(x),
    "randint": lambda w, x: x * torch.randint(0, 5, (x.shape[0], 6, 1)),
    "bernoulli": lambda w, x: torch.bernoulli(torch.sigmoid(x.detach())) * (x @ w),
    "multinomial": lambda w, x: _multinomial(x, replacement=False),
    "multinomial with replacement": lambda w, x: _multinomial(x, replacement=True),
    "randperm of columns": lambda w, x: x[..., torch.randperm(8)],
    "normal_": lambda w, x: x + torch.empty_like(x).normal_(),
    "normal_ in another order": lambda w, x: _mixed(x),
    "normal of tensors": lambda w, x: x + torch.normal(x.detach(), _positive(x)),
    "exponential_": lambda w, x: x * torch.empty_like(x).exponential_(),
    "geometric_": lambda w, x: x * torch.empty_like(x).geometric_(0.3),
    "log_normal_": lambda w, x: x + torch.empty_like(x).log_normal_().log(),
    "random_": lambda w, x: x * torch.empty_like(x).random_(5),
    "poisson": lambda w, x: x + torch.poisson(_positive(x)),
    "binomial": lambda w, x: x + torch.binomial(torch.full_like(x, 5), torch.sigmoid(x.detach())),
    "gamma": lambda w, x: x + torch.distributions.Gamma(x.abs() + 1, torch.ones_like(x)).rsample(),
    "dirichlet": lambda w, x: x + torch.distributions.Dirichlet(x.abs() + 1).rsample(),
    "rrelu": lambda w, x: F.rrelu(x @ w, training=True),
    "rrelu in place": lambda w, x: F.rrelu((x @ w).clone(), training=True, inplace=True),
    "gumbel_softmax": lambda w, x: F.gumbel_softmax(x @ w),
    "attention": lambda w, x: F.scaled_dot_product_attention(x @ w, x, x, dropout_p=0.3),
    "rnn": lambda w, x: _rnn(_rnn_state, x @ w)[0][0],
    "noise on weights": lambda w, x: x @ (w + torch.randn_like(w)),
    "time and rows as one": lambda w, x: F.dropout((x @ w).reshape(-1, 8), 0.4).reshape(x.shape),
    "checkpoint": lambda w, x: checkpoint(lambda a: F.dropout(torch.tanh(a @ w)), x, use_reentrant=False),
    "vmap over rows": lambda w, x: torch.func.vmap(lambda row: F.dropout(row @ w, 0.4), randomness="different")(x),
    "vmap, the same": lambda w, x: torch.func.vmap(lambda row: F.dropout(row @ w, 0.4), randomness="same")(x),
    "grad inside": lambda w, x: torch.func.grad(lambda a: F.dropout(a @ w, 0.3).square().sum())(x),
}


def _sorted(step: Step) -> Step:
    def run(w: Tensor, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return step(w, x[order])[order.argsort()]

    return run


def _buffered(step: Step) -> Step:
    def run(w: Tensor, x: Tensor) -> Tensor:
        both = torch.empty(2 * len(x), 6, 8, dtype=x.dtype)
        both[: len(x)], both[len(x) :] = x.detach(), x.detach().flip(0)
        return step(w, both)[len(x) :].flip(0) + x

    return run


def _columns(step: Step) -> Step:
    def run(w: Tensor, x: Tensor) -> Tensor:
        buffer = torch.zeros(8, len(x), 6, dtype=x.dtype)
        for i in range(8):
            buffer[i] = x[..., i].detach()
        return step(w, buffer.permute(1, 2, 0)) + x

    return run


MOVES: dict[str, Callable[[Step], Step]] = {
    "flip": lambda step: lambda w, x: step(w, x.flip(0)).flip(0),
    "roll": lambda step: lambda w, x: step(w, x.roll(1, 0)).roll(-1, 0),
    "cat": lambda step: lambda w, x: step(w, torch.cat([x, x.tanh()])).chunk(2)[1],
    "one by one": lambda step: lambda w, x: step(w, torch.stack(x.unbind()[::-1])).flip(0),
    "sort": _sorted,
    "buffer": _buffered,
    "two first": lambda step: lambda w, x: step(w, torch.stack([x, -x]).flatten(0, 1)).unflatten(0, (2, -1)).sum(0),
    "two of each": lambda step: (
        lambda w, x: step(w, torch.stack([x, -x], 1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1)
    ),
    "time": lambda step: lambda w, x: step(w, x.transpose(0, 1).flatten(0, 1).unflatten(0, (6, -1)).transpose(0, 1)),
    "columns": _columns,
    "columns moved": lambda step: lambda w, x: step(w, x.flip(1)).roll(2, 1),
    "index": lambda step: lambda w, x: step(w, x[torch.arange(len(x))]),
}
"""What functions do to rows around a draw. Some of it is refused, and all of it keeps rows apart."""
