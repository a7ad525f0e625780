"""What of 16 bits is read rounded: results that leave beside a sum of them, also where they are put into readers."""

from __future__ import annotations

import pytest

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, walk
from tilefold.tensor.analysis import Graph
from tilefold.tensor.as_stored import as_stored
from tilefold.tensor.inline import inline
from tilefold.tensor.text import parse

BIASED = """program biased()
  input x: bf16[6, 8]
  input b: bf16[8]
  dim i = 6
  dim j = 8
  y[i, j]: {dtype} = x[i, j] + b[j]
  z[i, j]: {dtype} = maximum(y[i, j], 0)
  out[i, j]: {dtype} = {kept}
  total[j]: {sum} = sum[i] z[i, j]
  return out, total
"""


def program(dtype="bf16", kept="y[i, j]", sum="f32"):
    return parse(BIASED.format(dtype=dtype, kept=kept, sum=sum))


@pytest.mark.parametrize(
    ("how", "rounds"),
    [
        ({}, True),
        ({"dtype": "f32"}, False),
        ({"kept": "y[i, j] * 2"}, False),  # something else leaves
        ({"sum": "bf16"}, False),  # has the error itself
    ],
)
def test_a_bias_that_is_kept_and_summed_is_rounded_for_the_sum(how, rounds):
    p = program(**how)
    g = Graph.of(p)
    assert as_stored(g, g.by_name["y"]) is rounds
    made = {c.name: c for c in inline(p).body}
    bodies = [made[n].body for n in ("z", "total") if n in made]
    found = any(isinstance(e, Cast) and e.dtype is DType.BF16 for body in bodies for e in walk(body))
    assert "y" not in made and found is rounds
