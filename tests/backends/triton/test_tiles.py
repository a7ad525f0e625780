"""Default configurations: how many threads rows get, and how small kernels spread over a device."""

from __future__ import annotations

import math
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import multiplied_bytes, top_of_products
from tests.backends.triton.kernels import heads, made, meta, variant
from tilefold.backends.triton.compile import Target, resources
from tilefold.backends.triton.config import TritonConfig, lighter
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.tiles import FULL, LEAST_LAST, Shape, default_config
from tilefold.block.canonical import canonical
from tilefold.block.text import parse as parse_block
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.suites.gpu import operators as o
from tilefold.tensor.text import parse


def config(k: TritonKernel) -> TritonConfig:
    return default_config(k.block, k.sizes({}))


def blocks(k: TritonKernel) -> int:
    tiles, sizes, shape = config(k).tiles, k.sizes({}), Shape.of(k.block)
    return math.prod(-(-sizes[d] // tiles.get(d, 1)) for d in (*shape.parallel, *shape.segments))


@pytest.mark.parametrize(("columns", "warps"), [(768, 1), (4096, 1), (8192, 4), (32768, 8)])
def test_many_narrow_rows_get_few_threads_each(columns, warps):
    (many,) = made(o.softmax, meta(8192, columns, dtype=torch.bfloat16))
    (few,) = made(o.softmax, meta(64, columns, dtype=torch.bfloat16))
    assert config(many).warps == warps < config(few).warps or columns == 768
    (wide,) = made(o.softmax, meta(8192, columns, dtype=torch.float32))
    assert config(wide).warps >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_few_elements_are_fewer(dtype):
    """Seven loads a row: with sixteen rows a thread, 112 of them one after the other, few threads wait at a time."""
    (k,) = made(lambda x: x.amax(-1), meta(1 << 20, 7, dtype=dtype))
    assert blocks(k) == 2048 and config(k).warps == 4
    (single,) = made(lambda x: x.amax(-1), meta(1 << 20, 1, dtype=dtype))
    assert blocks(single) <= 1024


def test_combining_a_few_states_spreads_over_the_device():
    part, combine = made(o.causal, *heads(1, 32, 1, 8192, 128))
    assert blocks(part) >= FULL and config(part).warps == 2  # one query: its products have no rows
    assert blocks(combine) >= FULL
    few = made(o.variance_by_hand, meta(2, 131072, dtype=torch.float32))[-1]
    assert config(few).tiles[Shape.of(few.block).parallel[-1]] <= LEAST_LAST


@pytest.mark.parametrize(
    ("columns", "dtype", "tile"),
    [
        (131072, torch.bfloat16, 65536),
        (131072, torch.float32, 32768),
        (131072 + 32768, torch.bfloat16, 32768),  # a ragged end would be held as float32
        (65536, torch.bfloat16, 32768),
    ],
)
def test_long_rows_of_narrow_elements_have_longer_tiles(columns, dtype, tile):
    (k,) = made(o.softmax, meta(2048, columns, dtype=dtype))
    (streamed,) = Shape.of(k.block).streamed
    assert config(k).tiles[streamed] == tile


def test_lighter_configurations_end():
    c: TritonConfig | None = TritonConfig({"i": 1, "j": 128, "k": 64}, stages=3, descriptors=True)
    seen = []
    while (c := lighter(c)) is not None:
        seen.append((c.stages, tuple(c.tiles.values())))
        assert c.descriptors
    assert seen[:4] == [(2, (1, 128, 64)), (1, (1, 128, 64)), (1, (1, 64, 64)), (1, (1, 32, 64))]
    assert seen[-1] == (1, (1, 16, 16)) and len(seen) == len(set(seen))
    assert lighter(TritonConfig({}, stages=1)) is None


@pytest.mark.parametrize("shape", [(4, 512), (33, 7), (300, 3)])
def test_rows_along_two_parallel_dims_are_tiled_along_the_longer_one(shape):
    products = [
        k
        for k in made(top_of_products, meta(*shape, 1024), meta(1024, 64))
        if any(m and n for m, n, _ in Shape.of(k.block).products)
    ]
    assert products
    for k in products:
        sizes, c = k.sizes({}), config(k)
        rows = [d for d in Shape.of(k.block).parallel if c.tiles[d] >= 16 or d in c.lanes]
        assert [sizes[d] for d in rows if sizes[d] != 64] == [max(shape)]  # 64: the columns, where they are parallel


def test_few_experts_fill_a_matrix_unit():
    for experts in (2, 6, 8):
        k = made(top_of_products, meta(256, 64), meta(64, experts))[-1]
        assert 16 in config(k).lanes.values()
    wide = made(top_of_products, meta(256, 64), meta(64, 32))[-1]
    assert not config(wide).lanes


def test_a_contraction_in_chunks_is_no_state():
    """A long contraction is read in tiles: it neither makes a state wide nor takes the stages of the loads. A state of
    512 columns does."""
    b = torch.bfloat16
    (routing,) = made(lambda x, w: (x @ w).float().softmax(-1), meta(8192, 2048, dtype=b), meta(2048, 64, dtype=b))
    latent = made(o.mla(512), meta(32, 128, 576, dtype=b), meta(32, 4096, 576, dtype=b))[0]
    assert (config(routing).groups, config(routing).stages) == (0, 4) and config(latent).groups == 2


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "tile", "step"),
    [(1024, 1024, 8, 32, 256), (8192, 2048, 64, 64, 128), (300, 4096, 16, 32, 256)],
)
def test_few_columns_are_summed_in_long_steps(rows, depth, columns, tile, step):
    b = torch.bfloat16
    (k,) = made(lambda x, w: (x @ w).float().softmax(-1), meta(rows, depth, dtype=b), meta(depth, columns, dtype=b))
    found, sizes = config(k), k.sizes({})
    assert {sizes[d]: n for d, n in found.tiles.items()} == {rows: tile, depth: step} and found.stages == 4
    v = variant(k)
    assert resources(v.kernel, v.rendered, v.config, Target("cuda", 90)).shared <= 227 << 10


