"""Reductions over what belongs to pairs of rows: nothing crosses threads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import neighbours
from tests.backends.triton.kernels import made, meta, variant
from tilefold.algebra.expr import Index, Load, call
from tilefold.backends.triton.pairwise import of_pairs
from tilefold.backends.triton.prepare import lanes_of
from tilefold.tile import ir
from tilefold.tile.text import parse
from tilefold.tile.verify import verify

F = torch.float32


def distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1).sqrt()


def mixture(x, centres, scale):
    """Of each row, probabilities of clusters, whose axis a thread block has whole."""
    return (-((x[:, None] - centres) ** 2 * scale).sum(-1)).softmax(-1)


def nearness(x, y):
    """Of each row, a softmax of its distances from rows of others, which is written."""
    return (-((x[:, None] - y[None]) ** 2).sum(-1)).softmax(-1)


@pytest.mark.parametrize(
    ("fn", "shapes", "tiles"),
    [
        (distances, ((2048, 64), (2048, 64)), {2048: {16, 64}, 64: {16}}),
        (distances, ((4096, 20), (512, 20)), {4096: {16}, 512: {64}, 20: {4}}),
        (nearness, ((4096, 12), (512, 12)), {4096: {2}, 512: {512}, 12: {4}}),
        (mixture, ((65536, 16), (32, 16), (32, 16)), {65536: {32}, 16: {16}}),
    ],
)
def test_each_thread_has_its_pairs_and_all_that_is_reduced_of_them(fn, shapes, tiles):
    (k,) = made(fn, *(meta(*s, dtype=F) for s in shapes))
    v, sizes = variant(k), k.sizes({})
    found: dict[int, set[int]] = {}
    for d, n in v.config.tiles.items():
        found.setdefault(sizes[d], set()).add(n)
    assert {n: t for n, t in found.items() if n in tiles} == tiles
    source = v.rendered.source
    assert "[:, :, None]" in source and "[:, None, :]" in source  # what is reduced comes first
    assert "_lane" not in source


def test_two_numbers_meet_in_one_exchange():
    """Sides of boxes: in each thread they took 115 registers instead of 48, and 41 us on an H100 instead of 34."""
    (k,) = made(
        lambda x, y: torch.minimum(x[:, None], y[None]).prod(-1), meta(4096, 2, dtype=F), meta(4096, 2, dtype=F)
    )
    source = variant(k).rendered.source
    assert "[None, :, :], propagate" in source or ("[:, None, :]" in source and "[:, :, None]" not in source)


def test_few_pairs_have_more_blocks():
    (k,) = made(distances, meta(256, 64, dtype=F), meta(256, 64, dtype=F))
    tiles = sorted(n for d, n in variant(k).config.tiles.items() if k.sizes({})[d] == 256)
    assert tiles == [4, 64]


def test_few_pairs_of_a_long_sum_have_blocks_for_all_multiprocessors():
    """With a thread for each pair six blocks take 600 turns (the gradient of a window's relative biases, 169 rows of 6
    of 2,401 places: 487 us by forecast for an H100)."""
    (k,) = made(lambda x, y: (x[:, None] - y[None]).abs().sum(-1), meta(169, 2401, dtype=F), meta(6, 2401, dtype=F))
    tiles, sizes = variant(k).config.tiles, k.sizes({})
    blocks = [-(-n // tiles[d]) for d, n in sizes.items() if n in (169, 6)]
    (turns,) = [-(-n // tiles[d]) for d, n in sizes.items() if n == 2401]
    assert blocks[0] * blocks[1] >= 132 and turns <= 4


def test_what_has_all_dims_or_the_dims_of_another_is_no_pair():
    i, j, k = map(Index, "ijk")
    x, y, z, w = Load("x", (i, k)), Load("y", (j, k)), Load("z", (i, j, k)), Load("w", (k,))
    assert set(of_pairs(call("sub", x, y), "k", "ij")) == {frozenset("i"), frozenset("j")}
    assert of_pairs(call("mul", call("sub", x, y), w), "k", "ij")
    assert not of_pairs(call("sub", x, z), "k", "ij")
    assert not of_pairs(call("mul", x, w), "k", "i")
    assert not of_pairs(call("mul", x, x), "k", "ij")


@pytest.mark.parametrize(("pair", "pieces"), [(lambda d: torch.sigmoid(d * 10.0), True), (torch.abs, False)])
def test_rows_of_long_arithmetic_have_no_idle_lanes(pair, pieces):
    """Sums of sigmoids of 160 x 160 differences, in 256 lanes: 30 us on an H100 for what takes 11 in 160."""

    def ranks(x, g):
        return (g / torch.log2(1.5 + pair(x.unsqueeze(-2) - x.unsqueeze(-1)).sum(-1))).sum(-1)

    (k,) = made(ranks, meta(512, 160, dtype=torch.float32), meta(512, 160, dtype=torch.float32))
    source = variant(k).rendered.source
    assert ("arange(0, 128)" in source and "arange(0, 256)" not in source) is pieces


def test_a_product_beside_what_is_computed_of_its_terms_fills_no_matrix_unit():
    """Of two columns in 16 lanes, seven of eight lanes of all differences were idle, and 1,292 bytes a thread spilled:
    1,971 us on an H100 for what Inductor, through memory, takes 102."""
    (k,) = made(neighbours, meta(2048, 2, dtype=F), meta(2048, 2, dtype=F))
    v = variant(k)
    assert not v.config.lanes and "tl.dot" not in v.rendered.source
    assert "permute" not in v.rendered.source  # a coordinate is a value of its own: none changes its place


def test_a_product_alone_fills_a_matrix_unit():
    (k,) = made(lambda x, w: (x - 1.0) @ w, meta(2048, 512, dtype=F), meta(512, 2, dtype=F))
    assert "tl.dot" in variant(k).rendered.source


STATES = """
kernel pairs()
  dim i = 1024
  dim j = 200
  dim k = 200
  in x: f32[1024, 200]
  in y: f32[1024, 200]
  out o: f32[1024, 200]
  grid i:1
    alloc a: f32[i:1, j:200] tile
    alloc b: f32[i:1, j:200] tile
    fill a = 0.0
    fill b = 0.0
    for k:32
      a[i, j] sum= over k: abs(x[i, k] - y[i, j])
      b[i, j] sum= over k: sigmoid(x[i, k] - y[i, j])
    store o[i, j] over i, j = a[i, j] * b[i, j]
"""


@pytest.mark.parametrize(("warps", "lanes"), [(4, 8), (8, 16), (32, 32)])
def test_states_of_lanes_have_registers(warps, lanes):
    """What a block holds beside the stream counts as rows: of 32 lanes four warps had 64 elements a thread of each of
    two sums, and those of a quantile loss's gradients spilled 38 KB."""
    kernel = verify(parse(STATES))
    (loop,) = (s for s in kernel.body if isinstance(s, ir.For))
    assert lanes_of(kernel, loop, warps, {}) == lanes
