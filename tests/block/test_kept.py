"""Which products keep computed operands in float32, and which a matrix unit may round to 16 bits."""

from __future__ import annotations

import pytest

from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.render import render
from tilefold.block.fuse import Fused
from tilefold.block.ir import Accumulate, Let, walk
from tilefold.block.kept import settled
from tilefold.block.text import parse as parse_block
from tilefold.block.text import show as show_block
from tilefold.block.text import show_head
from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse
from tilefold.tile.lower import lower
from tilefold.tile.text import parse as parse_tile
from tilefold.tile.text import show as show_tile

ATTENTION = """
program attention()
  input q: {kind}[64, 32]
  input k: {kind}[96, 32]
  input v: {kind}[96, 48]
  dim i = 64
  dim j = 96
  dim d = 32
  dim e = 48
  s[i, j]: {kind} = sum[d] q[i, d] * k[j, d]
  m[i]: f32 = max[j] {bound}
  p[i, j]: f32 = exp(s[i, j] - m[i])
  t[i]: f32 = sum[j] p[i, j]
  y[i, e]: {out} = sum[j] p[i, j] / t[i] * v[j, e]
  return y
"""

SQUARES = """
program squares()
  input x: {kind}[64, 32]
  input w: {kind}[32, 48]
  dim i = 64
  dim j = 32
  dim e = 48
  y[i, e]: {out} = sum[j] {x} * w[j, e]
  return y
"""

NORM = """
program norm()
  input x: {kind}[64, 96]
  input g: {kind}[96]
  input w: {kind}[96, 48]
  dim i = 64
  dim j = 96
  dim e = 48
  r[i]: f32 = sum[j] x[i, j] * x[i, j]
  y[i, e]: {kind} = sum[j] x[i, j] * g[j] / sqrt(r[i]) * w[j, e]
  return y
"""


def fused(text: str, **put: str) -> Fused:
    return fuse(parse(text.format(**put)))


def kept(f: Fused) -> set[DType | None]:
    """What the sums over products of computed operands keep."""
    found: set[DType | None] = set()
    for k in f.kernels:
        made = {n.name for n in walk(k.block.body) if isinstance(n, Let)}
        for n in walk(k.block.body):
            if (
                isinstance(n, Let | Accumulate)
                and n.reducer == "sum"
                and any(f"{x}[" in show_head(n).split("=", 1)[1] for x in made)
            ):
                found.add(n.kept)
    return found


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_sum_in_float32_keeps_what_it_computes(kind):
    assert kept(fused(SQUARES, kind=kind, out="f32", x="(x[i, j] * x[i, j])")) == {DType.F32}
    assert kept(fused(SQUARES, kind=kind, out=kind, x="(x[i, j] * x[i, j])")) == {None}
    assert kept(fused(SQUARES, kind="f32", out="f32", x="(x[i, j] * x[i, j])")) == {None}  # nothing to round to


def test_numbers_between_minus_one_and_one_are_not_kept():
    assert kept(fused(SQUARES, kind="f16", out="f32", x="tanh(x[i, j])")) == {None}
    assert kept(fused(SQUARES, kind="f16", out="f32", x="(tanh(x[i, j]) * 2.0)")) == {DType.F32}


def test_what_the_program_rounds_is_not_kept():
    assert kept(fused(SQUARES, kind="f16", out="f32", x="e4m3(x[i, j] * x[i, j])")) == {None}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_tensors_of_16_bits_are_multiplied_as_such_whatever_the_sum_has(kind):
    """Scores in float32 of queries that the program has normalised in 16 bits."""
    text = SQUARES.replace("  y[", "  s[i, j]: {of} = x[i, j] * x[i, j]\n  y[")
    assert kept(fused(text, kind=kind, of=kind, out="f32", x="s[i, j]")) == {None}
    assert kept(fused(text, kind=kind, of="f32", out="f32", x="s[i, j]")) == {DType.F32}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("out", ["same", "f32"])
def test_a_tensor_of_float32_that_the_program_rounds_is_rounded(kind, out):
    """It lies in memory for others as well: multiplied as it is, a linear attention took 1,360 us on an H100."""
    text = SQUARES.replace("input x: {kind}", "input x: f32")
    out = kind if out == "same" else out
    (k,) = fused(text, kind=kind, out=out, x=f"{kind}(x[i, j])").kernels
    assert {n.kept for n in walk(k.block.body) if isinstance(n, Let | Accumulate) and n.reducer} == {DType.BF16}
    found = render(lower(k.block), TritonConfig()).source
    assert f".to(tl.{'float16' if kind == 'f16' else 'bfloat16'})" in found
    assert "ieee" not in found
    (k,) = fused(text, kind="f32", out=out, x=f"{kind}(x[i, j])").kernels  # the other is no 16 bits
    assert DType.BF16 not in {n.kept for n in walk(k.block.body) if isinstance(n, Let | Accumulate)}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("out", ["f16", "f32"])
def test_probabilities_are_not_kept(kind, out):
    assert kept(fused(ATTENTION, kind=kind, out=out, bound="s[i, j]")) == {None}


def test_what_another_maximum_bounds_is_kept():
    assert DType.F32 in kept(fused(ATTENTION, kind="bf16", out="f32", bound="s[i, j] * 0.5"))


def test_fp16_does_not_hold_what_a_fold_multiplies_instead():
    """x g is summed, and divided at the end: it may be larger than the x g / r that the program multiplies."""
    assert DType.F16 in kept(fused(NORM, kind="f16"))
    assert kept(fused(NORM, kind="bf16")) == {None}


def test_text_round_trips():
    for f in (fused(SQUARES, kind="f16", out="f32", x="(x[i, j] * x[i, j])"), fused(NORM, kind="f16")):
        for k in f.kernels:
            assert parse_block(show_block(k.block)) == k.block
            tile = lower(k.block)
            assert ".f32 " in show_tile(tile) or ".f16" in show_tile(tile)
            assert show_tile(parse_tile(show_tile(tile))) == show_tile(tile)


SCALED = """
block scaled()
  input x: bf16[64, 32]
  input r: {stat}[64]
  input w: bf16[48, 32]
  dim i = 64
  dim j = 32
  dim e = 48
  result y[i, e]: f32
  forall i
    forall e
      let a[i, j]: f32 = tanh(x[i, j] * r[i])
      let b[e, j]: f32 = tanh(w[e, j])
      let y_s[i, e]: f32 = sum.f32[j] a[i, j] * b[e, j]
      store y[i, e] over (i, e) = y_s[i, e]
  return y
"""


@pytest.mark.parametrize(("stat", "expected"), [("bf16", None), ("f32", DType.F32)])
def test_two_computed_operands_beside_float32_are_kept(stat, expected):
    """Small numbers as well: of neither has the program the 16 bits that its rounding would cost."""
    (found,) = (
        n.kept for n in walk(settled(parse_block(SCALED.format(stat=stat))).body) if isinstance(n, Let) and n.reducer
    )
    assert found is expected
