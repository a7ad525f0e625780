"""Sums that were split for others, which their kernel does not have, are one again."""

from __future__ import annotations

import pytest
import torch

from tilefold.block.group import ANY, Group
from tilefold.plan.whole_sums import whole_sums
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

SPLIT = """
program split()
  input x: bf16[3, 5, 4]
  dim i = 3
  dim k = 5
  dim j = 4
  z[i, k, j]: f32 = x[i, k, j] * 2.0
  y_in[j, i]: f32 = sum[k] z[i, k, j]
  y[j]: bf16 = sum[i] {of}
  return y{more}
"""


@pytest.mark.parametrize("with_map", [True, False])
def test_a_pair_is_one_sum(with_map):
    p = parse(SPLIT.format(of="y_in[j, i]", more=""))
    members = ("z", "y_in", "y") if with_map else ("y_in", "y")
    groups = [Group(members, ("j",))] if with_map else [Group(("z",), ("i", "k", "j")), Group(members, ("j",))]
    q, made = whole_sums(p, groups, ANY)
    whole = next(c for c in q.body if c.name == "y")
    assert set(whole.rdims) == {"i", "k"} and whole.dims == ("j",) and "y_in" not in {c.name for c in q.body}
    assert made[-1].members == tuple(m for m in members if m != "y_in")
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(run(p, {"x": x})["y"], run(q, {"x": x})["y"])


@pytest.mark.parametrize(("of", "more"), [("exp(y_in[j, i])", ""), ("y_in[j, i]", ", y_in")])
def test_others_stay(of, more):
    p = parse(SPLIT.format(of=of, more=more))
    groups = [Group(("z", "y_in", "y"), ("j",))]
    assert whole_sums(p, groups, ANY) == (p, groups)


def test_what_has_a_third_reduction_stays():
    text = SPLIT.format(of="y_in[j, i]", more=", t").replace("  return", "  t[j]: f32 = max[i] x[i, 0, j]\n  return")
    p = parse(text)
    groups = [Group(("z", "y_in", "y", "t"), ("j",))]
    assert whole_sums(p, groups, ANY) == (p, groups)


@pytest.mark.parametrize("scaled", ["y_in[j, i] / size(k)", "y_in[j, i] * 0.25", "m[j, i]"])
def test_means_that_are_added_up_are_one_sum(scaled):
    text = SPLIT.format(of=scaled, more="")
    if "m" in scaled:
        text = text.replace("  y[j]", "  m[j, i]: f32 = y_in[j, i] / size(k)\n  y[j]")
    p = parse(text)
    q, (made,) = whole_sums(p, [Group(tuple(c.name for c in p.body), ("j",))], ANY)
    sums = [c for c in q.body if c.reducer is not None]
    assert len(sums) == 1 and set(sums[0].rdims) == {"i", "k"} and sums[0].name in made.members and "y" in made.members
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(run(p, {"x": x})["y"], run(q, {"x": x})["y"])
