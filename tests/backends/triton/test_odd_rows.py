"""Reductions of short rows that begin between two vectors: a warp for one or a few, without barriers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import distances
from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.launch import Variant

pytestmark = pytest.mark.usefixtures("own_cache")
B, F = torch.bfloat16, torch.float32


def norms(x):
    return x / x.float().norm(dim=-1, keepdim=True)


def launched(fn, *args) -> Variant:
    (k,) = made(fn, *args)
    return variant(k)


def rows(v: Variant) -> int:
    return v.kernel.grid[0].tile


@pytest.mark.parametrize(("fn", "tensors", "columns", "dtype", "each"), [
    (distances, 3, 257, B, 2),
    (distances, 3, 1023, B, 1),
    (norms, 1, 33, F, 32),
    (norms, 1, 257, F, 4),
])  # fmt: skip
def test_rows_have_a_warp(fn, tensors, columns, dtype, each):
    v = launched(fn, *(meta(1 << 17, columns, dtype=dtype) for _ in range(tensors)))
    assert v.config.warps == 1 and rows(v) == each
    found = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32))
    assert found.shared == 0 and "bar.sync" not in found.assembly["ptx"]


@pytest.mark.parametrize("shape", [
    (1 << 15, 512),  # vectors
    (1 << 8, 257),  # few rows
    (1 << 15, 1025),  # long ones
    (1 << 15, 31),  # each has a warp as it is
])  # fmt: skip
def test_other_rows_have_more(shape):
    assert launched(distances, *(meta(*shape, dtype=B) for _ in range(3))).config.warps > 1


def test_columns_of_odd_rows_are_read_along_them():
    first, *_ = made(lambda x: x.sum(0), meta(4099, 4097, dtype=F))
    assert variant(first).config.warps > 1
