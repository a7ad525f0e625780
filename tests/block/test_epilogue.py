"""Kernels with epilogues: what may share one, what they cost, and what the laws make of whole programs."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.law_programs import inputs_of, random_program, same
from tilefold.block.epilogue.cost import LAUNCH, RIDGE, SHADOW, Cost, Target
from tilefold.block.epilogue.describe import described
from tilefold.block.epilogue.kernels import cut_into_kernels
from tilefold.block.epilogue.programs import block_programs, listing
from tilefold.block.epilogue.search import rewrite
from tilefold.block.interp import run as run_block
from tilefold.tensor.interp import run
from tilefold.tensor.laws.normal import normal
from tilefold.tensor.laws.terms import gemms
from tilefold.tensor.text import parse

NORM = """
program norm()
  input x: f32[64, 16]
  input z: f32[64, 64]
  input w: f32[16, 64]
  input g: f32[64]
  input u: f32[64, 32]
  dim i = 64
  dim k = 16
  dim j = 64
  dim l = 32
  h0[i, j]: f32 = sum[k] x[i, k] * w[k, j]
  h[i, j]: f32 = h0[i, j] + z[i, j]
  s[i]: f32 = sum[j] h[i, j] * h[i, j]
  r[i]: f32 = rsqrt(s[i] / 64.0 + 1.0)
  a[i, j]: f32 = h[i, j] * r[i] * g[j]
  y[i, l]: f32 = sum[j] a[i, j] * u[j, l]
  return y, h
"""
TARGET = Target(16, frozenset({"w", "g", "u"}))


def kernels(text: str, target: Target = TARGET):
    return cut_into_kernels(normal(parse(text)), target)


def members(found):
    return [set(k.members) for k in found.kernels]


def test_a_norm_without_laws_is_a_pass():
    found = kernels(NORM)
    assert members(found) == [{"h0", "h"}, {"s", "r", "a"}, {"y"}]
    assert [d.kind for d in described(found)] == ["product", "pass", "product"]


def test_cost_by_hand():
    cost = kernels(NORM).cost
    h, f32 = 64 * 64, 4
    beside_first = (64 * 16 + 16 * 64 + h + h) * f32  # x, w, z in, h out
    beside_second = (h + 64 * 32 + 64 * 32) * f32
    assert cost.passes == (h + 64 + h) * f32  # h and g in, a out
    assert cost.beside == beside_first + beside_second
    assert cost.flops == 2 * 64 * 64 * 16 + 2 * 64 * 64 * 32
    assert cost.total == cost.passes + SHADOW * cost.beside + cost.flops / RIDGE + 3 * LAUNCH
    assert (cost + Cost(1.0, 2.0, 3.0, 4)).kernels == 7


def test_laws_take_the_pass_away():
    p = parse(NORM)
    found = rewrite(p, TARGET)
    assert found.laws == ("row scale", "column scale", "partials")
    assert (
        found.result.cost.total < found.before.cost.total and found.result.cost.passes < 0.1 * found.before.cost.passes
    )
    assert [d.paper for d in described(found.result) if d.kind == "product"] == [4, 5]
    same(p, found.result.program)


def test_the_scale_of_columns_stays_in_the_epilogue_where_weights_change():
    found = rewrite(parse(NORM), Target(16, TARGET.parameters, training=True))
    assert found.laws == ("row scale", "partials")
    assert "g" in described(found.result)[0].epilogue.columns


def test_without_laws_nothing_fires():
    found = rewrite(parse(NORM), TARGET, ())
    assert found.laws == ("partials",)
    assert [d.kind for d in described(found.result)].count("pass") == 1


def test_early_results_do_not_wait_for_late_inputs():
    text = NORM.replace("  dim i", "  input dy: f32[64, 32]\n  dim i").replace(
        "  return y, h", "  t[i]: f32 = sum[l] y[i, l] * dy[i, l]\n  return y, h, t"
    )
    together = kernels(text, Target(64, TARGET.parameters))
    assert any({"y", "t"} <= m for m in members(together))
    apart = kernels(text, Target(64, TARGET.parameters, late=frozenset({"dy"})))
    assert not any({"y", "t"} <= m for m in members(apart))
    assert [d.backward for d in described(apart)].count(True) == 1


def test_a_row_does_not_fit_a_tile():
    whole = kernels(NORM, Target(64))
    assert any({"h0", "h", "s"} <= m for m in members(whole))
    assert not any({"h0", "s"} <= m for m in members(kernels(NORM, Target(16))))


@pytest.mark.parametrize("seed", range(4))
def test_rewritten_programs_and_their_blocks_keep_the_meaning(seed):
    p = random_program(seed)
    found = rewrite(p, Target(4, frozenset({"w", "u", "v", "g", "b"}), training=bool(seed % 2)))
    assert found.result.cost.total < found.before.cost.total
    products = gemms(found.result.program)
    for cut in found.result.kernels:
        assert sum(m in products for m in cut.members) <= 1
        if cut.product is not None:
            assert not {o.tensor for o in products[cut.product].operands} & set(cut.members)
    given = inputs_of(p)
    wanted = run(p, given, exact=True)
    tensors = dict(given)
    for k in block_programs(found.result).kernels:
        sizes = dict.fromkeys(k.block.sizes, 3)
        tensors.update(run_block(k.block, tensors, {}, block_sizes=sizes, exact=True))
    for o in p.outputs:
        torch.testing.assert_close(tensors[o].flatten(), wanted[o].flatten(), rtol=1e-9, atol=1e-9)


def test_the_listing_shows_laws_and_loops():
    text = listing(rewrite(parse(NORM), TARGET))
    assert "1. row scale: out of a in y" in text and "(diag(r) X) W = diag(r) (X W)" in text
    assert "kernel 4, residual, partial RMSNorm, weight scaling" in text
    after = text.split("after:")[1]
    assert after.count("forall i\n") == 3 and "store s_part[i, jh] over (i, jh)" in after