@pytest.mark.parametrize(("products", "most", "warps"), [(1, 1 << 14, 4), (2, 1 << 13, 8)])
def test_sums_of_several_products_fit_the_registers(products, most, warps):
    """Scores of every query and key, and the same beside their gradient: two sums of 128 x 128 would spill."""

    def scores(q, k, g, v):
        s = (q @ k.mT).float()
        return s.exp() if products == 1 else s.exp() * (g @ v.mT).float()

    (k,) = made(scores, *(meta(8, 1024, 64, dtype=torch.bfloat16) for _ in range(4)))
    found = config(k)
    assert math.prod(found.tiles.values()) == most and found.warps == warps


PUT_TOGETHER = """program together()
  input x: bf16[4096, 512]
  input y: bf16[4096, 512]
  input z: bf16[4096, 512]
  dim i = 4096
  dim j = 3
  dim k = 512
  s[j, k]: f32 = sum[i] where(j < 1, x[i, k], where(j < 2, y[i, k], z[i, k]))
  return s
"""


def test_what_a_thread_block_does_not_choose_is_not_read():
    """Column sums of parts put together along a dim of which a thread block has one index: one part is read, not all.
    A condition on data is no reason to wait for it."""
    sums = TritonKernel(canonical(fuse_for_gpu(parse(PUT_TOGETHER)).kernels[0].block).block)
    source = variant(sums).rendered.source
    read = [line for line in source.splitlines() if "tl.load(" in line]
    assert read and all(re.search(r"mask=.*(pid|b)_\w+ < [12]\)", line) for line in read)
    (data,) = made(lambda x, n: torch.where(n > 0, x, x + 1), meta(4096, 512, dtype=torch.bfloat16), meta(1))
    assert "mask=" not in variant(data).rendered.source


def test_products_of_float32_have_small_tiles_unless_they_may_be_rounded():
    (k,) = made(o.attention, *(x.float() for x in heads(2, 32, 1024, 1024, 128)))
    small, large = (default_config(k.block, k.sizes({}), tf32=tf32) for tf32 in (False, True))
    assert max(small.tiles.values()) <= 32 < max(large.tiles.values()) and small.warps == 8
    half = made(o.attention, *heads(2, 32, 1024, 1024, 128))[0]
    assert config(half).key() == default_config(half.block, half.sizes({}), tf32=True).key()


@pytest.mark.parametrize("places,most", [(2, 32), (10, 4)])
def test_rows_with_several_places_of_a_small_product_are_fewer(places, most):
    """A linear layer of six features, and the largest of a sequence: registers hold all places of a row, and a thread
    has few rows, which it loads one by one."""

    def longest(x, w):
        y = x @ w
        return y.amax(1), y.sum(2).softmax(1), y

    (k,) = made(longest, meta(1 << 16, places, 6, dtype=torch.float32), meta(6, 6, dtype=torch.float32))
    sizes = k.sizes({})
    (row,) = (d for d, n in sizes.items() if n == 1 << 16)
    c = default_config(k.block, sizes)
    assert c.tiles[row] == most and not c.lanes  # no matrix unit's rows


