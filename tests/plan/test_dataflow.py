"""Traffic and cost of block programs against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Load
from tilefold.algebra.ops import OPS
from tilefold.block.ir import Block
from tilefold.errors import PlanError
from tilefold.plan.cost import UNHIDDEN, kernel_cost, product_seconds, slowest
from tilefold.plan.dataflow import CPU_UNITS, GPU_UNITS, Dataflow, MatrixWork, analyse, element_units
from tilefold.plan.greedy import fuse
from tilefold.plan.hardware import H100, H200, Machine, Tier
from tilefold.plan.machine import nominal
from tilefold.tensor.sizes import extents
from tilefold.tensor.text import parse
from tilefold.tile.layout import arrange

GEMM = """
program gemm()
  input a: f32[64, 128]
  input b: f32[128, 96]
  dim m = 64
  dim n = 96
  dim k = 128
  c[m, n]: f32 = sum[k] a[m, k] * b[k, n]
  return c
"""

SOFTMAX = """
program softmax(n)
  input x: f32[32, n]
  dim i = 32
  dim j = n
  m[i]: f32 = max[j] x[i, j]
  t[i]: f32 = sum[j] exp(x[i, j] - m[i])
  y[i, j]: f32 = exp(x[i, j] - m[i]) / t[i]
  return y
"""


def machine(*capacities: float) -> Machine:
    """Caches of these sizes (private) at 100 GB/s each, memory at 10, one core."""
    names = ("L1", "L2", "L3")
    caches = [Tier(names[k], c, 100e9, 0.0, 1, "test") for k, c in enumerate(capacities)]  # type: ignore[arg-type]
    return replace(nominal(), tiers=(*caches, Tier("global", 1e12, 10e9, 0.0, 1, "test")), cores=1)


def block(text: str) -> Block:
    (kernel,) = fuse(parse(text)).kernels
    b = kernel.block
    return arrange(b, {i.name: len(i.shape) - 1 for i in b.inputs} | {r.name: len(r.dims) - 1 for r in b.results})


def flow(text: str, tiles: dict[str, int], *capacities: float, n: int = 0) -> Dataflow:
    b = block(text)
    return analyse(b, extents(b.sizes, {"n": n}), tiles, machine(*capacities))


def test_everything_fits_and_is_read_once() -> None:
    moved = flow(GEMM, {"m": 32, "n": 32}, 1e9).traffic[0]
    assert moved == {"a": 64 * 128 * 4, "b": 128 * 96 * 4, "c": 64 * 96 * 4}


def test_a_tile_of_a_product_is_read_once_for_each_block_that_needs_it() -> None:
    """Room for one block's tiles only: the panel of a stays while n runs inside m, all of b is read for each m."""
    one = 4 * (32 * 128 + 128 * 32 + 2 * 32 * 32)  # the result's tile is computed in the block, then written
    assert flow(GEMM, {"m": 32, "n": 32}, one - 1).traffic[0]["a"] == 3 * 64 * 128 * 4
    moved = flow(GEMM, {"m": 32, "n": 32}, one).traffic[0]
    assert moved["a"] == 64 * 128 * 4
    assert moved["b"] == 2 * 128 * 96 * 4
    assert moved["c"] == 64 * 96 * 4


def test_room_for_a_row_of_blocks_keeps_b() -> None:
    row = 4 * (32 * 128 + 128 * 96 + 32 * 96 + 32 * 32)
    assert flow(GEMM, {"m": 32, "n": 32}, row).traffic[0]["b"] == 128 * 96 * 4
    assert flow(GEMM, {"m": 32, "n": 32}, row - 1).traffic[0]["b"] == 2 * 128 * 96 * 4


def test_larger_tiles_move_less() -> None:
    moved = [flow(GEMM, {"m": t, "n": t}, 20_000).moved(0) for t in (4, 8, 16)]
    assert moved[0] > moved[1] > moved[2]


def test_products_and_blocks_are_counted() -> None:
    found = flow(GEMM, {"m": 32, "n": 32}, 1e9)
    assert found.blocks == 2 * 3
    assert sum(p.flops for p in found.products) == 2 * 64 * 96 * 128
    assert {t: found.footprint[t] for t in "abc"} == {"a": 32 * 128 * 4, "b": 128 * 32 * 4, "c": 32 * 32 * 4}


def test_a_row_that_fits_is_read_once_and_one_that_does_not_twice() -> None:
    n = 8192
    fits = flow(SOFTMAX, {"i": 1, "j": 1024}, 1e6, n=n).traffic[0]
    spills = flow(SOFTMAX, {"i": 1, "j": 1024}, 20_000, n=n).traffic[0]
    assert fits["x"] == 32 * n * 4
    assert spills["x"] >= 2 * 32 * n * 4
    assert spills["y"] == fits["y"] == 32 * n * 4


def test_time_is_the_slowest_stage_the_rest_hidden_mostly() -> None:
    assert slowest({"compute": 3.0, "L2": 1.0, "global": 2.0}) == pytest.approx(3.0 + 3.0 * UNHIDDEN)
    b = block(GEMM)
    found = kernel_cost(b, extents(b.sizes), {"m": 32, "n": 32}, replace(machine(1e9), cores=2))
    assert found.seconds >= found.overhead + max(found.stages.values())
    assert found.stages["global"] == pytest.approx(4 * (64 * 128 + 128 * 96 + 64 * 96) / 10e9)
    assert found.nbytes == 4 * (64 * 128 + 128 * 96 + 64 * 96)


def test_blocks_that_do_not_divide_among_the_cores_take_longer() -> None:
    b = block(GEMM)
    two = replace(machine(1e9), cores=2)
    uneven = kernel_cost(b, extents(b.sizes), {"m": 64, "n": 32}, two)  # three blocks on two cores
    even = kernel_cost(b, extents(b.sizes), {"m": 64, "n": 48}, two)
    assert uneven.seconds > even.seconds


def test_ragged_register_blocks_run_as_if_full() -> None:
    m = nominal()
    full, ragged = (product_seconds(MatrixWork(1.0, 6, n, 64, DType.F32), m) for n in (64, 65))
    assert ragged > 1.15 * full


def test_transcendental_functions_cost_more() -> None:
    x = parse(SOFTMAX).body
    assert element_units(x[1].body) > 10 * element_units(x[0].body)


@pytest.mark.parametrize("m", [nominal(), H100, H200], ids=lambda m: m.name)
def test_machines_are_ordered_and_cited(m: Machine) -> None:
    assert m.tiers[-1].name == "global" and m.bandwidth == m.tiers[-1].bandwidth
    assert all(t.source and t.capacity > 0 for t in m.tiers) and m.source
    assert [t.latency for t in m.tiers] == sorted(t.latency for t in m.tiers)
    assert m.home(1e3).name in ("L2", "L3") and m.home(1e10).name == "global"


def test_unlisted_types_multiply_at_the_slowest_rate() -> None:
    assert nominal().gemm_rate(DType.E5M2, library=True) == min(nominal().library.values())


@pytest.mark.parametrize("costs", [CPU_UNITS, GPU_UNITS])
def test_every_operation_has_a_cost_and_an_unknown_one_is_never_cheap(costs: Mapping[str, float]) -> None:
    assert costs.keys() == OPS.keys() and all(units > 0 for units in costs.values())
    rest = {op: units for op, units in costs.items() if op != "exp"}
    with pytest.raises(PlanError, match="nobody said what exp costs"):
        element_units(Call("exp", (Load("x", ()),)), rest)
    assert element_units(Call("exp", (Load("x", ()),)), costs) == costs["exp"]
