"""Tiles along what is contiguous: columns, copies between layouts; and rows, whose rule stands."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.tiles import Shape, default_config
from tilefold.backends.triton.tilings import PART_OF, UNDER_WAY, VALUES
from tilefold.backends.triton.traffic import Access
from tilefold.backends.triton.work import room
from tilefold.block.crossing import between, crossing
from tilefold.block.ir import Update
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.gpu_forms import packed
from tilefold.suites.gpu import operators as o

HOPPER = Target("cuda", 90)
B, F = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("own_cache")


def widths(k: TritonKernel, **unit: int | None) -> dict[int, int]:
    """Extent -> tile, for tensors with these axes of stride 1."""
    sizes = k.sizes({})
    config = default_config(k.block, sizes, {k.tensors[0]: unit["first"]} if unit else None)
    return {sizes[d]: n for d, n in config.tiles.items()}


def down(x):
    return x.float().amax(1)


def flipped(x):
    return (x.mT + 1.0).contiguous()


def softmax_down(x):
    return x.softmax(1)


def test_columns_have_neighbours_and_long_tiles():
    (k,) = made(down, meta(64, 1000, 1024, dtype=B))
    tiles = widths(k)
    assert tiles[64] == 1 and tiles[1024] >= 32 and tiles[1000] >= 16


def highest(x):
    """Of each image's rows, channels last."""
    return x.amax(2)


def test_narrow_columns_that_are_only_reduced_have_few_warps():
    """Each warp of eight would hand on its part of 64 maxima; of what is stored again, or of 32 bits, they stay."""
    (k,) = made(highest, meta(64, 48, 80, 96, dtype=B))
    config = default_config(k.block, k.sizes({}))
    held = math.prod(config.tiles.values()) * 128
    assert held // (32 * config.warps) >= 64
    (stored,) = made(lambda x: x.softmax(2), meta(64, 48, 80, 96, dtype=B))
    assert default_config(stored.block, stored.sizes({})).warps >= 2 * config.warps
    (wide,) = made(highest, meta(64, 48, 80, 96, dtype=F))
    assert default_config(wide.block, wide.sizes({})).warps >= 2 * config.warps


def spread(x):
    return torch.var_mean(x.float(), 1)


def total(x):
    return x.float().sum(1)


def test_folds_that_repair_states_have_longer_turns():
    areas = {}
    for fn in (spread, total):
        k = next(k for k in made(fn, meta(64, 3840, 96, dtype=B)) if Shape.of(k.block).streamed)
        areas[fn] = math.prod(default_config(k.block, k.sizes({})).tiles.values())
    assert areas[spread] == 2 * areas[total]


def centred_columns(x):
    """Sums of columns about the means of rows."""
    return (x.float() - x.float().mean(-1, keepdim=True)).abs().sum(1)


def test_rows_that_columns_are_summed_about_leave_each_thread_few_elements():
    k = next(k for k in made(centred_columns, meta(64, 6400, 72, dtype=B)) if Shape.of(k.block).streamed)
    config = default_config(k.block, k.sizes({}))
    (rows,) = (config.tiles[d] for d in Shape.of(k.block).streamed)
    assert rows * 128 <= 16 * 32 * config.warps


def attended(x):
    return torch.cat((x.float().mean(1, keepdim=True), x.float().amax(1, keepdim=True)), 1)


def test_columns_that_are_held_whole_are_passed_between_few_warps():
    """Of 32 warps each has a part of every one: 80 us on an H100, 25 by 8."""
    (k,) = made(attended, meta(32, 256, 3136, dtype=B))
    config = default_config(k.block, k.sizes({}))
    assert config.warps <= 8 and widths(k)[3136] >= 32


def test_the_contiguous_dim_has_the_lanes_whichever_it_is():
    (k,) = made(down, meta(64, 1000, 1024, dtype=B))
    assert widths(k)[1000] < widths(k, first=1)[1000]  # rows of the transposed argument
    assert widths(k, first=0)[64] >= 16


def test_copies_between_layouts_are_wide_both_ways():
    (k,) = made(flipped, meta(2000, 4096, dtype=B))
    assert min(widths(k).values()) >= 16


def test_rows_keep_their_rule():
    (k,) = made(o.softmax, meta(8192, 4096, dtype=B))
    assert widths(k) == {8192: 1}
    (rows,) = made(lambda x: x.float().amax(2), meta(64, 1000, 1024, dtype=B))
    assert max(widths(rows).values()) == 1024