def test_a_product_of_three_coordinates_in_float32_asks_for_no_tiles_of_matrices():
    """It is summed as it is: rows of 16 neighbours and 64 channels in eight warps, with lanes of a matrix unit, took
    262 us on an H100 where a kernel of few threads and no idle lane is forecast 26."""

    def positions(p, w, e):
        return (torch.einsum("nlm,jm->nlj", p, w) * e[..., None]).sum(1)

    f = torch.float32
    (k,) = made(positions, meta(20000, 16, 3, dtype=f), meta(64, 3, dtype=f), meta(20000, 16, dtype=f))
    assert not any(m and n for m, n, _ in Shape.of(k.block).products) and config(k).warps < 8


def test_a_streamed_dim_is_never_a_single_element():
    x, w = torch.randn(1, 64), torch.randn(64, 40)
    torch._dynamo.reset()
    fused = fuse_for_gpu(trace(top_of_products, x, w, dynamic=True).program)
    torch._dynamo.reset()
    for k in (TritonKernel(canonical(f.block).block) for f in fused.kernels):
        for one in (1, 2):
            sizes = dict.fromkeys(k.block.sizes, one)
            c = default_config(k.block, sizes)
            assert all(c.tiles[d] >= 2 for d in Shape.of(k.block).streamed)


