"""The last elements of a row, which fill no vector: read and written alone, of every element type."""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p, memmove
from mmap import ACCESS_COPY, PAGESIZE, mmap

import pytest
import torch

from tests.backends.cpp.harness import compiled

TYPES = {
    "f64": torch.float64, "i64": torch.int64, "f32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16,
    "f16": torch.float16, "i16": torch.int16, "u8": torch.uint8, "i8": torch.int8, "bool": torch.bool,
}  # fmt: skip
COPY = """
kernel copies(N)
  dim i = N
  in x: {0}[N] unit 0
  out y: {0}[N] unit 0
  grid i:128
    store y[i] over i = x[i]
"""
ROUND = 64  # elements on each side that a kernel must leave alone


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_beside_a_part_is_written(dtype):
    copy = compiled(COPY.format(dtype))
    for n in range(1, 131):
        x = torch.randint(0, 2, (n,)).to(TYPES[dtype])
        y = torch.full((n + 2 * ROUND,), 7).to(TYPES[dtype])
        want = y.clone()
        want[ROUND : ROUND + n] = x
        copy({"x": x, "y": y[ROUND : ROUND + n]}, {"N": n})
        assert torch.equal(y, want), n


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_behind_a_part_is_read(dtype):
    """The last element is the last of a page, behind which reading ends the process."""
    libc, size = CDLL(None), TYPES[dtype].itemsize
    pages = mmap(-1, 2 * PAGESIZE, access=ACCESS_COPY)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    behind = memory.data_ptr() + PAGESIZE
    memory.zero_()
    assert libc.mprotect(c_void_p(behind), c_int64(PAGESIZE), 0) == 0
    try:
        for n in (1, 3, 15, 17, 31, 63, 65):
            x = torch.randint(0, 2, (n,)).to(TYPES[dtype])
            memmove(behind - n * size, x.data_ptr(), n * size)
            y = torch.empty_like(x)
            last = memory[PAGESIZE - n * size : PAGESIZE].view(TYPES[dtype])
            compiled(COPY.format(dtype))({"x": last, "y": y}, {"N": n})
            assert torch.equal(y, x), n
    finally:
        assert libc.mprotect(c_void_p(behind), c_int64(PAGESIZE), 3) == 0


SHIFTED = """
kernel shifted(N)
  dim i = N
  in x: {0}[N] unit 0
  out y: {0}[N] unit 0
  out z: {0}[N] unit 0
  grid i:256
    store y[i] over i = where(i < 32, x[i + 32], x[i - 32])
    store z[i] over i = x[i + 20]
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8", "i64"])
def test_places_beside_a_row_are_its_ends(dtype):
    """Whole vectors inside, whole vectors outside, and vectors that are both."""
    for n in (1, 5, 20, 21, 32, 33, 64, 100, 129):
        x = torch.arange(n).remainder(100).to(TYPES[dtype])
        y, z = torch.empty_like(x), torch.empty_like(x)
        compiled(SHIFTED.format(dtype))({"x": x, "y": y, "z": z}, {"N": n})
        at = torch.arange(n)
        assert torch.equal(y, x[torch.where(at < 32, at + 32, at - 32).clamp(0, n - 1)]), n
        assert torch.equal(z, x[(at + 20).clamp(max=n - 1)]), n


HALVES = """
kernel halves(N)
  dim i = N
  dim l = {1}
  in x: {0}[N, {1}] unit 1
  in c: {0}[N, {2}] unit 1
  out y: {0}[N, {1}] unit 1
  grid i:8 l:{3}
    store y[i, l] over i, l = where(l < {2}, x[i, l + {2}] - c[i, l], x[i, l - {2}] + c[i, l - {2}])
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32"])
@pytest.mark.parametrize(("whole", "tile"), [(2, 2), (16, 16), (24, 24), (80, 80), (80, 32), (128, 64)])
def test_halves_are_strips_of_their_own(dtype, whole, tile):
    """Rotated halves: each is read and written without looking where it ends, whatever the tile."""
    half, n = whole // 2, 13
    kernel = compiled(HALVES.format(dtype, whole, half, tile))
    x, c = (torch.randint(-50, 50, (n, k)).to(TYPES[dtype]) for k in (whole, half))
    y = torch.empty_like(x)
    kernel({"x": x, "c": c, "y": y}, {"N": n})
    assert torch.equal(y, torch.cat((x[:, half:] - c, x[:, :half] + c), 1))
