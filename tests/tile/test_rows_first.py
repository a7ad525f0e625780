"""Rows before other dims in buffers, and loops of one tile that are none: the same kernel, by its interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.tile import ir
from tilefold.tile.interp import run_kernel
from tilefold.tile.rows_first import rows_first, without_single_loops
from tilefold.tile.text import parse
from tilefold.tile.verify import verify

KERNEL = """kernel fold()
  dim b = 2
  dim j = 96
  dim m = 100
  dim l = 16
  dim n = 32
  in q: f32[2, 96, 32] unit 2
  in k: f32[2, 100, 32] unit 2
  in v: f32[2, 100, 16] unit 2
  out y: f32[2, 16, 96] unit 2
  grid b:1 j:32
    alloc t: f32[j:32] tile
    fill t = 0.0
    for n:{tile}
      t[j] sum= over n: q[b, j, n] * q[b, j, n]
    alloc acc: f32[l:16, b:1, j:32] tile
    fill acc = 0.0
    for m:64
      alloc s: f32[m:64, j:32] tile
      s[m, j] = gemm over n: k[b, m, n] * q[b, j, n]
      alloc p: f32[m:64, j:32] tile
      p[m, j] = s[m, j] * t[j]
      acc[l, b, j] gemm= over m: v[b, m, l] * p[m, j]
    store y[b, l, j] over l, b, j = acc[l, b, j]
"""


def results(kernel: ir.Kernel) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 96, 32), "k": (2, 100, 32), "v": (2, 100, 16)}
    tensors = {n: torch.randn(s, generator=gen, dtype=torch.float64) for n, s in shapes.items()}
    tensors["y"] = torch.full((2, 16, 96), float("nan"), dtype=torch.float64)
    run_kernel(kernel, tensors, {}, exact=True)
    return tensors["y"]


def buffers(stmts) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for s in stmts:
        if isinstance(s, ir.Alloc):
            found[s.buffer.name] = s.buffer.dims
        elif isinstance(s, ir.For):
            found |= buffers(s.body)
    return found


def test_rows_come_after_single_indices_and_before_all_else():
    kernel = verify(parse(KERNEL.format(tile=32)))
    made = verify(rows_first(kernel))
    assert buffers(made.body) == {"t": ("j",), "acc": ("b", "j", "l"), "s": ("j", "m"), "p": ("j", "m")}
    products = [s for f in made.body if isinstance(f, ir.For) for s in f.body if isinstance(s, ir.Gemm)]
    assert [s.a.tensor for s in products] == ["q", "p"]
    assert next(s for s in made.body if isinstance(s, ir.Store)).dims == ("b", "j", "l")
    assert rows_first(made) == made
    torch.testing.assert_close(results(made), results(kernel))


@pytest.mark.parametrize("tile, loops", [(32, 1), (64, 1), (16, 2)])
def test_only_loops_of_one_tile_are_none(tile, loops):
    kernel = verify(parse(KERNEL.format(tile=tile)))
    made = verify(without_single_loops(kernel))
    assert sum(isinstance(s, ir.For) for s in made.body) == loops
    torch.testing.assert_close(results(made), results(kernel))
    whole = verify(parse(KERNEL.format(tile=tile).replace("m:64", "m:128")))
    assert sum(isinstance(s, ir.For) for s in without_single_loops(whole).body) == loops  # the last one stays


def test_several_tiled_dims_have_no_first():
    kernel = verify(parse(KERNEL.format(tile=32)))
    other = replace(kernel, grid=(ir.Tiled("b", 2), ir.Tiled("j", 32)))
    assert rows_first(other) == other and rows_first(kernel) != kernel
