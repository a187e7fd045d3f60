"""Draws for rows wherever these are: what each row draws on one device, or an error."""

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


REFUSED: dict[str, Program] = {
    "cat": lambda w, x: first_half(F.dropout(torch.cat([x, x @ w]))),
    "cat of times": lambda w, x: F.dropout(torch.cat(x.unbind(1))).view(6, -1, 8).transpose(0, 1),
    "repeat": lambda w, x: first_half(F.dropout(x.repeat(2, 1, 1))),
    "expand, first": lambda w, x: first_half(F.dropout(x.expand(2, *x.shape).flatten(0, 1))),
    "chunk": lambda w, x: x * first_half(uniform(2 * len(x), 1, 1)),
    "slice": lambda w, x: x * uniform(2 * len(x), 1, 1)[len(x) :],
    "slice alone": lambda w, x: uniform(2 * len(x), 6, 8)[len(x) :] @ w,
    "unfold": lambda w, x: x * uniform(2 * len(x)).unfold(0, len(x), len(x))[0, :, None, None],
    "unflatten": lambda w, x: x * uniform(2 * len(x), 1, 1).unflatten(0, (2, -1))[0],
    "as_strided": lambda w, x: x * uniform(2 * len(x)).as_strided((len(x), 1, 1), (1, 1, 1)),
    "resize_": lambda w, x: x + uniform(x.numel()).resize_(6, len(x), 8).transpose(0, 1),
    "parts in time": lambda w, x: x + torch.stack(uniform(6 * len(x)).chunk(6), 1)[..., None],
    "filled": filled,
    "filled with draws": filled_with_draws,
    "filled by time": filled_by_time,
    "flip of a draw": lambda w, x: x * uniform(len(x), 1, 1).flip(0),
    "roll of a draw": lambda w, x: x * uniform(len(x), 1, 1).roll(1, 0),
    "order of a draw": lambda w, x: x[uniform(len(x)).argsort()],
    "sort of a draw": lambda w, x: x * uniform(len(x), 1, 1).sort(0)[0],
    "rows the other way round": lambda w, x: F.dropout(torch.stack(x.unbind()[::-1])).flip(0),
    "last row first": lambda w, x: F.dropout(torch.cat([x[-1:], x[:-1]])).roll(-1, 0),
    "a lookup": lambda w, x: F.dropout(F.embedding(x[:, 0, 0].argsort(), x.flatten(1))).view_as(x),
    "a draw that is put": lambda w, x: x + x.index_put((x[:, 0, 0].argsort(),), torch.rand_like(x)),
}

KEPT: dict[str, Program] = {
    "cat, rows first": lambda w, x: F.dropout(torch.stack([x, x @ w], 1).flatten(0, 1))[::2],
    "cat of columns": lambda w, x: F.dropout(torch.cat([w[:1].expand(len(x), 1, 8), x], 1))[:, 1:],
    "cat that is taken apart": lambda w, x: torch.cat([F.dropout(x), x]).chunk(2)[0] * uniform(len(x), 1, 1),
    "two for each": lambda w, x: uniform(2 * len(x), 1, 1)[1::2] * x,
    "repeat_interleave": lambda w, x: F.dropout(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).sum(1),
    "expand": lambda w, x: F.dropout(x[:, None].expand(-1, 3, -1, -1).reshape(-1, 6, 8)).unflatten(0, (-1, 3)).sum(1),
    "samples first": lambda w, x: ((x + uniform(3, *x.shape)).flatten(0, 1) @ w).view(3, *x.shape).mean(0),
    "row by row": lambda w, x: F.dropout(torch.stack([row @ w for row in x])),
    "split and joined": lambda w, x: F.dropout(torch.cat([part @ w for part in x.split(40)])),
    "a place of each row": lambda w, x: x + F.dropout(x[torch.arange(len(x)), -1])[:, None],
    "heads": lambda w, x: F.dropout(x.view(-1, 6, 2, 4).transpose(1, 2).reshape(-1, 6, 4) @ w[:4, :4]).view_as(x),
    "some columns": lambda w, x: x * uniform(len(x), 6).argsort(1)[..., None],
    "filled in place": lambda w, x: torch.zeros(8, 6, len(x), dtype=x.dtype).permute(2, 1, 0).normal_() + x,
    "rrelu of columns": lambda w, x: F.rrelu((x @ w).transpose(0, 1), training=True, inplace=True).transpose(0, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_in_other_places_are_refused(name: str):
    for mode in (torch.enable_grad, torch.inference_mode):
        with pytest.raises(RuntimeError, match=r"Put the rows first|have changed places"), mode():
            fdp.dp_apply(REFUSED[name], W, X, fdp.virtual_devices(2), **ROWS)


@pytest.mark.parametrize("name", KEPT)
def test_rows_keep_their_draws(name: str):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return KEPT[name](w, x).square().mean()

    want = fdp.value_and_grad(loss, devices="cpu", **ROWS)(W, X)
    for slots, pieces in ((3, 1), (2, 2)):
        step = fdp.value_and_grad(loss, devices=fdp.virtual_devices(slots), microbatches=pieces, **ROWS)
        torch.testing.assert_close(step(W, X), want, rtol=1e-10, atol=1e-10)


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
    with pytest.raises(RuntimeError, match="have changed places"):
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
