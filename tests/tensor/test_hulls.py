"""Masks of equal numbers bound what they mask, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import inputs
from tilefold.algebra.text import show
from tilefold.block.ir import Loop, walk
from tilefold.plan.greedy import fuse
from tilefold.tensor import hulls, interp
from tilefold.tensor.hulls import bounded
from tilefold.tensor.text import parse

DOCUMENTS = """
program documents()
  input q: f32[2, 3, 600, 8]
  input k: f32[2, 3, 600, 8]
  input v: f32[2, 3, 600, 8]
  input a: i64[2, 600]
  dim b = 2
  dim h = 3
  dim i = 600
  dim j = 600
  dim d = 8
  dim e = 8
  s[b, h, i, j]: f32 = sum[d] q[b, h, i, d] * k[b, h, j, d]
  c[b, h, i, j]: f32 = where((a[b, i] == a[b, j]) & (j <= i), s[b, h, i, j] * 0.35, -inf)
  m[b, h, i]: f32 = max[j] c[b, h, i, j]
  p[b, h, i, j]: f32 = exp(c[b, h, i, j] - m[b, h, i])
  t[b, h, i]: f32 = sum[j] p[b, h, i, j]
  o[b, h, i, e]: f32 = sum[j] p[b, h, i, j] / t[b, h, i] * v[b, h, j, e]
  return o
"""
MASK = "where((a[b, i] == a[b, j]) & (j <= i), s[b, h, i, j] * 0.35, -inf)"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(hulls, "LEAST", 600)


def numbers(kind: str) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1)
    drawn = torch.randint(-3, 4, (2, 600), generator=gen)
    return {
        "sorted": drawn.sort(-1).values,
        "in any order": drawn,
        "of one kind": drawn * 0,
        "all different": torch.arange(1200).view(2, 600),
    }[kind]


@pytest.mark.parametrize("kind", ["sorted", "in any order", "of one kind", "all different"])
@pytest.mark.parametrize(
    "mask",
    [
        MASK,
        "where(~(a[b, i] == a[b, j]) | (j > i), -inf, s[b, h, i, j])",
        "where((a[b, j] != a[b, i]) | (j > i), -inf, s[b, h, i, j])",
    ],
    ids=["and", "not", "or"],
)
def test_they_say_where_they_may_be_true(mask, kind):
    p = parse(DOCUMENTS.replace(MASK, mask))
    done = bounded(p)
    x = inputs(p, 0, seed=2) | {"a": numbers(kind)}
    want, got = interp.run(p, x, exact=True), interp.run(done, x, exact=True)
    torch.testing.assert_close(got["o"], want["o"], rtol=0, atol=0)
    loops = [n for k in fuse(done).kernels for n in walk(k.block.body) if isinstance(n, Loop) and n.dim == "j"]
    assert any(
        "tile_min(first" in show(n.start) and "tile_max(last" in show(n.stop) for n in loops if n.start and n.stop
    )


@pytest.mark.parametrize(
    "mask",
    [
        "where((a[b, i] == a[b, j]) | (j <= i), s[b, h, i, j], -inf)",
        "where(a[b, i] != a[b, j], s[b, h, i, j], -inf)",
        "where(a[b, i] == a[b, 599 - j], s[b, h, i, j], -inf)",
        "where(a[b, j] == 1, s[b, h, i, j], -inf)",
        "where(a[b, i] == a[b, j], s[b, h, i, j], s[b, h, i, j] * 2.0)",
        "where((a[b, i] == a[b, j]) & (j < a[b, i // 64]), s[b, h, i, j], -inf)",
    ],
    ids=["a disjunction", "unequal", "another order", "a number", "nothing discarded", "bounded already"],
)
def test_what_is_left_as_it_is(mask):
    p = parse(DOCUMENTS.replace(MASK, mask))
    assert bounded(p) is p


def test_short_streams_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(hulls, "LEAST", 601)
    p = parse(DOCUMENTS)
    assert bounded(p) is p
