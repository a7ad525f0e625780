"""Loop bounds from masks, and masks that must not bound anything."""

from __future__ import annotations

import math

import pytest
import torch

from tests.block.programs import ATTENTION, inputs
from tests.block.test_fuse import run_blocks
from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const
from tilefold.algebra.text import Names
from tilefold.algebra.text import parse as parse_expr
from tilefold.block.bounds import _dead, _settled, of_positions
from tilefold.block.ir import Accumulate, Loop, walk
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
        ("where(j < inf, s[b, h, i, j], -inf)", None, None),
        ("where((j <= i) | (j % 2 == 0), s[b, h, i, j], -inf)", None, None),
        ("where((j <= i) | (j >= 3), s[b, h, i, j], -inf)", None, None),
        # a prefix that all see
        ("where((j <= i) | (j < 3), s[b, h, i, j], -inf)", None, "minimum(size(j), maximum(tile_stop(i), 3))"),
        ("where((j >= i) | (j >= 3), s[b, h, i, j], -inf)", "maximum(0, minimum(tile_start(i), 3))", None),
    ],
)
def test_bounds(text: str, start: str | None, stop: str | None) -> None:
    got_start, got_stop, p = masked(text)
    assert (got_start, got_stop) == (start, stop)
    x = inputs(p, 23, seed=3)
    want = tensor_interp.run(p, x, exact=True)
    got = run_blocks(fuse(p), x, 23, {"i": 4, "j": 3}, exact=True)
    torch.testing.assert_close(got["o"], want["o"], equal_nan=True, rtol=1e-9, atol=1e-9)


DATA = ATTENTION.replace("  dim b", "  input n: i64[2]\n  input w: i32[2, 4]\n  input f: f32[2]\n  dim b", 1)


@pytest.mark.parametrize(
    "text,start,stop",
    [
        ("where(j < n[b], s[b, h, i, j], -inf)", None, "minimum(size(j), tile_max(n[b]))"),
        (
            "where((j >= w[b, i // 8]) & (j <= n[b] + i), s[b, h, i, j], -inf)",
            "maximum(0, tile_min(w[b, i // 8]))",
            "minimum(size(j), tile_max(n[b]) + tile_stop(i))",
        ),
        (
            "where(j < 2 * minimum(n[b], 5), s[b, h, i, j], -inf)",
            None,
            "minimum(size(j), 2 * tile_max(minimum(n[b], 5)))",
        ),
        (
            "where((i < n[b]) & (j <= i), s[b, h, i, j], -inf)",
            None,
            "minimum(minimum(size(j), where(tile_start(i) + -1 * tile_max(n[b]) < 0, size(j), 0)), tile_stop(i))",
        ),
        # not bounded: data of the streamed dim, floats, a disjunction, masked keys that count
        ("where(j < w[b, j // 8], s[b, h, i, j], -inf)", None, None),
        ("where(j < f[b], s[b, h, i, j], -inf)", None, None),
        ("where((j < n[b]) | (i < 3), s[b, h, i, j], -inf)", None, None),
        ("where(j < n[b], s[b, h, i, j], 0.0)", None, None),
    ],
)
def test_data_bounds_loops(text, start, stop):
    """Whatever the data is: negative, or beyond what there is."""
    p = parse(DATA.replace(CAUSAL, text))
    (loop,) = [n for n in walk(fuse(p).kernels[0].block.body) if isinstance(n, Loop) and n.kind == "for"]
    assert [None if e is None else expr_text.show(e) for e in (loop.start, loop.stop)] == [start, stop]
    for lengths in ([0, 7], [23, -5], [1 << 40, 1]):
        x = inputs(p, 23, seed=3) | {"n": torch.tensor(lengths), "w": torch.randint(-9, 30, (2, 4)).to(torch.int32)}
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
        ("where(j <= i, x[i, j], -inf) * 0.5", "x[i, j] * 0.5", "-inf"),
        ("where(j <= i, x[i, j], -inf) * -2.0", "x[i, j] * -2.0", "-inf * -2.0"),
        ("where(j <= i, x[i, j], -inf) * 0.0", "0.0", "-inf * 0.0"),
        ("where(j <= i, x[i, j], -inf) / 2.0", "x[i, j] / 2.0", "-inf"),
        ("where(j <= i, x[i, j], -inf) / 0.5", "x[i, j] / 0.5", "-inf"),
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


def test_a_body_that_does_more_than_accumulate_is_never_dead():
    fused = fuse(parse(ATTENTION))
    (loop,) = [n for n in walk(fused.kernels[0].block.body) if isinstance(n, Loop) and n.kind == "for"]
    assert _dead(loop.body, MASK, False) and not _dead(loop.body, MASK, True)
    assert not _dead((*loop.body, loop), MASK, False) and not _dead((loop, *loop.body), MASK, False)
    assert not _dead(tuple(n for n in loop.body if not isinstance(n, Accumulate)), MASK, False)


def test_values_settled_before_are_used():
    assert _settled(parsed("exp(s[i, j] - m[i])"), MASK, False, {"s": NONE}) == Const(0.0, DType.F32)
    assert _settled(parsed("s[i, j]"), MASK, False, {"t": NONE}) == parsed("s[i, j]")


@pytest.mark.parametrize(
    ("text", "own"),
    [("(j <= i) & (i - j < 5)", True), ("not (j <= i)", True), ("x[j] <= 0.0", False), ("(i - j) % 4 == 0", False)],
)
def test_masks_of_positions_are_put_where_they_are_read(text: str, own: bool) -> None:
    """A window that the scores and their gradient read was a statement, and bounded neither loop."""
    text, negated = text.removeprefix("not "), text.startswith("not ")
    e = parse_expr(text, Names(dims={"i", "j"}, tensors={"x"}))
    assert of_positions(Call("not", (e,)) if negated else e, frozenset()) is own
