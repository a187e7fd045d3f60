"""Draws for rows: what each row draws on one device, or an error where rows are reordered, cut or joined before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fdp

X = torch.linspace(-2, 2, 13 * 48, dtype=torch.float64).sin().reshape(13, 6, 8)
W = torch.linspace(-1, 1, 64, dtype=torch.float64).cos().reshape(8, 8)
ROWS: dict[str, Any] = {"seed": 3, "randomness": "rows"}
Program = Callable[[Tensor, Tensor], Tensor]


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def first_half(both: Tensor) -> Tensor:
    return both.chunk(2)[0]


def filled(w: Tensor, x: Tensor) -> Tensor:
    both = torch.empty(2 * len(x), 6, 8, dtype=x.dtype)
    both[: len(x)], both[len(x) :] = x, x @ w
    return first_half(F.dropout(both))


def filled_with_draws(w: Tensor, x: Tensor) -> Tensor:
    both = torch.empty(2 * len(x), 6, 8, dtype=x.dtype)
    both.view(-1).uniform_()
    return x * first_half(both)


def filled_by_time(w: Tensor, x: Tensor) -> Tensor:
    turned = torch.empty(6, len(x), 8, dtype=x.dtype)
    turned.view(-1).normal_()
    return x + turned.transpose(0, 1)


def filled_in_another_order(w: Tensor, x: Tensor) -> Tensor:
    turned = torch.empty_like(x)
    turned[:] = x.flip(0)
    return F.dropout(turned).flip(0)


def a_view_from_before(w: Tensor, x: Tensor) -> Tensor:
    turned = torch.zeros_like(x)
    view = turned[..., :4]
    turned.copy_(x.flip(0))
    return x[..., :4] + F.dropout(view).flip(0)


def shifted_in_place(w: Tensor, x: Tensor) -> Tensor:
    shifted = x.clone()
    shifted[1:] = x[:-1]
    return F.dropout(shifted) @ w


def numbers_that_are_changed(w: Tensor, x: Tensor) -> Tensor:
    order = torch.arange(len(x))
    order.neg_().add_(len(x) - 1)
    return F.dropout(x[order]).flip(0)


def written_by_a_list(w: Tensor, x: Tensor) -> Tensor:
    turned = torch.zeros_like(x)
    torch.ops.aten._foreach_copy_([turned], [x.flip(0)])
    return F.dropout(turned).flip(0)


class NoiseOnGradient(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.rand_like(grads[0])


def in_a_backward(w: Tensor, x: Tensor) -> Tensor:
    return torch.func.grad(lambda a: NoiseOnGradient.apply(a.flip(0)).square().sum())(x) @ w


@torch.library.custom_op("fdp_tests::turned", mutates_args=())
def turned_by_an_operation(x: Tensor) -> Tensor:
    return x.flip(0)


@turned_by_an_operation.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


WAY_OUT = "draw the noise for the whole batch outside of the function, and pass it as an argument that is split"
CUT = "has reordered, cut or joined"
NOISE = "is reordered, cut or joined by {}.* before it has met its rows"
REFUSED: dict[str, tuple[Program, str]] = {
    "cat": (lambda w, x: first_half(F.dropout(torch.cat([x, x @ w]))), rf"aten\.cat\.default \(test_order\.py.* {CUT}"),
    "cat of times": (
        lambda w, x: F.dropout(torch.cat(x.unbind(1))).view(6, -1, 8).transpose(0, 1),
        rf"aten\.cat.* {CUT}",
    ),
    "cat that is taken apart": (
        lambda w, x: torch.cat([x, x @ w]).chunk(2)[0] * uniform(len(x), 1, 1),
        CUT,
    ),
    "repeat": (lambda w, x: first_half(F.dropout(x.repeat(2, 1, 1))), rf"aten\.repeat.* {CUT}"),
    "expand, first": (
        lambda w, x: first_half(F.dropout(x.expand(2, *x.shape).flatten(0, 1))),
        r"\(time, rows\) does\. Put the rows first",
    ),
    "row by row": (lambda w, x: F.dropout(torch.stack([row @ w for row in x])), rf"aten\.stack.* {CUT}"),
    "split and joined": (lambda w, x: F.dropout(torch.cat([part @ w for part in x.split(40)])), rf"aten\.cat.* {CUT}"),
    "rows the other way round": (lambda w, x: F.dropout(torch.stack(x.unbind()[::-1])).flip(0), CUT),
    "last row first": (lambda w, x: F.dropout(torch.cat([x[-1:], x[:-1]])).roll(-1, 0), CUT),
    "numbers from the end": (lambda w, x: F.dropout(x[torch.arange(len(x) - 1, -1, -1)]).flip(0), CUT),
    "numbers that are cut": (
        lambda w, x: F.dropout(torch.cat([x[torch.arange(len(x))[1:]], x[torch.arange(len(x))[:1]]])).roll(1, 0),
        CUT,
    ),
    "numbers that are changed": (numbers_that_are_changed, CUT),
    "a lookup": (lambda w, x: F.dropout(F.embedding(x[:, 0, 0].argsort(), x.flatten(1))).view_as(x), CUT),
    "put in another order": (
        lambda w, x: F.dropout(torch.zeros_like(x).index_add(0, x[:, 0, 0].argsort(), x)),
        rf"aten\.index_add.* {CUT}",
    ),
    "shifted": (lambda w, x: F.dropout(F.pad(x, (0, 0, 0, 0, 1, -1))) @ w, rf"aten\.constant_pad_nd.* {CUT}"),
    "shifted in place": (shifted_in_place, rf"a write \(test_order\.py, line .* {CUT}"),
    "filled": (filled, rf"a write .* {CUT}"),
    "filled in another order": (filled_in_another_order, rf"aten\.flip.* {CUT}"),
    "a view from before": (a_view_from_before, CUT),
    "written by a list": (written_by_a_list, CUT),
    "an operation of one's own": (
        lambda w, x: turned_by_an_operation(F.dropout(turned_by_an_operation(x))),
        rf"fdp_tests\.turned.* {CUT}",
    ),
    "in a backward": (in_a_backward, CUT),
    "filled with draws": (filled_with_draws, NOISE.format("a write")),
    "filled by time": (filled_by_time, NOISE.format("a write")),
    "chunk": (lambda w, x: x * first_half(uniform(2 * len(x), 1, 1)), NOISE.format(r"aten\.split")),
    "slice": (lambda w, x: x * uniform(2 * len(x), 1, 1)[len(x) :], NOISE.format(r"aten\.slice")),
    "slice alone": (lambda w, x: uniform(2 * len(x), 6, 8)[len(x) :] @ w, NOISE.format(r"aten\.slice")),
    "two for each": (lambda w, x: uniform(2 * len(x), 1, 1)[1::2] * x, NOISE.format(r"aten\.slice")),
    "unfold": (
        lambda w, x: x * uniform(2 * len(x)).unfold(0, len(x), len(x))[0, :, None, None],
        NOISE.format(r"aten\.unfold"),
    ),
    "unflatten": (lambda w, x: x * uniform(2 * len(x), 1, 1).unflatten(0, (2, -1))[0], NOISE.format(r"aten\.view")),
    "as_strided": (lambda w, x: x * uniform(2 * len(x)).as_strided((len(x), 1, 1), (1, 1, 1)), NOISE.format("aten")),
    "resize_": (lambda w, x: x + uniform(x.numel()).resize_(6, len(x), 8).transpose(0, 1), NOISE.format("aten")),
    "parts in time": (
        lambda w, x: x + torch.stack(uniform(6 * len(x)).chunk(6), 1)[..., None],
        NOISE.format(r"aten\.split"),
    ),
    "flip of a draw": (lambda w, x: x * uniform(len(x), 1, 1).flip(0), NOISE.format(r"aten\.flip")),
    "flip of a draw alone": (lambda w, x: uniform(len(x), 1, 1).flip(0), NOISE.format(r"aten\.flip")),
    "roll of a draw": (lambda w, x: x * uniform(len(x), 1, 1).roll(1, 0), NOISE.format(r"aten\.roll")),
    "order of a draw": (lambda w, x: x[uniform(len(x)).argsort()], NOISE.format(r"aten\.sort")),
    "sort of a draw": (lambda w, x: x * uniform(len(x), 1, 1).sort(0)[0], NOISE.format(r"aten\.sort")),
    "a draw that is put": (
        lambda w, x: x + x.index_put((x[:, 0, 0].argsort(),), torch.rand_like(x)),
        NOISE.format(r"aten\.index_put"),
    ),
    "a draw for rows that have moved": (
        lambda w, x: (x.flip(0) * torch.rand_like(x)).flip(0),
        rf"aten\.rand_like.* is for rows that aten\.flip.* {CUT}",
    ),
}


def in_two_buffers(w: Tensor, x: Tensor) -> Tensor:
    steps, mixed = torch.zeros(len(x), 6, 8, dtype=x.dtype), torch.zeros_like(x)
    for t in range(6):
        steps[:, t] = F.dropout(x[:, t] @ w)
    mixed[:, 1:] = steps[:, :-1]
    return F.dropout(mixed)


def masked(w: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.bernoulli(torch.full(x.shape, 0.4)).bool()] = 0
    x[x > 1] = 1
    return F.dropout(x @ w)


def patches(w: Tensor, x: Tensor) -> Tensor:
    order = uniform(len(x), 6).argsort(1)
    kept = x.gather(1, order[:, :4, None].expand(-1, -1, 8))
    return F.dropout(kept @ w)


def contrast(w: Tensor, x: Tensor) -> Tensor:
    """What comes after all draws may do anything."""
    both = torch.cat([F.dropout(x @ w), F.dropout(x)])
    return both[torch.arange(2 * len(x)).roll(len(x))].view(2, -1, 6, 8).sum(0)


_rnn, _rnn_state = fdp.functional(torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5).double())
_heads, _heads_state = fdp.functional(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3).double())
_conv, _conv_state = fdp.functional(
    torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Dropout2d(0.4), torch.nn.MaxPool2d(2), torch.nn.Flatten()
    ).double()
)

KEPT: dict[str, Program] = {
    "two of each row": lambda w, x: F.dropout(torch.stack([x, x @ w], 1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1),
    "cat of columns": lambda w, x: F.dropout(torch.cat([w[:1].expand(len(x), 1, 8), x], 1))[:, 1:],
    "cat after all draws": contrast,
    "repeat_interleave": lambda w, x: F.dropout(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).sum(1),
    "expand": lambda w, x: F.dropout(x[:, None].expand(-1, 3, -1, -1).reshape(-1, 6, 8)).unflatten(0, (-1, 3)).sum(1),
    "samples first": lambda w, x: ((x + uniform(3, *x.shape)).flatten(0, 1) @ w).view(3, *x.shape).mean(0),
    "a place of each row": lambda w, x: x + F.dropout(x[torch.arange(len(x)), -1])[:, None],
    "numbers of another kind": lambda w, x: F.dropout(x[torch.arange(len(x), dtype=torch.int32).long()[:, None], :1]),
    "heads": lambda w, x: F.dropout(x.view(-1, 6, 2, 4).transpose(1, 2).reshape(-1, 6, 4) @ w[:4, :4]).view_as(x),
    "some columns": lambda w, x: x * uniform(len(x), 6).argsort(1)[..., None],
    "filled in place": lambda w, x: torch.zeros(8, 6, len(x), dtype=x.dtype).permute(2, 1, 0).normal_() + x,
    "rrelu of columns": lambda w, x: F.rrelu((x @ w).transpose(0, 1), training=True, inplace=True).transpose(0, 1),
    "buffers": in_two_buffers,
    "masks": masked,
    "patches": patches,
    "time first": lambda w, x: _rnn(_rnn_state, x.transpose(0, 1))[0][0].transpose(0, 1),
    "a layer with time first": lambda w, x: _heads(_heads_state, x.transpose(0, 1))[0].transpose(0, 1),
    "images": lambda w, x: F.dropout(_conv(_conv_state, x[:, None])[0]),
    "sorted columns": lambda w, x: F.dropout(x.flip(1)).gather(1, x.argsort(1)) @ w,
    "a gradient inside": lambda w, x: torch.func.grad(lambda a: F.dropout(a @ w).square().sum())(x) + F.dropout(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_rows_before_a_draw_is_refused(name: str):
    function, message = REFUSED[name]
    for mode in (torch.enable_grad, torch.inference_mode):
        with pytest.raises(RuntimeError, match=rf"{message}.*{WAY_OUT}"), mode():
            fdp.dp_apply(function, W, X, fdp.virtual_devices(2), **ROWS)


@pytest.mark.parametrize("name", KEPT)
def test_rows_keep_their_draws(name: str):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return KEPT[name](w, x).square().mean()

    want = fdp.value_and_grad(loss, devices="cpu", **ROWS)(W, X)
    for slots, pieces in ((3, 1), (2, 2)):
        step = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), microbatches=pieces, **ROWS)
        torch.testing.assert_close(step(W, X), want, rtol=1e-10, atol=1e-10)


def test_noise_that_is_split_is_the_way_out():
    def noisy(w: Tensor, x: Tensor, noise: Tensor) -> Tensor:
        return (x.flip(0) * noise.flip(0)).flip(0) @ w

    both = X, torch.rand(X.shape, dtype=X.dtype, generator=torch.Generator().manual_seed(3))
    want = fdp.dp_apply(noisy, W, both, "cpu", **ROWS)
    torch.testing.assert_close(fdp.dp_apply(noisy, W, both, fdp.virtual_devices(3), **ROWS), want)


@pytest.mark.parametrize("columns", [101, 103, 101 * 103, 3])
def test_columns_may_be_as_many_as_the_rows_of_a_first_look(columns: int):
    x = torch.linspace(0, 9, 5 * 2 * columns, dtype=torch.float64).sin().reshape(5, 2, columns)

    def plain(_: None, x: Tensor) -> Tensor:
        return F.dropout(x).gather(2, x.argsort(2)) + F.dropout(x.flip(2)) * torch.rand(columns, dtype=x.dtype)

    def inside(_: None, x: Tensor) -> Tensor:
        return F.dropout(x.transpose(0, 1).reshape(-1, columns)).view(2, -1, columns).transpose(0, 1)

    want = fdp.dp_apply(plain, None, x, "cpu", **ROWS)
    torch.testing.assert_close(fdp.dp_apply(plain, None, x, fdp.virtual_devices(3), **ROWS), want)
    with pytest.raises(RuntimeError, match="Put the rows first"):
        fdp.dp_apply(inside, None, x, fdp.virtual_devices(3), **ROWS)


def test_a_draw_whose_size_the_function_closes_over():
    columns = [3]

    def noisy(_: None, x: Tensor) -> Tensor:
        return uniform(len(x), columns[0])

    for columns[0] in (3, 4, 2):
        want = fdp.dp_apply(noisy, None, X, "cpu", **ROWS)
        assert want.shape == (13, columns[0])
        torch.testing.assert_close(fdp.dp_apply(noisy, None, X, fdp.virtual_devices(3), **ROWS), want)


def test_numbers_that_are_drawn_once_more():
    def forked(w: Tensor, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return F.dropout(x @ w)

    want = fdp.dp_apply(forked, W, X, "cpu", **ROWS)
    torch.testing.assert_close(fdp.dp_apply(forked, W, X, fdp.virtual_devices(3), **ROWS), want)


def test_rows_of_a_list():
    def run(function: Callable[..., Tensor], devices: Any) -> Tensor:
        return fdp.dp_apply(function, W, list(X), devices, in_dims="items", **ROWS)

    def padded(w: Tensor, items: list[Tensor]) -> Tensor:
        return F.dropout(torch.nn.utils.rnn.pad_sequence(items, batch_first=True) @ w)

    def joined(w: Tensor, items: list[Tensor]) -> Tensor:
        return F.dropout(torch.cat(items) @ w).view(-1, 6, 8)

    for function in (padded, joined):
        torch.testing.assert_close(run(function, fdp.virtual_devices(3)), run(function, "cpu"))
    with pytest.raises(RuntimeError, match=CUT):
        run(lambda w, items: F.dropout(torch.stack(items[::-1])).flip(0), fdp.virtual_devices(2))


def test_slots_without_rows():
    """Of no rows torch draws nothing for a dropout: what comes afterwards is the same draw still."""

    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(x) @ F.dropout(w) + uniform(len(x), 1, 1)

    def run(slots: int) -> Tensor:
        devices = fdp.virtual_devices(slots)
        held = fdp.scatter(X[:2], devices, keep_empty=True)
        found = fdp.parallel_apply(noisy, fdp.replicate(W, devices), held, **ROWS)
        assert isinstance(found, fdp.Sharded)
        return torch.cat(found.shards)

    torch.testing.assert_close(run(4), run(1))


def test_anomaly_detection_around():
    with torch.autograd.set_detect_anomaly(True):
        step = fdp.grad(lambda w, x: F.dropout(x @ w).mean(), devices=fdp.virtual_devices(2), **ROWS)
        assert step(W, X).isfinite().all()
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (True, True)


def test_no_rows():
    for function in (lambda w, x: F.dropout(x @ w), lambda w, x: x * uniform(len(x), 1, 1)):
        for devices in ("cpu", fdp.virtual_devices(2)):
            assert fdp.dp_apply(function, W, X[:0], devices, **ROWS).shape == (0, 6, 8)
