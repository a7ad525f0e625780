"""Loop bounds from masks, and masks that must not bound anything."""

from __future__ import annotations

import math

import pytest
import torch

from tests.block.programs import ATTENTION, inputs
from tests.block.test_fuse import run_blocks
from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.algebra.text import Names
from tilefold.block.bounds import _settled
from tilefold.block.ir import Loop, walk
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.text import parse

CAUSAL = "where(j <= i, s[b, h, i, j] * 0.35, -inf)"


def masked(text: str) -> tuple[str | None, str | None, object]:
    """Bounds of the key loop for an attention with this score expression."""
    p = parse(ATTENTION.replace(CAUSAL, text))
    fused = fuse(p)
    (loop,) = [n for n in walk(fused.kernels[0].block.body) if isinstance(n, Loop) and n.kind == "for"]
    start = None if loop.start is None else expr_text.show(loop.start)
    stop = None if loop.stop is None else expr_text.show(loop.stop)
    return start, stop, p


@pytest.mark.parametrize(
    "text,start,stop",
    [
        (CAUSAL, None, "minimum(size(j), tile_stop(i))"),
        ("where(j < i, s[b, h, i, j], -inf)", None, "minimum(size(j), tile_stop(i) + -1)"),
        ("where(i >= j, s[b, h, i, j], -inf) + 0.0", None, "minimum(size(j), tile_stop(i))"),
        (
            "where((j <= i) & (i - j < 5), s[b, h, i, j], -inf)",
            "maximum(0, tile_start(i) + -4)",
            "minimum(size(j), tile_stop(i))",
        ),
        ("where(j > i, -inf, s[b, h, i, j])", None, "minimum(size(j), tile_stop(i))"),
        ("where(where(j <= i, 1.0, 0.0) == 0.0, -inf, s[b, h, i, j])", None, "minimum(size(j), tile_stop(i))"),
        # not bounded: a bias that keeps masked keys alive, a parity mask, a finite fill
        ("where(j % 2 == 0, s[b, h, i, j], -inf)", None, None),
        ("where(j <= i, s[b, h, i, j], -10000.0)", None, None),
        ("where((j <= i) | (j < 3), s[b, h, i, j], -inf)", None, None),
    ],
)
def test_bounds(text: str, start: str | None, stop: str | None) -> None:
    got_start, got_stop, p = masked(text)
    assert (got_start, got_stop) == (start, stop)
    x = inputs(p, 23, seed=3)
    want = tensor_interp.run(p, x, exact=True)
    got = run_blocks(fuse(p), x, 23, {"i": 4, "j": 3}, exact=True)
    torch.testing.assert_close(got["o"], want["o"], equal_nan=True, rtol=1e-9, atol=1e-9)


NAMES = Names(dims=set("ij"), tensors=set("xywsm"))


def parsed(text):
    return expr_text.parse(text, NAMES)


MASK = parsed("j <= i")
NONE = Const(-math.inf, DType.F32)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("where(j <= i, x[i, j], -inf)", "x[i, j]", "-inf"),
        ("where(j <= i, x[i, j], -inf) * 2.0", "x[i, j] * 2.0", "-inf"),
        ("where(j <= i, x[i, j], -inf) * -2.0", "x[i, j] * -2.0", "-inf * -2.0"),
        ("where(j <= i, x[i, j], -inf) / 2.0", "x[i, j] / 2.0", "-inf"),
        ("where(j <= i, x[i, j], -inf) / -2.0", "x[i, j] / -2.0", "-inf / -2.0"),
        ("where(j <= i, x[i, j], -inf) / 0.0", "x[i, j] / 0.0", "-inf / 0.0"),
        ("where(j <= i, x[i, j], -inf) + y[j]", "x[i, j] + y[j]", "-inf"),
        ("y[j] + where(j <= i, x[i, j], -inf)", "y[j] + x[i, j]", "-inf"),
        ("where(j <= i, x[i, j], -inf) - y[j]", "x[i, j] - y[j]", "-inf"),
        ("y[j] - where(j <= i, x[i, j], -inf)", "y[j] - x[i, j]", "y[j] - -inf"),
        ("exp(where(j <= i, x[i, j], -inf) - y[j]) * w[j]", "exp(x[i, j] - y[j]) * w[j]", "0.0"),
        ("w[j] * exp2(where(j <= i, x[i, j], -inf))", "w[j] * exp2(x[i, j])", "0.0"),
        ("where(j <= i, x[i, j], 0.0) / y[j]", "x[i, j] / y[j]", "0.0"),
        ("where(j <= i, x[i, j], 0.0) + y[j]", "x[i, j] + y[j]", "0.0 + y[j]"),
        ("f32(where(j <= i, x[i, j], -inf))", "f32(x[i, j])", "-inf"),
        ("where(j <= i + 1, x[i, j], -inf)", "where(j <= i + 1, x[i, j], -inf)", "where(j <= i + 1, x[i, j], -inf)"),
    ],
)
def test_what_an_element_is_where_the_mask_is_known(text, inside, outside):
    for truth, want in ((True, inside), (False, outside)):
        assert _settled(parsed(text), MASK, truth, {}) == parsed(want)


def test_values_settled_before_are_used():
    assert _settled(parsed("exp(s[i, j] - m[i])"), MASK, False, {"s": NONE}) == Const(0.0, DType.F32)
    assert _settled(parsed("s[i, j]"), MASK, False, {"t": NONE}) == parsed("s[i, j]")
