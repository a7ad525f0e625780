"""Tiles of loops that read otherwise than they store."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.tiles import default_config

B = torch.bfloat16


def config(f, *xs) -> TritonConfig:
    (k,) = made(f, *xs)
    return default_config(k.block, k.sizes({}))


def largest(x):
    y = F.gelu(x)
    return y, y.max(1)


def of_means(n):
    def f(x):
        return largest((sum(x[:, k::n].float() for k in range(n)) / n).to(B))

    return f


def test_rows_of_means_of_neighbours_have_a_thread_for_each():
    far, near = config(of_means(16), meta(768, 6144, dtype=B)), config(largest, meta(768, 384, dtype=B))
    assert far.warps == 16 > near.warps
    assert far.tiles["i"] == 1  # and no second row
    assert config(of_means(2), meta(768, 768, dtype=B)).warps < 16  # a line has a thread's neighbours as well


def test_rows_that_nothing_else_lies_beside_have_few_threads():
    """Nothing is stored of each mean: a thread has one of a tile by itself."""
    assert config(lambda x: of_means(16)(x)[1], meta(768, 6144, dtype=B)).warps < 16
    assert config(largest, meta(768, 384, dtype=torch.float64)).warps < 16  # neighbours are eight bytes apart


def spread(n):
    def f(g):
        dx = g.float().repeat_interleave(n, 1) / n
        return dx.to(B), dx.sum(0)

    return f


def test_rows_of_elements_that_several_columns_read_are_few_a_turn():
    far, near = config(spread(16), meta(768, 384, dtype=B)), config(spread(1), meta(768, 6144, dtype=B))
    assert far.warps == near.warps and far.tiles["i"] == near.tiles["i"] == 32
    assert far.tiles["j"] * 32 == 16 * 32 * far.warps < near.tiles["j"] * 32  # sixteen steps of an element a thread
