"""Rows that threads have of their own are read in vectors."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant
from tests.backends.triton.test_warps import of
from tilefold.backends.triton import straight
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.own_vectors import own_vectors

F, B = torch.float32, torch.bfloat16
ROWS = 1 << 16


pytestmark = pytest.mark.usefixtures("own_cache")


def recurrence(x):
    """One step after the other, of a row's numbers."""
    v = torch.zeros_like(x[:, 0])
    for n in range(x.shape[1]):
        v = torch.sqrt(v * v * 0.5 + x[:, n] * x[:, n])
    return v


@pytest.mark.parametrize(("columns", "dtype", "how"), [(24, F, "v4.b32"), (32, B, "v4.b32"), (22, F, "v2.b32")])
def test_a_row_of_each_thread_is_read_in_vectors(columns, dtype, how):
    """As many bytes as a thread loads at once, or as rows are multiples of; nothing goes through shared memory."""
    (k,) = made(recurrence, meta(ROWS, columns, dtype=dtype))
    v = variant(k)
    (tile,) = (n for d, n in v.config.tiles.items() if k.sizes({})[d] == ROWS)
    assert tile == 32 * v.config.warps
    made_of = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32))
    read = Counter(re.findall(r"ld\.global\.(\S*)", made_of.assembly["ptx"]))
    width = {"v4.b32": 16, "v2.b32": 8}[how] // dtype.itemsize
    assert read == {how: columns // width} and made_of.shared == 0


def test_columns_of_a_row_are_stored_in_vectors():
    """Gradients of a recurrence's columns, each put between zeros: one store for four, by the thread that has them."""

    def put_together(x):
        n, v, out = x.shape[1], x[:, 0] * 0.5, 0
        for t in range(n):
            v = torch.tanh(v + x[:, t])
            out = out + torch.nn.functional.pad(v[:, None], (t, n - 1 - t))
        return out + v[:, None] * x

    v = variant(made(put_together, meta(ROWS, 24, dtype=F))[-1])
    made_of = resources(v.kernel, v.rendered, v.config, Target("cuda", 90, 32))
    moved = Counter(re.findall(r"(ld|st)\.global\.(\S*)", made_of.assembly["ptx"]))
    assert moved == {("ld", "v4.b32"): 6, ("st", "v4.b32"): 6} and made_of.shared == 0


def test_look_ups_are_those_of_vectors():
    """A warp's 32 rows of 96 bytes are in 24 lines, which each of six vectors looks up, not each of 24 places."""
    f = of(recurrence, meta(ROWS, 24, dtype=F))
    read = [t for t in f.touches if not t.stored]
    assert len(read) == 6 and {t.lines for t in read} == {4 * 24.0}


def vectors_of(fn, columns: int, tile: int = 128):
    """First place and width of the vectors that a kernel of one element a thread (or of such a tile) reads."""
    (k,) = made(fn, meta(ROWS, columns, dtype=F))
    (d,) = (d for d, n in k.sizes({}).items() if n == ROWS)
    config = TritonConfig({d: tile}, warps=4, stages=1)
    one = TritonKernel(k.block, lambda block, sizes: config, exactly=True)
    return {(x.first, x.width) for x in own_vectors(variant(one).kernel, config).values()}


def test_what_is_a_vector():
    def some(*places):
        return lambda x: sum(torch.exp(x[:, n]) for n in places)

    assert vectors_of(some(0, 1, 2), 8) == {(0, 4)}  # more than half of it
    assert vectors_of(some(1, 2), 8) == set()  # of two vectors, one each
    assert vectors_of(some(4, 5, 3), 8) == {(4, 2)}
    assert vectors_of(some(0, 1, 2), 7) == set()  # the next row's begin anywhere
    assert vectors_of(some(0, 1, 2, 3), 8, tile=256) == set()  # two rows a thread


def test_lines_with_vectors_are_laid_out(monkeypatch):
    """Without the pass a vector would be spread over lanes."""
    v = variant(made(recurrence, meta(ROWS, 24, dtype=F))[0])
    monkeypatch.setattr(straight, "LONG", 0.0)
    assert straight.laid_out(v.rendered.source, v.rendered.name)


def test_few_places_keep_their_tiles():
    """Two of a row: what they take to look up is less than their bytes, and several rows a thread are more at once."""
    (k,) = made(lambda x: x[:, 0] * x[:, 1], meta(ROWS, 4, dtype=F))
    c = variant(k).config
    assert math.prod(c.tiles.values()) > 32 * c.warps
