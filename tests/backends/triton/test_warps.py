"""What warps touch, on kernels whose sectors, turns and bytes are counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.functions import warped
from tests.backends.triton.kernels import made, meta
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Index, Load, Size
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.views import Like
from tilefold.backends.triton.warps import Forecast, _Walk, forecast
from tilefold.block.text import parse
from tilefold.plan.hardware import H200
from tilefold.tile.ir import Alloc, Buffer, For, Map, Reduce, TensorParam

CPU = torch.device("cpu")


def of(fn, *given, tiles: dict[str, int] | None = None, warps: int = 4) -> Forecast:
    """Of the one kernel of a function, with its default configuration or these tiles."""
    (k,) = made(fn, *given)
    if tiles is not None:
        config = TritonConfig(tiles, warps=warps, stages=1)
        k = TritonKernel(k.block, lambda block, sizes: config, interpreted=True, exactly=True)
    sizes = k.sizes({})
    shapes = [tuple(int(e.value) for e in i.shape) for i in k.block.inputs]
    shapes += [tuple(sizes[d] for d in r.dims) for r in k.block.results]
    kinds = [*(i.dtype for i in k.block.inputs), *(r.dtype for r in k.block.results)]
    xs = [Like.packed(s, t.torch_dtype, CPU) for s, t in zip(shapes, kinds, strict=True)]
    v, extents, seen = k.rendering(xs, {})
    return forecast(v, seen, extents, {}, H200)


def turned(x):
    return x.t().contiguous()


def test_lanes_along_a_row_touch_each_sector_once():
    f = of(lambda x: x + 1, meta(4096, 4096, dtype=torch.bfloat16))
    assert all(t.wasted == 1 and t.sectors == t.nbytes for t in f.touches)
    assert f.floor * H200.reached * H200.bandwidth > 2 * 4096 * 4096 * 2
    assert f.seconds < 1.6 * f.floor


def test_a_tile_of_one_column_wastes_its_sectors():
    """Each lane reads 2 bytes of a sector of its own, where rows are 8 KB apart."""
    f = of(turned, meta(4096, 4096, dtype=torch.bfloat16), tiles={"i": 1, "j": 1024})
    wasted = sorted(round(t.wasted) for t in f.touches)
    assert wasted == [1, 16]
    assert f.seconds > 3 * f.floor
    square = of(turned, meta(4096, 4096, dtype=torch.bfloat16))
    assert square.seconds < f.seconds / 2


def test_lanes_of_columns_are_neighbours_whatever_loop_is_around_them():
    """A loop's turn is a dim of one index, which comes behind the columns in the order of dims."""
    f = of(lambda x: x.sum(1), meta(128, 200, 512, dtype=torch.float32), tiles={"i": 1, "k": 32, "j": 64}, warps=8)
    assert any(t.times > 1 for t in f.touches)
    assert all(t.wasted == 1 for t in f.touches)


def test_turns_wait_for_memory():
    """Rows in steps of 1,024 elements: 128 latencies, whatever memory could do meanwhile."""
    given = meta(500, 1 << 17, dtype=torch.float32)
    long = of(lambda x: x.sum(1), given, tiles={"i": 1, "j": 1024})
    short = of(lambda x: x.sum(1), given, tiles={"i": 1, "j": 1 << 14}, warps=16)
    assert long.stages["turns"] == pytest.approx((1 + 128) * H200.turn)
    assert short.stages["turns"] == pytest.approx((1 + 8) * H200.turn)


def test_values_beyond_the_registers_are_spilled():
    def total(*xs):
        return sum(x.sin() for x in xs)

    given = [meta(256, 8192) for _ in range(12)]
    few, many = (of(total, *given, tiles={"i": 1, "j": 8192}, warps=n) for n in (4, 16))
    assert few.stages["cache"] > 4 * many.stages["cache"]
    assert many.seconds < 2 * many.floor


def test_threads_of_a_large_block_have_fewer_registers():
    """As many elements a thread: of four warps it has 255 registers for them, of 32 a quarter."""
    given = [meta(4096, 1 << 15, dtype=torch.float32) for _ in range(6)]

    def fn(*xs):
        return sum(x.abs() for x in xs)

    few = of(fn, *given, tiles={"i": 1, "j": 1 << 13}, warps=4)
    many = of(fn, *given, tiles={"i": 1, "j": 1 << 16}, warps=32)
    assert many.stages["cache"] > 1.5 * few.stages["cache"]


