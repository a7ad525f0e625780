"""Stages: which reductions are states of a pass, and which are computed tile by tile inside it."""

from __future__ import annotations

import pytest
import torch

from tests.block.test_fuse import run_blocks
from tilefold.block.fuse import with_unit
from tilefold.block.group import Group
from tilefold.block.stages import plan_stages
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

#: A sum over a long axis for each of a few modes, which are summed after that (the gradient of a step size).
MODES = """
program modes()
  input a: f32[7, {modes}]
  input w: f32[7, {modes}]
  input x: f32[7, 1000]
  dim i = 7
  dim k = {modes}
  dim l = 1000
  s[i, k]: f32 = sum[l] {element}
  t[i]: f32 = sum[k] s[i, k] * a[i, k]
  return s, t
"""
WAVES = "x[i, l] * sin(a[i, k] * f32(l)) * cos(w[i, k] * f32(l))"


@pytest.mark.parametrize(
    ("modes", "element", "inner"),
    [(32, WAVES, False), (500, WAVES, True), (32, "x[k % 7, l] * x[i, l]", True)],
    ids=["few", "many", "a product of matrices"],
)
def test_a_few_sums_over_a_longer_axis_are_states(modes, element, inner):
    """As a tile of all of the axis with all of them they would fill the registers of many blocks."""
    g = Graph.of(parse(MODES.format(modes=modes, element=element)))
    plan = plan_stages(g, with_unit(Group(("s", "t"), ("i",))))
    assert plan.inner == ({"s"} if inner else frozenset())
    assert [x.reductions for x in plan.stages] == ([("t",)] if inner else [("s",), ("t",)])


def test_they_are_the_same_sums():
    p = parse(MODES.format(modes=32, element=WAVES))
    x = {i.name: torch.randn([int(e.value) for e in i.shape]) for i in p.inputs}
    want = interp.run(p, x, exact=True)
    fused = fuse(p)
    dims = {d for k in fused.kernels for d in k.block.sizes}
    found = run_blocks(fused, x, 0, dict.fromkeys(dims, 64), exact=True)
    assert len(fused.kernels) == 1
    for n in p.outputs:
        torch.testing.assert_close(found[n], want[n], rtol=1e-9, atol=1e-9)