@pytest.mark.parametrize(
    ("queries", "kv", "tile", "lanes"), [(40, 8, 5, 16), (32, 8, 4, 16), (24, 8, 3, 16), (8, 8, 1, 0)]
)
def test_heads_that_share_keys_are_rows_of_one_tile(queries, kv, tile, lanes):
    def attend(q, k, v):
        k, v = (x.repeat_interleave(queries // kv, 1) for x in (k, v))
        return torch.softmax((q @ k.mT).float(), -1).to(q.dtype) @ v

    part = made(attend, *heads(2, queries, 1, 4096, 128, kv=kv))[0]
    c = config(part)
    (d,) = [d for d, n in part.sizes({}).items() if n == queries]
    assert c.tiles[d] == tile and c.lanes.get(d, 0) == lanes


@pytest.mark.parametrize(("inputs", "elements"), [(1, 32768), (2, 16384), (4, 8192)])
def test_a_step_of_a_loop_has_registers_for_all_that_it_reads(inputs, elements):
    xs = [meta(4096, 4096, dtype=torch.float32) for _ in range(inputs)]
    k = made(lambda *xs: sum(xs).square().mean(), *xs)[0]
    sizes = k.sizes({})
    tiles = config(k).tiles
    s = Shape.of(k.block)
    whole = {d: n for d, n in s.seen(sizes).items() if d not in s.parallel and d not in s.streamed}
    assert s.area({**whole, **tiles}) <= elements


def both_ways(x, y):
    d = (x[:, None] - y[:, :, None]).abs()
    pairs = torch.where(d <= 1, d.square(), d)
    return pairs.sum(1), pairs.sum(2)


def test_loops_side_by_side_have_each_others_dims_whole():
    """Of pairs that are summed along rows and along columns a step has some of one, and all of the other."""
    for k in made(both_ways, *(meta(512, 200, dtype=torch.float32) for _ in range(2))):
        tiles, s = config(k).tiles, Shape.of(k.block)
        if len(s.streamed) == 2:
            assert all(256 * tiles[d] <= 8192 for d in s.streamed)


@pytest.mark.parametrize(("columns", "pieces"), [(72, 0), (80, 4), (96, 4), (88, 0)])
def test_no_last_piece_is_too_short_for_a_matrix_unit(columns, pieces):
    """72 = 64 + 8 would be multiplied element by element: all of it is padded. 80 = 64 + 16 is not."""
    (k,) = made(o.attention, *heads(8, 16, 256, 256, columns))
    assert len(variant(k).kernel.cut) == pieces


@pytest.mark.parametrize("kept", [torch.int8, torch.uint8])
def test_bytes_are_multiplied_by_the_matrix_unit(kept):
    """What a program multiplies in float32, 16 bits hold exactly: no elements that are summed one by one."""
    shapes = (meta(2048, 1024, dtype=kept), meta(1024, 1024, dtype=kept), meta(1024, dtype=torch.float32))
    (k,) = made(multiplied_bytes, *shapes)
    source = variant(k).rendered.source
    assert re.search(r"tl\.dot\(.*tl\.float16", source) and "tl.sum" not in source
    assert min(config(k).tiles.values()) >= 64


def test_a_step_of_a_product_over_several_dims_is_not_deep():
    """Sixteen heads of 64 columns a step are 1,024: 16 rows of that in four warps spilled 14 KB a thread."""
    args = meta(16, 8, 38416, dtype=torch.bfloat16), meta(16, 38416, 8, dtype=torch.bfloat16)
    kernels = made(lambda x, w: torch.einsum("mil,mlk->ik", x, w), *args)
    k = kernels[0]
    (product,) = Shape.of(k.block).products
    c, sizes = config(k), k.sizes({})
    depth = math.prod(min(c.tiles.get(d, sizes[d]), sizes[d]) for d in product[2])
    assert 64 <= depth <= 256, c


@pytest.mark.parametrize(("gate", "warps"), [(torch.nn.functional.silu, 4), (torch.exp, 1)])
def test_rows_of_functions_have_threads_that_keep_what_they_make(gate, warps):
    def gated(x, z):
        x = x.float() * gate(z.float())
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)

    (k,) = made(gated, meta(8192, 4096, dtype=torch.bfloat16), meta(8192, 4096, dtype=torch.bfloat16))
    assert config(k).warps == warps


def laterals(x, w, coarse):
    """A feature pyramid's step: a product of channels at each place, and a coarser image at twice its places."""
    fine = torch.nn.functional.interpolate(coarse, scale_factor=2, mode="nearest")
    return x.mT @ w + fine


def test_rows_beside_what_is_read_at_half_their_index_are_rows():
    """They share no operand of the product, as heads share keys: tiles had eight images of one place, 46 us for 14."""
    (k,) = made(laterals, meta(8, 100, 64, 100), meta(64, 64), meta(8, 100, 50, 32))
    sizes, c = k.sizes({}), config(k)
    assert not Shape.of(k.block).shared
    assert max(n for d, n in c.tiles.items() if sizes[d] == 100) >= 64


def in_windows(q, k, v, up, across):
    """Attention in windows, with a bias for each line of keys and one for each column."""
    b, x, y, d = q.shape
    s = (q.reshape(b, x * y, d) @ k.reshape(b, x * y, d).mT).reshape(b, x, y, x, y).float()
    s = s + up[:, :, :, :, None] + across[:, :, :, None, :]
    return torch.softmax(s.reshape(b, x * y, x * y), -1).to(v.dtype) @ v.reshape(b, x * y, d)


@pytest.mark.parametrize(("windows", "lines"), [(600, 4), (40, 1)])
def test_lines_of_a_window_fill_a_tile_of_rows(windows, lines):
    """Keys and values were read for each 14 rows; of few windows a block for each line is not too many."""
    (k,) = made(in_windows, *[meta(windows, 14, 14, 64)] * 3, *[meta(windows, 14, 14, 14)] * 2)
    tiles = [config(k).tiles[d] for d in Shape.of(k.block).parallel]
    assert tiles == [1, lines, 16]


def test_a_few_tensors_of_odd_widths_have_a_power_of_two_of_warps():
    """Masses and three coordinates of 512 bodies in a step are 2,048 elements and more: ten warps are none."""
    kernels = made(o.inertia, meta(1, 32768, dtype=torch.float32), meta(1, 32768, 3, dtype=torch.float32))
    assert all(c.warps & (c.warps - 1) == 0 for c in map(config, kernels)), [config(k) for k in kernels]


def test_a_dim_of_a_result_that_nothing_runs_over_has_no_lanes():
    """Of a gate in pairs that is stored flat, l * 2 + m, and summed: `lm` is a dim of the result alone."""
    b = parse_block(
        """
block gate()
  input x: f32[24, 484, 3, 2]
  dim i = 24
  dim m = 2
  dim l = 3
  dim j = 484
  dim lm = 6
  result gate[i, j, lm]: f32
  result total[i]: f32
  forall i
    init total_s[i]: f32 = 0.0
    for j
      let gate_b[i, j, l, m]: f32 = sigmoid(x[i, j, l, m])
      accum total_s = sum[j, l, m] log(gate_b[i, j, l, m])
      store gate[i, j, l * 2 + m] over (i, j, l, m) = gate_b[i, j, l, m]
    store total[i] over (i) = total_s[i]
  return gate, total
"""
    )
    assert "lm" not in default_config(b, {d: int(n.value) for d, n in b.sizes.items()}).tiles


def scaled_by_blocks(x):
    t = x.view(56, 128, 32, 128)
    return t / t.float().abs().amax((1, 3), keepdim=True)


def test_rows_of_several_axes_get_threads_for_all_of_them():
    """Blocks of 128 x 128 have 16,384 elements, too many for one warp to store."""
    (k,) = made(scaled_by_blocks, meta(56 * 128, 32 * 128, dtype=torch.bfloat16))
    assert config(k).warps == 4