def test_a_product_of_rows_that_a_batch_repeats_is_one():
    """Matrix units multiply it, as they are given it: it is not a sum of more products than registers hold."""

    def added(x, w, y):
        return x.expand(64, 32, 128).reshape(-1, 128).mm(w).view(64, 32, 32) + y

    given = [meta(*s, dtype=torch.bfloat16) for s in ((1, 32, 128), (128, 32), (64, 32, 32))]
    f = of(added, *given, tiles={"i": 1, "j": 32, "k": 32})
    assert f.stages["cache"] < 1e-6
    assert f.stages["products"] > 0


def test_products_of_two_computed_operands_are_of_the_arguments_type():
    """As kernels compute them: of 16 bits where all that they read has 16 bits."""

    def attended(q, k, v):
        return (q * 2 + 1).matmul((k * 3 - 1).transpose(-1, -2)).softmax(-1) @ v

    by = {t: of(attended, *(meta(16, 256, 64, dtype=t) for _ in range(3))) for t in (torch.bfloat16, torch.float32)}
    assert by[torch.bfloat16].stages["products"] < by[torch.float32].stages["products"] / 4


def test_what_rows_share_is_computed_once():
    """A layer norm's bias is summed with the weights of the product after it: for a tile of columns, of no rows."""

    def projected(x, w, b, v):
        return F.layer_norm(x, (64,), w, b).mm(v) * 2

    given = [meta(*s, dtype=torch.bfloat16) for s in ((4096, 64), (64,), (64,), (64, 128))]
    f = of(projected, *given)
    assert f.seconds < 4 * f.floor


def test_what_blocks_share_is_of_memory_once():
    """A row that many blocks read is served by the cache, not by memory."""
    f = of(lambda x, y: x * y, meta(4096, 4096), meta(4096))
    every = 4096 * 4096 * 2
    assert f.stages["memory"] * H200.reached * H200.bandwidth == pytest.approx(2 * every + 4096 * 2)
    served = f.stages["cache"] * H200.cache_reached * H200.last_cache.bandwidth
    assert served >= 2 * every + f.blocks * 32


def test_a_loop_over_what_the_block_holds_whole_is_none():
    """Registers cannot be sliced: rows of a value that was computed for all of them come all at once."""
    dims = {"i": 32, "k": 1024}
    row, both = Buffer("r", ("i",), (Size("i"),), DType.F32), Buffer("s", (), (), DType.F32)
    x = Load("x", (Index("i"), Index("k")))

    def walked(*, computed: bool) -> _Walk:
        given = {
            n: (TensorParam(n, DType.F32, (), "in", len(s) - 1), Like.packed(s, torch.float32, CPU))
            for n, s in (("x", (32, 1024)), ("m", (32,)))
        }
        ranges = {d: (0, n) for d, n in dims.items()}
        w = _Walk(dims, {}, given, {}, 16, False, True, H200, ranges, {})
        factor = Load("r" if computed else "m", (Index("i"),))
        total = Reduce("s", "sum", ("i", "k"), Call("mul", (factor, Call("exp", (x,)))), True)
        rows = (Alloc(row), Map("r", Call("exp", (Load("m", (Index("i"),)),))))
        w.body((Alloc(both), *rows, For("i", 4, (total,))))
        return w

    assert walked(computed=False).turns == 8
    assert walked(computed=True).turns == 0


def test_elements_that_are_read_one_by_one_take_more_instructions_than_vectors():
    x = meta(4096, 4096, dtype=torch.bfloat16)
    vectors, each = (of(lambda x: x + 1, x, tiles=t) for t in ({"i": 1, "j": 1024}, {"i": 1, "j": 128}))
    assert each.stages["elements"] > 2 * vectors.stages["elements"]


def test_a_row_s_value_is_computed_by_all_lanes_that_have_it():
    """What follows a reduction of short rows, in its layout: each of the eight lanes along a row does it."""

    def alone(x):
        y = x[:, 0]
        for _ in range(40):
            y = torch.exp(y - 1)
        return y

    x = meta(65536, 32, dtype=torch.float32)
    tiles = {"i": 64}
    beside = of(lambda x: alone(x) + x.sum(-1), x, tiles=tiles).stages["elements"]
    apart = of(alone, x, tiles=tiles).stages["elements"]
    assert 6 < beside / apart < 10


def test_what_the_first_level_cache_has_not_kept_is_read_again():
    """Rows of 24 numbers, read one after the other: 128 of them a block stay, 1,024 do not."""

    def steps(x):
        total = x[:, 0]
        for n in range(1, 24):
            total = total * 0.9 + x[:, n]
        return total

    x = meta(500_000, 24, dtype=torch.float32)
    few, many = (of(steps, x, tiles={"i": n}).stages["cache"] for n in (32, 4096))
    assert many > 3 * few


