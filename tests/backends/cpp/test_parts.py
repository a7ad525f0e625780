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
