"""Masks by the least number of a type are masks by -inf where no row is masked whole, and numbers elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.algebra.expr import Const, walk
from tilefold.tensor import interp
from tilefold.tensor.least_masks import infinite_masks
from tilefold.tensor.text import parse

LEAST = torch.finfo(torch.bfloat16).min
PROGRAM = """program attention({syms})
  input q: bf16[{rows}, 4]
  input k: bf16[{keys}, 4]
  input v: bf16[{keys}, 4]
  input n: i64[{rows}]
  input b: f32[{keys}]
  dim j = {rows}
  dim l = {keys}
  dim m = 4
  s[j, l]: f32 = sum[m] q[j, m] * k[l, m]
  t[j, l]: bf16 = {score}
  top[j]: f32 = max[l] t[j, l]
  e[j, l]: f32 = exp(t[j, l] - {top})
  z[j]: f32 = sum[l] e[j, l]
  p[j, l]: bf16 = e[j, l] / z[j]
  o[j, m]: bf16 = sum[l] p[j, l] * v[l, m]
  return {results}
"""


def program(score: str, rows="9", keys="9", syms="", top="top[j]", results="o"):
    text = PROGRAM.format(
        score=score.replace("LEAST", repr(LEAST)), rows=rows, keys=keys, syms=syms, top=top, results=results
    )
    return parse(text)


def infinite(p) -> bool:
    (t,) = [c for c in p.body if c.name == "t"]
    return any(isinstance(x, Const) and x.value == -math.inf for x in walk(t.body))


CAUSAL = "s[j, l] * 0.5 + bf16(where(l <= j, 0.0, LEAST))"


@pytest.mark.parametrize(
    "score",
    [
        CAUSAL,
        "where(l <= j, s[j, l] * 0.5, LEAST)",
        "where(l > j, LEAST, s[j, l])",
        "bf16(where((l <= j) & (l > j - 3), 0.0, LEAST)) + s[j, l] / 2.0",
        "where(l >= j, 30.0 * tanh(s[j, l]), LEAST)",
        "s[j, l] + bf16(where(l >= j + 1, LEAST, 0.0))",
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e2])
def test_masks_of_positions_are_infinite(score, scale):
    p = program(score)
    made = infinite_masks(p)
    assert not infinite(p) and infinite(made)
    gen = torch.Generator().manual_seed(0)
    x = {n: (torch.randn(9, 4, generator=gen) * scale).bfloat16() for n in "qkv"}
    x |= {"n": torch.zeros(9, dtype=torch.int64), "b": torch.zeros(9)}
    found, want = interp.run(made, x), interp.run(p, x)
    for name in want.keys() - {"t"}:
        assert torch.equal(found[name], want[name]) and want[name].isfinite().all()


def test_a_safe_softmax_has_them_too():
    assert infinite(infinite_masks(program(CAUSAL, top="where(top[j] == -inf, 0.0, top[j])")))


@pytest.mark.parametrize("syms, rows, keys, score, found", [
    ("s0", "s0", "s0", "(l <= j) & (l > j - 3)", True),
    ("s0, s1", "s0", "s1", "l <= j", True),
    ("s0, s1", "s0", "s1", "(l <= j) & (l > j - 3)", False),  # there may be more rows than keys
])  # fmt: skip
def test_lengths_may_be_symbols(syms, rows, keys, score, found):
    p = program(f"where({score}, s[j, l], LEAST)", rows, keys, syms)
    assert infinite(infinite_masks(p)) is found


@pytest.mark.parametrize(
    "score, how",
    [
        ("where(l < j, s[j, l], LEAST)", {}),  # the first row sees nothing
        ("where((l <= j) & (l > j + 1), s[j, l], LEAST)", {}),
        ("where((l <= j) & (l > j - 3), s[j, l], LEAST)", {"rows": "12"}),  # the last rows see nothing
        ("where(l < n[j], s[j, l], LEAST)", {}),  # data decides
        ("where(l <= j, s[j, l], -65504.0)", {}),  # scores may be as low
        (CAUSAL + " + b[l]", {}),  # so may what is added
        (CAUSAL, {"results": "o, t"}),
        (CAUSAL, {"top": "0.5 * top[j]"}),
    ],
)
def test_other_masks_stay_numbers(score, how):
    p = program(score, **how)
    assert infinite_masks(p) == p
