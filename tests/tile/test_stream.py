"""Reductions in tiles: the same results in float64, and beside them only what is computed for them alone."""

from __future__ import annotations

import pytest
import torch

from tilefold.tile import ir
from tilefold.tile.interp import run_kernel
from tilefold.tile.stream import stream
from tilefold.tile.text import parse
from tilefold.tile.verify import verify

SUMS = """
kernel sums(R, K, C)
  dim i = R
  dim k = K
  dim j = C
  in at: i64[K]
  in v: f64[K, C]
  out y: f64[R, C]
  out z: f64[R]
  grid i:2
    alloc here: bool[i:2, k:K] tile
    alloc s: f64[i:2, j:C] tile
    alloc n: f64[i:2] tile
    here = at[k] == i
    s = sum over k: where(here[i, k], v[k, j], 0.0)
    fill n = 2.0
    {then}
    store y[i, j] over i, j = s[i, j]
    store z[i] over i = n[i]
"""


def sums(then: str = "fill n = 3.0") -> ir.Kernel:
    return verify(parse(SUMS.format(then=then)))


def run(k: ir.Kernel, at: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, z = v.new_empty(5, v.shape[1]), v.new_empty(5)
    run_kernel(k, {"at": at, "v": v, "y": y, "z": z}, {"R": 5, "K": v.shape[0], "C": v.shape[1]})
    return y, z


@pytest.mark.parametrize("n", [1, 4, 7, 16])
def test_what_is_computed_for_a_sum_alone_is_computed_tile_by_tile(n):
    k = verify(stream(sums(), {"k": 4}))
    (loop,) = (s for s in k.body if isinstance(s, ir.For))
    assert [type(s) for s in loop.body] == [ir.Alloc, ir.Map, ir.Reduce]
    assert "here" not in {s.buffer.name for s in k.body if isinstance(s, ir.Alloc)}
    at, v = torch.randint(0, 5, (n,)), torch.randn(n, 9, dtype=torch.float64)
    want = torch.zeros(5, 9, dtype=torch.float64).index_add(0, at, v)
    y, z = run(k, at, v)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    assert (z == 3).all()


def test_what_others_read_or_change_is_held_and_its_sum_whole():
    for then in ("n = sum over k: where(here[i, k], 1.0, 0.0)", "here = at[k] < 3"):
        assert stream(sums(then), {"k": 4}) == sums(then), then
    assert stream(sums(), {"j": 4}) == sums()