def test_rows_picked_at_places_without_order_are_sectors_of_their_own():
    """A table read at two lists of indices: neither is one place, nor are both the same."""

    def picked(x, p, q):
        return x[p] + x[q]

    places = [meta(65536, dtype=torch.int64) for _ in range(2)]
    f = of(picked, meta(100_000, dtype=torch.float32), *places, tiles={"i": 256})
    rows = [t for t in f.touches if t.nbytes == 256 * 4 and not t.stored]
    assert len(rows) == 2
    for t in rows:
        assert t.sectors > 0.9 * 256 * 32 and t.lines > 0.9 * 256 and t.sent > 0.9 * 256 * 32


def test_lanes_lie_along_places_that_data_give_and_not_along_channels():
    """A lane a channel touches a line of its own: 615 us on an H100 for four such reads, Inductor's 219. What a flow
    displaces is near what its neighbours are displaced to."""
    f = of(warped, meta(4, 32, 64, 448, dtype=torch.float32), meta(4, 64, 448, dtype=torch.float32))
    assert [t.tensor for t in f.touches].count("image") == 2
    assert max(t.wasted for t in f.touches) < 2
    assert f.seconds < 3 * f.floor


def test_places_without_order_touch_a_sector_each():
    """Integers, and shares of an axis: nothing says that neighbours are near."""
    table = meta(1 << 20, dtype=torch.float32)
    by_number = of(lambda x, at: x[at] + 1, table, meta(4096, dtype=torch.int64))
    by_share = of(lambda x, at: x[(at * 1048575).long()] + 1, table, meta(4096, dtype=torch.float32))
    assert [max(round(t.wasted) for t in f.touches) for f in (by_number, by_share)] == [8, 8]


def layer(x, w, b):
    return torch.relu(F.linear(x, w, b))


def test_rows_of_odd_lengths_of_a_product_are_read_element_by_element():
    """39 features: 264 us on an H100."""
    n, h = 294912, torch.float16
    of_rows = [of(layer, meta(n, k, dtype=h), meta(256, k, dtype=h), meta(256, dtype=h)) for k in (39, 40)]
    assert 0.8 * 264e-6 < of_rows[0].seconds < 1.2 * 264e-6
    assert "narrow" not in of_rows[1].stages and of_rows[1].seconds < of_rows[0].seconds / 2
    pairs = of(layer, meta(n, 38, dtype=h), meta(256, 38, dtype=h), meta(256, dtype=h))
    assert "narrow" not in pairs.stages


def test_beside_an_operand_read_by_16_bytes_they_are_16_bytes_apart():
    """256 features and three others: 722 us on an H100."""
    n, h = 294912, torch.float16
    given = meta(n, 256, dtype=h), meta(n, 3, dtype=h), meta(128, 259, dtype=h), meta(128, dtype=h)
    f = of(lambda x, d, w, b: torch.relu(F.linear(torch.cat([x, d], -1), w, b)), *given)
    assert 0.7 * 722e-6 < f.seconds < 1.3 * 722e-6


BUCKETS = """
block largest()
  input table: bf16[32, 12]
  input x: bf16[6, 12, 512, 512]
  dim i = 6
  dim j = 12
  dim k = 512
  dim l = 512
  result y[i, j, k, l]: bf16
  result m[i, j, k]: f32
  forall k
    init m_s[i, j, k]: f32 = -inf
    for l
      let at[k, l]: i64 = minimum(i64(log(maximum(f32(abs(k * -1 + l)), 1.0) / 8.0) * 8.0) + 8, 31)
      let b[i, j, k, l]: f32 = x[i, j, k, l] + table[within(at[k, l], 32), j]
      accum m_s = max[l] b[i, j, k, l]
      store y[i, j, k, l] over (i, j, k, l) = b[i, j, k, l]
    store m[i, j, k] over (i, j, k) = m_s[i, j, k]
  return y, m
"""


def test_places_that_maps_compute_from_turns_of_a_loop():
    """Buckets of distances of queries and keys, an element a lane: a turn is no dim of the statement that computes
    them, but it is one of the place."""
    k = TritonKernel(parse(BUCKETS))
    shapes = (32, 12), (6, 12, 512, 512), (6, 12, 512, 512), (6, 12, 512)
    kinds = (*[torch.bfloat16] * 3, torch.float32)
    v, extents, seen = k.rendering([Like.packed(s, t, CPU) for s, t in zip(shapes, kinds, strict=True)], {})
    assert any(t.tensor == "table" and t.times == 8 for t in forecast(v, seen, extents, {}, H200).touches)