def test_whole_columns_are_held_if_they_fit():
    (k,) = made(softmax_down, meta(32, 512, 1024, dtype=B))
    assert 512 not in widths(k) and widths(k)[1024] >= 16


@pytest.mark.parametrize(("fn", "shape"), [(down, (64, 1000, 1024)), (flipped, (2048, 4096))])
def test_loads_and_stores_of_sixteen_bytes(fn, shape):
    (k,) = made(fn, meta(*shape, dtype=B))
    r = resources((v := variant(k)).kernel, v.rendered, v.config, HOPPER)
    loaded = r.has("ld.global.v4") or r.has("ld.global.L1::evict_first.L2::cache_hint.v4")
    assert loaded and (fn is down or r.has("st.global.v4"))


@pytest.mark.parametrize("elements", [9216, 16384, 65536, 262144])
def test_small_maps_have_blocks_for_all_multiprocessors_and_not_thousands(elements):
    (k,) = made(torch.nn.functional.gelu, meta(elements, dtype=B))
    (tile,) = widths(k).values()
    assert 132 <= -(-elements // tile) <= 1024


def test_no_reduction_across_threads_in_a_loop_down_columns():
    (k,) = made(lambda x: x.float().sum(1), meta(64, 1000, 1024, dtype=B))
    source = variant(k).rendered.source
    loop = source[source.index("for ") : source.index("tl.sum(")]
    assert "tl.load(" in loop


def blocks_in_place(x):
    """Blocks of 2 x 2 behind their channels, as an image with its channels in front."""
    return x.permute(0, 3, 1, 4, 2, 5).relu().contiguous()


def test_short_inner_axes_have_neighbours_beside_them():
    """Runs of two elements are none: lanes go on along the next axis of what is read and of what is written."""
    (k,) = made(blocks_in_place, meta(16, 28, 28, 128, 2, 2, dtype=B))
    config = default_config(k.block, k.sizes({}))
    by_extent = [(k.sizes({})[d], n) for d, n in config.tiles.items()]
    assert (128, 32) in by_extent and (28, 32) in by_extent and by_extent.count((2, 2)) == 2


def test_what_is_whole_inside_counts_in_a_run():
    whole = Access(2, ({"x": 1}, {"y": 1}, {"c": 1}), frozenset("xyc"), ())
    sizes = {"x": 2, "y": 3, "c": 100}
    assert whole.run({"x": 2, "y": 3, "c": 8}, sizes) == (48, 48)
    assert whole.run({"x": 2, "y": 2, "c": 8}, sizes) == (4, 4)
    assert whole.near(sizes, 8) == ["x", "y", "c"] and whole.near(sizes, 6) == ["x", "y"]
    assert Access(2, (None, {"y": 1}), frozenset("y"), ()).near(sizes, 8) == []


def test_what_registers_do_not_hold_costs_time():
    """Columns held whole: of two layouts' rows so many that registers take them (mixers' norms)."""

    def fn(x, y):
        z = x + y.mT
        return z, torch.nn.functional.layer_norm(z.float(), (512,))

    (k,) = made(fn, meta(64, 196, 512, dtype=B), meta(64, 512, 196, dtype=B))
    assert widths(k)[196] == 16 and default_config(k.block, k.sizes({})).warps <= 16


def test_threads_have_registers_for_all_that_is_read_for_an_element():
    """A quotient at both neighbours along three axes: 16 loads an element, of 32 elements a thread of four warps."""

    def fn(x, y):
        return torch.nn.functional.max_pool3d(x / y, 2)

    (k,) = made(fn, meta(16, 16, 14, 31, 33), meta(16, 1, 14, 31, 33))
    config = default_config(k.block, k.sizes({}))
    assert 12 * math.prod(config.tiles.values()) <= room(32 * config.warps)  # half of them for two channels


def test_threads_have_registers_for_few_elements_of_many_tensors():
    """Seven quotients of columns: 14 loads an element, of tiles that are wide both ways."""

    def fn(*xs):
        return sum(a / (6.0 + b) for a, b in zip(xs[::2], xs[1::2], strict=True))

    (k,) = made(fn, *(meta(4, 96, 9216, dtype=F).mT for _ in range(14)))
    config = variant(k).config
    assert 14 * math.prod(config.tiles.values()) <= UNDER_WAY * 32 * config.warps


def test_what_begins_between_two_vectors_has_a_register_an_element():
    """Pooling of neighbours one apart, with a copy whose channels are last: 9 loads of 16 bits."""

    def fn(x):
        return torch.nn.functional.max_pool2d(x, 3, 1, 1).contiguous(memory_format=torch.channels_last)

    (k,) = made(fn, meta(32, 192, 28, 28, dtype=B))
    config = default_config(k.block, k.sizes({}))
    assert 9 * math.prod(config.tiles.values()) <= room(32 * config.warps)


def test_large_maps_keep_blocks_of_long_runs():
    (k,) = made(lambda x, s: x * s, meta(64, 256, 3136, dtype=B), meta(256, 1, dtype=B))
    assert widths(k)[3136] == 1024


def test_a_sum_of_everything_has_many_threads_and_a_few_loads_each():
    (k, _) = made(lambda x, y: (x * y).sum(), meta(1 << 25, dtype=F), meta(1 << 25, dtype=F))
    config = default_config(k.block, k.sizes({}))
    assert config.warps == 16 and max(config.tiles.values()) == 4096


def test_a_sum_of_what_many_tensors_have_has_a_vector_of_each_a_thread():
    k = made(lambda *xs: torch.erf(sum(xs)).sum(), *(meta(1 << 22, dtype=F) for _ in range(5)))[0]
    config = default_config(k.block, k.sizes({}))
    assert config.warps == 8 and max(config.tiles.values()) == 1024


def test_sums_of_rows_in_segments_keep_the_rule_of_rows():
    (k, _) = made(lambda x: x.float().sum(-1), meta(64, 524288, dtype=B))
    config = default_config(k.block, k.sizes({}))
    assert config.warps == 8 and max(config.tiles.values()) == 8192


def test_pooling_leaves_blocks_for_all_multiprocessors():
    """7 x 7 places of 32 x 256 images, 16 loads each: blocks of 16 images were 512, of 146 registers a thread."""
    (k,) = made(lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (7, 7)), meta(32, 256, 28, 28, dtype=B))
    sizes, config = k.sizes({}), default_config(k.block, k.sizes({}))
    blocks = math.prod(-(-sizes[d] // n) for d, n in config.tiles.items())
    area = math.prod(config.tiles.values())
    assert blocks >= 1024 and area >= 32 * config.warps


def test_short_dims_that_are_stored_or_summed_whole_take_registers():
    """Images of 7 x 7 are 64 lanes; three coordinates that are summed are three values."""

    def pooled(x):
        y = torch.nn.functional.silu(x.float())
        return y.to(B), y.mean((1, 2))

    (k,) = made(pooled, meta(32, 7, 7, 1536, dtype=B))
    config = default_config(k.block, k.sizes({}))
    assert 64 * math.prod(config.tiles.values()) <= 64 * 32 * config.warps
    (k,) = made(lambda x: (x * x).sum(-1), meta(1 << 20, 3, dtype=F))
    (tile,) = default_config(k.block, k.sizes({})).tiles.values()
    assert tile >= 1024


def test_what_is_computed_of_columns_has_several_rows_a_thread():
    """Batch norms of channels-last images, where blocks are many."""

    def normed(x, mean, var):
        return torch.relu((x.float() - mean) / torch.sqrt(var + 1e-5)).to(B)

    def rows(n: int, fn=normed) -> int:
        (k,) = made(fn, meta(n, 96, dtype=B), meta(96, dtype=F), meta(96, dtype=F))
        return widths(k)[n]

    assert rows(100_352) == 4 * rows(1568) == 32
    assert rows(100_352, lambda x, mean, var: (x.float() - mean + var).to(B)) == 8


def of_channel_groups(x):
    """A group norm of places by channels, eight of which are a group."""
    x = torch.nn.functional.gelu(x).unflatten(-1, (-1, 8))
    return (x - x.mean((1, 3), keepdim=True)) * torch.rsqrt(x.var((1, 3), keepdim=True) + 1e-5)


@pytest.mark.parametrize(("places", "tile"), [(4489, 1024), (8192, 4096), (7000, 4096)])
def test_a_tile_that_is_all_but_beyond_the_end_is_shorter(places, tile):
    (k,) = made(of_channel_groups, meta(8, places, 128, dtype=F))
    assert widths(k)[places] == tile


def test_rows_share_what_is_computed_and_reduced_of_columns():
    """Each block sums all columns' numbers: those of two rows once."""

    def stepped(p, g, c, sums):
        scale = torch.rsqrt(c * 0.8 + sums) / sums.sum().sqrt()
        return p - g * scale

    shapes = (meta(8192, 2048, dtype=F), meta(8192, 2048, dtype=F), meta(2048, dtype=F), meta(2048, dtype=F))
    (k,) = made(stepped, *shapes)
    assert variant(k).kernel.grid[0].tile == 2
    (k,) = made(lambda p, g: p - g * torch.rsqrt(g.square().sum(-1, keepdim=True)), *shapes[:2])
    assert variant(k).kernel.grid[0].tile == 1  # of a row


def test_functions_that_branch_have_few_elements_a_thread():
    """Distances of places on a sphere: with 32 a thread 116 registers and code of 177 KB, 192 us on an H100."""

    def haversine(a, b):
        u, v = (torch.sin(a[:, None, n] - b[None, :, n]) for n in (0, 1))
        return (u * u + torch.cos(a[:, None, 0]) * torch.cos(b[None, :, 0]) * v * v).sqrt()

    def plain(a, b):
        return ((a[:, None, 0] - b[None, :, 0]) * (a[:, None, 1] - b[None, :, 1])).exp()

    shapes = (meta(4000, 2, dtype=torch.float32), meta(3001, 2, dtype=torch.float32))
    for fn, most in ((haversine, 8), (plain, 32)):
        (k,) = made(fn, *shapes)
        c = variant(k).config
        assert math.prod(c.tiles.values()) // (32 * c.warps) == most


def test_few_threads_with_functions_that_branch_have_fewer_elements_each():
    """Embeddings of 512 steps, eight sines and cosines a thread, one after the other: 5.1 us on an H200."""

    def embedding(steps, rates):
        at = steps[:, None] * rates
        return torch.cat((at.cos(), at.sin()), -1)

    each = []
    for steps in (512, 1 << 20):
        (k,) = made(embedding, meta(steps, dtype=F), meta(160, dtype=F))
        c = variant(k).config
        each.append(math.prod(c.tiles.values()) // (32 * c.warps))
    assert each[0] <= 2 < each[1] <= 8


def test_sums_of_functions_that_branch_have_few_elements_a_thread():
    """Damped waves: 209 registers with 32 a thread, 233 us on an H200 for what takes Inductor 126."""

    def waves(rates, c):
        at = rates[:, :, None] * torch.arange(2048, device=rates.device)
        return (c[:, :, None] * at.cos()).sum(1)

    (k,) = made(waves, meta(512, 32, dtype=F), meta(512, 32, dtype=F))
    c = variant(k).config
    assert 32 * math.prod(c.tiles.values()) // (32 * c.warps) == 8


def magnitudes(x):
    return x.float().square().sum(1).add(1e-7).log().mean((1, 2))


def test_a_segment_is_not_half_of_its_tile():
    """Shares of 8,208 places of a spectrogram: one tile of 16,384 would be half empty."""
    k = TritonKernel(packed(made(magnitudes, meta(8, 2, 800, 513))[0].block))
    shape, config = Shape.of(k.block), default_config(k.block, k.sizes({}))
    length = shape.seen(k.sizes({}))
    assert shape.cut and all(-(-length[d] // config.tiles[d]) * config.tiles[d] < 4 / 3 * length[d] for d in shape.cut)


def ranks(x):
    return torch.sigmoid((x[:, None, :] - x[:, :, None]) * 2.0).sum(-1)


def discounted(x):
    return (1.0 / torch.log2(1.5 + ranks(x))).sum(-1)


@pytest.mark.parametrize("fn", [ranks, discounted])
@pytest.mark.parametrize("rows", [256, 1 << 14])
def test_what_is_computed_of_pairs_has_many_warps_of_few_elements(fn, rows):
    """Sigmoids of all differences of a row: read is next to nothing, so that large tiles save nothing."""
    (k,) = made(fn, meta(rows, 240, dtype=torch.float32))
    c, sizes = variant(k).config, k.sizes({})
    each = math.prod(c.tiles.get(d, 1) for d in k.block.sizes) * 256 // (32 * c.warps)
    blocks = math.prod(-(-sizes[d] // c.tiles[d]) for d in Shape.of(k.block).parallel)
    assert 8 <= each <= 32 and c.warps <= 16 and blocks * c.warps >= 132 * 16


@pytest.mark.parametrize(("gates", "rows"), [(2, 4), (16, 1)])
def test_values_that_cross_a_reduction_of_a_held_row_have_registers(gates, rows):
    """Gates of a row that are stored, though the row is also summed with weights: of many of them 36 KB a thread were
    spilled, and compiling took 17 s."""

    def summed(w, y, *xs):
        found = [torch.sigmoid(x) for x in xs]
        y = y + sum(found)
        return *found, ((y * w).sum(-1, keepdim=True) * y).bfloat16()

    (k,) = made(summed, meta(512), meta(256, 512, dtype=F), *[meta(256, 512) for _ in range(gates)])
    c, sizes = variant(k).config, k.sizes({})
    held = {d: c.tiles.get(d, n) for d, n in sizes.items()}
    (whole,) = (d for d, n in sizes.items() if n == 512)
    assert crossing(k.block, whole, held) <= room(32 * c.warps)
    assert c.tiles[next(d for d, n in sizes.items() if n == 256)] == rows


def test_tiles_of_three_axes_have_registers_for_their_layouts():
    """A state's step, stored, a sum of it along its last axis, and a sum of all of these: each reduction has a layout
    of its own. 64 x 8 x 16 by two warps spilled 700 bytes a thread."""

    def step(s, w, u, c):
        t = s * torch.exp(-w[..., None] * u) + w[..., None]
        y = (t * c[:, None]).sum(-1)
        return t, y, y.square().sum()

    shapes = (64, 4096, 16), (64, 4096), (4096, 16), (64, 16)
    k = next(k for k in made(step, *(meta(*n, dtype=torch.float32) for n in shapes)) if Shape.of(k.block).streamed)
    c, sizes = variant(k).config, k.sizes({})
    lanes = {d: c.tiles.get(d, n) for d, n in sizes.items()}
    held = max(crossing(k.block, d, lanes) for d, n in lanes.items() if d not in c.tiles)
    assert sum(n > 1 for n in lanes.values()) > 2 and 0 < 2 * held <= room(32 * c.warps)


def test_segments_of_which_a_block_has_one_index_take_no_registers():
    """Sums of channels over images, rows and columns, cut by rows: all 64 rows were counted, and a block had one
    channel, a 32nd of each line that it read."""

    def channels(x, y, mean, rstd):
        n = (y - mean) * rstd
        return (x * n).sum((0, 1, 2)), x.sum((0, 1, 2)), y.square().sum((0, 1, 2))

    wide, narrow = meta(2, 56, 56, 96, dtype=torch.float32), meta(2, 56, 56, 1, dtype=torch.float32)
    k = next(k for k in made(channels, wide, wide, narrow, narrow) if Shape.of(k.block).segments)
    c, sizes = variant(k).config, k.sizes({})
    assert c.tiles[next(d for d, n in sizes.items() if n == 96)] >= 8


def walked(z, y):
    """A path's steps, one after the other, of two rows of numbers."""
    v, total = torch.zeros_like(z[:, 0]), torch.zeros_like(z[:, 0])
    for n in range(z.shape[1]):
        v = v * 0.9 + y[:, n].clamp(min=0)
        total = total + v.sqrt() * z[:, n]
    return total


@pytest.mark.parametrize(("steps", "each"), [(24, 1), (2, 8)])
def test_rows_of_a_thread_s_own_fit_the_first_level_cache(steps, each):
    """Of eight paths a thread, rows of 24 numbers left the cache between two steps: three times the time."""
    paths = 500_000
    (k,) = made(walked, meta(paths, steps, dtype=F), meta(paths, steps, dtype=F))
    c = variant(k).config
    (tile,) = (n for d, n in c.tiles.items() if k.sizes({})[d] == paths)
    assert tile == each * 32 * c.warps


def mixtures(x, m, s):
    """Densities of ten logistics at three channels, each conditioned on those before."""
    total = 0.0
    for k in range(3):
        z, r = x[:, k, None] - m[:, k], torch.exp(-s[:, k])
        up, down = r * (z + 0.1), r * (z - 0.1)
        q, mid = torch.sigmoid(up) - torch.sigmoid(down), r * z
        inner = torch.where(q > 1e-5, torch.log(q.clamp(min=1e-12)), mid - s[:, k])
        total = total + torch.where(x[:, k, None] < -0.9, up, torch.where(x[:, k, None] > 0.9, -down, inner))
    return torch.logsumexp(total, 1).sum(1)


def test_many_values_that_later_statements_read_fit_in_registers():
    (k,) = made(mixtures, meta(16, 3, 4096), meta(16, 3, 10, 4096), meta(16, 3, 10, 4096))[:1]
    sizes = k.sizes({})
    config = default_config(k.block, sizes)
    lanes = {d: config.tiles.get(d, 16 if n == 10 else 1) for d, n in sizes.items()}
    assert PART_OF * room(128) < between(k.block, lanes, VALUES) and config.warps == 16


def test_long_functions_have_few_elements_a_thread():
    (k,) = made(lambda x, y: torch.lgamma(x) + torch.lgamma(y), meta(1 << 20), meta(1 << 20))
    config = default_config(k.block, k.sizes({}))
    assert math.prod(config.tiles.values()) <= 2 * 32 * config.warps


def gradients_of_a_divergence(s, t):
    e = torch.exp(t.float())
    g = e * (t.float() - s.float()) + e
    return (g - e * g.sum(-1, keepdim=True)).to(B), (s.float().exp() * e.sum(-1, keepdim=True) - e).to(B)


def test_the_longest_rows_of_several_maps_are_no_single_tile():
    (k,) = made(gradients_of_a_divergence, meta(1000, 32000, dtype=B), meta(1000, 32000, dtype=B))
    assert widths(k)[32000] < 1 << 15
    (plain,) = made(lambda x: torch.softmax(x, -1), meta(1000, 32000, dtype=B))
    assert widths(plain).get(32000, 1 << 15) == 1 << 15


@pytest.mark.parametrize(("columns", "tile"), [(32768, 16384), (8192, 8192)])
def test_two_thread_blocks_share_a_multiprocessor_where_turns_repair_states(columns, tile):
    (k,) = made(o.variance_by_hand, meta(4096, columns, dtype=F))
    assert max(widths(k).values()) == tile


def two_sums(x):
    """Of exponentials, for the loss and for its norm: each is a state."""
    x = x.float()
    return x.log_softmax(-1)[:, 0].mean() + x.logsumexp(-1).square().mean()


def test_of_several_exponentials_a_row_is_held_whole():
    k = next(k for k in made(two_sums, meta(4096, 32000, dtype=B)) if 32000 in widths(k))
    assert any(isinstance(n, Update) for n in nodes_of(k.block.body)) and widths(k)[32000] == 32768
    one = made(lambda x: x.float().log_softmax(-1)[:, 0].mean(), meta(4096, 32000, dtype=B))
    assert next(widths(k)[32000] for k in one if 32000 in widths(k)) == 16384


def divergence(student, teacher):
    a, b = ((x.float() / 2.0).log_softmax(-1) for x in (student, teacher))
    return (b.exp() * (b - a)).sum(-1).mean() + student.float().logsumexp(-1).mean()


def test_warps_become_fewer_with_the_tile_of_what_repairs_states():
    """Of a tile for each thread sixteen elements: warps wait for fewer others at each turn."""
    k = next(k for k in made(divergence, *(meta(1000, 32000, dtype=B) for _ in range(2))) if 32000 in widths(k))
    c, tile = default_config(k.block, k.sizes({})), widths(k)[32000]
    assert tile < 16384 and tile == 16 * 32 * c.warps


def test_single_coordinates_are_elements_that_a_step_reads():
    """Of a mass and three coordinates each."""
    (k,) = made(o.inertia, meta(512, 32768, dtype=F), meta(512, 32768, 3, dtype=F))
    assert widths(k)[32768] == 4096


def test_turns_along_neighbours_repair_states_of_one_row():
    """Of three coordinates a block has all; of eight every lane has one."""

    def variance(x):
        return x.var(1)

    (three,), (eight,) = (made(variance, meta(4096, 32768, n, dtype=F)) for n in (3, 8))
    assert widths(three)[4096] == 1 and 3 not in widths(three)
    assert widths(eight)[4096] == 1 and widths(eight)[8] == 8


def test_an_axis_of_which_a_tile_has_a_part_lies_between():
    """One of three coordinates of 64 bodies is every third element; of eight it is a sector away."""
    a = Access(4, ({"k": 1}, {"i": 1}), frozenset({"i", "k"}), ())
    assert a.run({"i": 64, "k": 1}, {"i": 512, "k": 3}) == (64, 3 * 64)
    assert a.run({"i": 64, "k": 4}, {"i": 512, "k": 3}) == (3 * 64, 3 * 64)
    assert a.run({"i": 64, "k": 1}, {"i": 512, "k": 8}) == (1, 1)
