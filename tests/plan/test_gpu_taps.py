"""Windows that are written out, beside sums of channels."""

from __future__ import annotations

from functools import partial

import pytest

from tilefold.algebra.expr import loads
from tilefold.block.ir import Accumulate, Let, exprs_of, walk
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_taps import parts_pay, windows_under_sums
from tilefold.plan.hardware import H200
from tilefold.tensor.analysis import Graph
from tilefold.tensor.sliding import sliding_by_parts
from tilefold.tensor.text import parse

TEXT = """program pooled()
  input x: bf16[{n}, {h}, {h}, 64]
  dim b = {n}
  dim i = {m}
  dim j = {m}
  dim c = 64
  y[b, i, j, c]: bf16 = {body}
  s[{kept}]: f32 = sum[{summed}] f32(y[b, i, j, c]) * f32(y[b, i, j, c])
  return y, s
"""
WINDOW = "x[b, i, j, c] + x[b, i + 1, j, c] + x[b, i, j + 1, c] + x[b, i + 1, j + 1, c]"


@pytest.mark.parametrize(
    "size, body, summed, apart",
    [
        (112, WINDOW, "b, i, j", True),
        (112, "x[b, i, j, c] + x[b, i + 1, j, c]", "b, i, j", False),  # no window
        (112, WINDOW, "c", False),  # rows, not channels
        (112, WINDOW, "b, i", True),  # channels of two dims
        (112, WINDOW, "b, i, j, c", True),  # a loss
        (112, WINDOW, "i, j", False),  # of each image
        (4, WINDOW, "b, i, j", False),  # so few that a kernel more costs more
    ],
)
def test_windows_are_written_by_a_kernel_of_their_own_where_channels_are_summed(size, body, summed, apart):
    kept = ", ".join(d for d in "bijc" if d not in summed.split(", "))
    p = parse(TEXT.format(n=32, h=size + 1, m=size, body=body, summed=summed, kept=kept))
    assert (windows_under_sums(Graph.of(p), H200) == {"y"}) is apart


CONTRACTED = """program pooled()
  input x: bf16[{n}, 57, 57, 128]
  input w: bf16[256, 128]
  dim b = {n}
  dim i = 56
  dim j = 56
  dim c = 128
  dim o = 256
  y[b, i, j, c]: bf16 = {body}
  z[b, i, j, o]: bf16 = sum[c] y[b, i, j, c] * w[o, c]
  return z
"""


@pytest.mark.parametrize("n, body, calls, apart", [(16, WINDOW, (), True), (16, WINDOW, ("z",), False)])
def test_nor_are_windows_in_front_of_a_product_of_matrices(n, body, calls, apart):
    g = Graph.of(parse(CONTRACTED.format(n=n, body=body)))
    assert (windows_under_sums(g, H200, calls) == {"y"}) is apart


def test_a_window_of_its_own_is_not_computed_again_where_it_is_summed():
    """Computed again in the sums' kernel it would be what it was kept apart for."""
    text = """program trend()
  input x: f32[2048, 1024]
  dim b = 2048
  dim i = 1000
  t[b, i]: f32 = {taps}
  r[b, i]: f32 = x[b, i + 12] - t[b, i]
  s[]: f32 = sum[b, i] t[b, i] * t[b, i]
  q[]: f32 = sum[b, i] r[b, i] * r[b, i]
  return s, q, r
"""
    p = parse(text.format(taps=" + ".join(f"x[b, i + {n}]" for n in range(25))))
    for k in fuse_for_gpu(p).kernels:
        sums = [n for n in walk(k.block.body) if isinstance(n, Accumulate | Let) and n.rdims]
        reads = {ld for n in walk(k.block.body) for e in exprs_of(n) for ld in loads(e) if ld.tensor == "x"}
        assert not sums or len(reads) <= 1


@pytest.mark.parametrize("count, made, apart", [(101, 1 << 24, True), (101, 1 << 12, False), (5, 1 << 24, False)])
def test_windows_that_slide_are_in_parts_where_reading_them_takes_longer_than_a_pass(count, made, apart):
    p = parse(f"""program line()
  input x: f32[{made + count - 1}]
  dim j = {made}
  dim k = {count}
  s[j]: f32 = sum[k] x[j + k]
  return s
""")
    q = sliding_by_parts(p, partial(parts_pay, machine=H200))
    assert (len(q.body) == 2) is apart
