"""Values that repeat another one are replaced by it, in each loop that computes them."""

from __future__ import annotations

from tilefold.block.text import parse
from tilefold.block.tidy import tidy
from tilefold.block.verify import verify

TWICE = """
block twice()
  input x: f32[8, 32]
  dim i = 8
  dim j = 32
  result y[i, j]: f32
  forall i
    init s[i]: f32 = 0.0
    for j
      let e[i, j]: f32 = exp(x[i, j])
      accum s = sum.f32[j] e[i, j] * e[i, j]
    for j
      let t[i, j]: f32 = exp(x[i, j])
      let e[i, j]: f32 = {again}
      store y[i, j] over (i, j) = e[i, j] * s[i] + t[i, j]
  return y
"""


def test_a_value_that_one_loop_computes_and_another_copies_stays_what_it_is() -> None:
    verify(tidy(parse(TWICE.format(again="t[i, j]"))))
    verify(tidy(parse(TWICE.format(again="exp(x[i, j])"))))
