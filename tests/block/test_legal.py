"""Which operators can share a kernel, and the reason where they cannot; the limits are the device's."""

from __future__ import annotations

import pytest

from tilefold.block.group import Group, Limits, Operands
from tilefold.block.legal import legal, one_kernel
from tilefold.plan.greedy import group
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.text import parse

ROWS_THEN_COLUMNS = """
program sums()
  input x: f32[{n}, {m}]
  dim i = {n}
  dim j = {m}
  rows[i]: f32 = sum[j] x[i, j]
  columns[j]: f32 = sum[i] x[i, j]
  return rows, columns
"""
OUTER = """
program outer()
  input x: f32[64, {m}]
  input y: f32[64]
  dim i = 64
  dim j = {m}
  a[i]: f32 = exp(y[i])
  b[i, j]: f32 = x[i, j] * a[i]
  return {results}
"""
SHIFTED = """
program shifted()
  input x: f32[64, 65]
  dim i = 64
  dim j = 65
  dim k = 64
  a[i, j]: f32 = exp(x[i, j])
  b[i, k]: f32 = a[i, k + 1]
  return a, b
"""
APART = """
program apart()
  input x: f32[64, 2048]
  input y: f32[64]
  dim i = 64
  dim j = 2048
  dim k = 64
  a[j]: f32 = sum[i] x[i, j]
  c[k]: f32 = exp(y[k])
  return a, c
"""
GPU = Limits(workers=1, both=8, in_registers=True)


def graph(text: str, **values: object) -> Graph:
    return Graph.of(parse(text.format(**values)))


def test_a_row_and_what_is_made_of_it_share_a_kernel() -> None:
    assert legal(graph(OUTER, m=512, results="b"), ("a", "b")) == Group(("a", "b"), ("i", "j"))


@pytest.mark.parametrize("m, lost, fits", [(512, 512, True), (513, 512, False), (513, 513, True)])
def test_parallel_dims_are_lost_up_to_a_limit(m: int, lost: int, fits: bool) -> None:
    found = legal(graph(OUTER, m=m, results="a, b"), ("a", "b"), Limits(lost=lost))
    assert found == Group(("a", "b"), ("i",)) if fits else found == "the parallel dim j of b would be lost"


def test_what_goes_to_memory_keeps_its_blocks_where_registers_hold_values() -> None:
    g = graph(OUTER, m=512, results="a, b")
    assert isinstance(legal(g, ("a", "b")), Group)
    assert "a goes to memory" in str(legal(g, ("a", "b"), GPU))


@pytest.mark.parametrize("m, one", [(3, True), (4, True), (5, False)])
def test_coordinates_are_no_dim_that_a_kernel_loses(m: int, one: bool) -> None:
    found = legal(graph(OUTER, m=m, results="a, b"), ("a", "b"), GPU)
    assert isinstance(found, Group) is one and (not one or found.parallel == ("i",))


def test_blocks_that_both_had_are_left() -> None:
    g = graph(ROWS_THEN_COLUMNS, n=64, m=64)
    one = Limits(workers=1)
    assert legal(g, ("rows", "columns"), one) == Group(("rows", "columns"), ())
    assert legal(g, ("rows", "columns"), GPU) == "only 1 independent block would be left"
    assert legal(g, ("rows", "columns")) == "only 1 independent block would be left"
    assert isinstance(legal(graph(ROWS_THEN_COLUMNS, n=1, m=64), ("rows", "columns"), GPU), Group)


def test_values_in_registers_are_read_where_they_are() -> None:
    g = graph(SHIFTED)
    assert one_kernel(g, ("a", "b")) == Group(("a", "b"), ("i",))
    assert one_kernel(g, ("a", "b"), GPU) == "b reads a at a computed position"


def test_a_block_keeps_so_many_elements_of_a_value() -> None:
    g = graph(APART)
    assert isinstance(legal(g, ("a", "c"), Limits(workers=1, lost=2048)), Group)
    narrow = Limits(workers=1, lost=2048, local=2047)
    assert legal(g, ("a", "c"), narrow) == "a block would have to keep a over all of j"
    assert legal(g, ("a",), narrow) == Group(("a",), ("j",))


def test_greed_asks_the_same_test() -> None:
    p = parse(OUTER.format(m=513, results="a, b"))
    found = group(p)
    assert [x.members for x in found.groups] == [("a",), ("b",)]
    (refusal,) = found.refusals
    g = Graph.of(p)
    parts = [Group((m,), out_dims(g.by_name[m])) for m in ("a", "b")]
    assert refusal.reason == legal(g, ("a", "b"), Limits(), parts)
    assert [x.members for x in group(p, limits=Limits(lost=513)).groups] == [("a", "b")]


