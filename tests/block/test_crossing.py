"""Rows of which a thread block has too much on both sides of a reduction are not held whole."""

from __future__ import annotations

import pytest

from tilefold.backends.triton.tiles import default_config
from tilefold.block.crossing import crossing
from tilefold.block.ir import Block, Loop
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.tensor.text import parse

SOFTMAX = """program softmax()
  input x: f32[64, {n}]
  dim i = 64
  dim j = {n}
  m[i]: f32 = max[j] x[i, j]
  s[i]: f32 = sum[j] exp(x[i, j] - m[i])
  y[i, j]: f32 = exp(x[i, j] - m[i]) / s[i]
  return y
"""
GRADIENT = """program gradient()
  input x: {t}[64, {n}]
  input dy: {t}[64, {n}]
  input l: f32[64]
  dim i = 64
  dim j = {n}
  p[i, j]: f32 = exp(x[i, j] - l[i])
  q[i, j]: f32 = log(p[i, j] + dy[i, j]) * dy[i, j]
  s[i]: f32 = sum[j] q[i, j] * p[i, j]
  dx[i, j]: {t} = p[i, j] * (q[i, j] - s[i])
  return dx
"""


def block(text: str, **given: object) -> Block:
    (k,) = fuse_for_gpu(parse(text.format(**given))).kernels
    return k.block


def held(b: Block) -> bool:
    return not any(isinstance(n, Loop) and n.kind == "for" for n in nodes_of(b.body))


def test_what_crosses():
    """Of a softmax its argument, then the exponential; of a gradient the weights and what they are multiplied by."""
    assert crossing(block(SOFTMAX, n=4096), "j", {"j": 4096}) == 4096
    assert crossing(block(GRADIENT, n=4096, t="f32"), "j", {"j": 4096}) == 2 * 4096


@pytest.mark.parametrize(("n", "kept"), [(16384, True), (32000, False)])
def test_rows_of_two_values_that_registers_do_not_have_are_read_twice(n: int, kept: bool):
    """On an H100 a gradient of divergences of 2,048 rows of 32,000 took 7.7 ms: its threads spilled 4 KB each."""
    b = block(GRADIENT, n=n, t="f32")
    assert held(b) is kept
    tile = default_config(b, {"i": 64, "j": n}).tiles.get("j")
    assert tile is None if kept else tile == 16384  # nothing crosses in either loop
    assert held(block(SOFTMAX, n=n))


GATE = """program gate()
  input a: f32[8, 64, 4096]
  input b: f32[8, 64, 4096]
  input dy: f32[8, 64, 4096]
  dim n = 8
  dim c = 64
  dim t = 4096
  da[n, c, t]: f32 = dy[n, c, t] * sigmoid(b[n, c, t]) * (1.0 - tanh(a[n, c, t]) * tanh(a[n, c, t]))
  db[n, c, t]: f32 = dy[n, c, t] * tanh(a[n, c, t]) * (sigmoid(b[n, c, t]) * (1.0 - sigmoid(b[n, c, t])))
  sa[c]: f32 = sum[n, t] da[n, c, t]
  sb[c]: f32 = sum[n, t] db[n, c, t]
  return da, db, sa, sb
"""


def test_gradients_that_are_written_where_they_are_summed_have_tiles_that_registers_hold():
    """On an H100 8 x 64 x 4,081 took 170 us: tiles of 8 x 1,024, of which threads spilled 4 to 6 KB."""
    b = fuse_for_gpu(parse(GATE)).kernels[0].block
    sizes = {d: int(e.value) for d, e in b.sizes.items()}
    tiles = default_config(b, sizes).tiles
    assert crossing(b, "t", {"n": 8, "t": tiles["t"]}, whole=False) <= 24576 < crossing(b, "t", {"n": 8, "t": 1024})


FORCES = """program forces()
  input x: f32[8, 1024, 3]
  dim b = 8
  dim i = 1024
  dim j = 1024
  dim k = 3
  d[b, i, j, k]: f32 = x[b, i, k] - x[b, j, k]
  r[b, i, j]: f32 = sum[k] d[b, i, j, k] * d[b, i, j, k]
  w[b, i, j]: f32 = exp(r[b, i, j])
  f[b, i, k]: f32 = sum[j] w[b, i, j] * d[b, i, j, k]
  return f
"""


def test_each_of_several_sums_reads_what_the_last_one_does():
    """Of pairs in three coordinates, one sum after the other: 512 neighbours a turn spilled 3,388 bytes a thread."""
    b = block(FORCES)
    lanes = {"i": 64, "j": 128, "k": 3}
    stream = next(n.dim for n in nodes_of(b.body) if isinstance(n, Loop) and n.kind == "for")
    rows = next(d for d in ("i", "j") if d != stream)
    of_pairs = 64 * 128
    assert crossing(b, stream, lanes, whole=False) < of_pairs
    assert crossing(b, stream, lanes, whole=False, apart=["k"]) >= 4 * of_pairs
    sizes = {"b": 8, "i": 1024, "j": 1024, "k": 3}
    tiles = default_config(b, sizes).tiles
    assert tiles[rows] * tiles[stream] * 4 <= 1 << 16
