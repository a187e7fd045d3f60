"""`explain`: how a plan looks."""

from typing import Any

import pytest

import fdp
from tests.common.numbers import numbers

SLOTS = fdp.virtual_devices(3)
GPUS = [f"cuda:{i}" for i in range(3)]


def test_text():
    plan = fdp.explain(lambda w, x: (x @ w, fdp.psum(x.sum())), numbers(3, 2), numbers(7, 3), GPUS, out_dims=(0, None))
    assert str(plan) == repr(plan) == TEXT.strip()


TEXT = """
Plan: 7 rows on 3 slots
slot   device   from:to   rows   bytes
──────────────────────────────────────
   0   cuda:0       0:3      3   120 B
   1   cuda:1       3:5      2    96 B
   2   cuda:2       5:7      2    96 B

Runs: one shard after the other: executor='auto'; they wait for each other in psum

Steps: replicate 1 leaf · split inputs dim 0 into 3 + 2 x 2 · note versions · run 3 shards · check writes · join outputs

Arguments
leaf     tensor          how                 rows         bytes per slot      copies
────────────────────────────────────────────────────────────────────────────────────
params   float64[3, 2]   whole                                  3 x 48 B   3 (144 B)
inputs   float64[7, 3]   split along dim 0   3 + 2 x 2   72 B + 2 x 48 B   3 (168 B)

Outputs
leaf     tensor          how                        rows         bytes per slot     copies
──────────────────────────────────────────────────────────────────────────────────────────
out[0]   float64[7, 2]   concatenated along dim 0   3 + 2 x 2   48 B + 2 x 32 B   2 (64 B)
out[1]   float64[]       that of slot 0                                 3 x 8 B

Collectives
name   tensors   bytes per slot
───────────────────────────────
psum         1              8 B

Copies between devices: 12 (408 B)
"""


def long_plan() -> fdp.Plan:
    params = {"encoder.layers.11.self_attention.output_projection.weight": numbers(3, 2), "b": numbers(2)}
    return fdp.explain(lambda p, x: x, params, numbers(37, 3), [f"cuda:{i}" for i in range(8)])


def test_text_is_not_folded():
    text = str(long_plan())
    assert "params['encoder.layers.11.self_attention.output_projection.weight']   float64[3, 2]" in text
    assert "…" not in text


def test_html():
    for html in (long_plan()._repr_html_(), fdp.scatter(numbers(3), SLOTS)._repr_html_()):
        assert html.startswith("<pre style=")
        assert html.endswith("</pre>")
        assert "<html" not in html
        assert "\x1b" not in html
    assert "output_projection.weight&#x27;]" in long_plan()._repr_html_()


@pytest.mark.parametrize(
    ("randomness", "said"),
    [
        ("different", "with seeds of their own"),
        ("same", "with one seed"),
        ("rows", "with the random numbers of their rows"),
    ],
)
def test_steps_say_which_random_numbers_are_drawn(randomness: Any, said: str):
    plan = fdp.explain(lambda w, x: x @ w, numbers(3, 2), numbers(7, 3), SLOTS, seed=0, randomness=randomness)
    assert f"run 3 shards {said} · " in str(plan)
    step = fdp.grad(lambda w, x: (x @ w).mean(), devices=SLOTS, seed=0, randomness=randomness)
    assert f"run 3 shards {said}, gradients in" in str(fdp.explain(step, numbers(3, 2), numbers(7, 3)))