MEANS = """
program means()
  input x: f32[{n}, {m}, 16384]
  dim i = {n}
  dim j = {m}
  dim k = 16384
  mean[i, j]: f32 = sum[k] x[i, j, k]
  top[i]: f32 = max[j] mean[i, j]
  return top
"""
STARVED = Limits(workers=1, both=8, in_registers=True, readers=172, operands=Operands(64, 1.0, 0.01, 8.6e6))


def test_what_many_blocks_could_read_is_not_left_to_few():
    found = legal(graph(MEANS, n=16, m=64), ("mean", "top"), STARVED)
    assert isinstance(found, str) and "16 independent blocks would read what more could" in found


@pytest.mark.parametrize(("n", "m"), [(512, 64), (16, 65536)], ids=["enough blocks", "an axis that can be cut"])
def test_blocks_that_read_at_the_rate_of_the_memory_keep_what_they_reduce(n, m):
    assert isinstance(legal(graph(MEANS, n=n, m=m), ("mean", "top"), STARVED), Group)


SCALED = """
program scaled()
  input s: f32[{n}, 384]
  input x: f32[{n}, {m}, 384]
  input z: f32[{n}, {m}, 384]
  dim i = {n}
  dim j = {m}
  dim k = 384
  whole[i]: f32 = sum[k] s[i, k]
  y[i, j, k]: f32 = x[i, j, k] * (s[i, k] / whole[i])
  total[i, k]: f32 = sum[j] y[i, j, k] * z[i, j, k]
  return y, total
"""


def scaled(n: int, m: int) -> Group | str:
    parts = [Group(("whole",), ("i",)), Group(("y", "total"), ("i", "k"))]
    return legal(graph(SCALED, n=n, m=m), ("whole", "y", "total"), STARVED, parts)


def test_a_little_sum_in_front_does_not_leave_images_to_a_block_each():
    found = scaled(16, 3136)
    assert isinstance(found, str) and "16 independent blocks would read what more could" in found
    assert isinstance(scaled(512, 3136), Group)  # blocks enough
    assert isinstance(scaled(16, 8), Group)  # few bytes


NORMED = """
program normed()
  input w: f32[{n}, 1152]
  input x: f32[{n}, {m}, 1152]
  dim i = {n}
  dim j = {m}
  dim k = 1152
  mean[i, j]: f32 = sum[k] x[i, j, k] * w[i, k]
  y[i, j, k]: f32 = x[i, j, k] - mean[i, j]
  total[i, k]: f32 = sum[j] y[i, j, k] * x[i, j, k]
  return y, total
"""


def normed(n: int, m: int) -> Group | str:
    parts = [Group(("mean", "y"), ("i", "j")), Group(("total",), ("i", "k"))]
    return legal(graph(NORMED, n=n, m=m), ("mean", "y", "total"), STARVED, parts)


def test_rows_that_are_folded_and_written_are_not_run_down_in_few_blocks():
    """The gradient of a norm's rows, and of each image's scale."""
    found = normed(32, 256)
    assert isinstance(found, str) and "32 independent blocks would run down rows that more could have" in found
    assert isinstance(normed(512, 256), Group)  # blocks enough
    assert isinstance(normed(32, 4), Group)  # few bytes


GATED = """
program gated()
  input x: f32[{n}, 256, {m}]
  input h: f32[{n}, 4]
  input w: f32[256, 4]
  dim i = {n}
  dim c = 256
  dim p = {m}
  dim k = 4
  gate[i, c]: f32 = sum[k] h[i, k] * w[c, k]
  y[i, c, p]: f32 = x[i, c, p] * gate[i, c]
  top[i, p]: f32 = max[c] y[i, c, p]
  return top
"""


def test_a_gate_of_channels_is_not_computed_for_each_place():
    found = legal(graph(GATED, n=32, m=3136), ("gate", "y", "top"), STARVED)
    assert found == "gate would be computed in blocks of one index of p"
    assert isinstance(legal(graph(GATED, n=32, m=196), ("gate", "y", "top"), STARVED), Group)


DOWN = """
program down()
  input x: f32[64, {rows}, 4096]
  dim i = 64
  dim c = {rows}
  dim p = 4096
  top[i, p]: f32 = max[c] x[i, c, p]
  e[i, c, p]: f32 = exp(x[i, c, p] - top[i, p])
  s[i, p]: f32 = sum[c] e[i, c, p]
  return e, s
"""


def test_short_columns_are_summed_where_what_is_made_of_their_maxima_is_written():
    """Exponentials of 16 channels that pooling divides by their sum: 16 and 12 us on an H100 in two kernels."""
    limits = Limits(workers=1, in_registers=True, operands=Operands(128, 0.5, 0.0, 1e6, kept=4096))
    assert isinstance(one_kernel(graph(DOWN, rows=16), ("top", "e", "s"), limits), Group)
    assert one_kernel(graph(DOWN, rows=512), ("top", "e", "s"), limits) == "e goes to memory, where s sums its columns"
    assert isinstance(one_kernel(graph(DOWN, rows=16), ("e", "s"), limits), str)
