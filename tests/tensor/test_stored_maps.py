"""What reads a map as a result has it reads the result."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.stored_maps import read_as_stored
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: bf16[2, 6, 4]
  input b: bf16[4]
  dim n = 2
  dim y = 6
  dim v = 5
  dim c = 4
  m[n, y, c]: f32 = x[n, y, c] * 3.0
  s[]: f32 = sum[n, v, c] {read} * 2.0
  r[n, c, y]: bf16 = {stored}
  return r, s
"""
STORED = "bf16(m[n, y, c] + b[c])"
READ = "bf16(m[n, v, c] + b[c])"


@pytest.mark.parametrize(
    "stored, read, changes",
    [
        (STORED, READ, True),
        ("m[n, y, c] + b[c]", "(m[n, v, c] + b[c])", False),  # a sum has more digits than are stored
        (STORED, "(m[n, v, c] + b[c])", False),
        (STORED, "bf16(m[n, v, c] - b[c])", False),
        (STORED, "m[n, v, c] * bf16(m[n, v, c] + b[c])", False),
        ("bf16(m[n, 5 - y, c] + b[c])", "bf16(m[n, 5 - v, c] + b[c])", False),  # other elements
    ],
)
def test_a_part_of_a_result_is_read_where_its_values_are_alone(stored, read, changes):
    p = parse(TEXT.format(stored=stored, read=read))
    q = read_as_stored(p, ["m"])
    assert ([c.name for c in q.body] == ["r", "s"]) is changes and (q is p) is not changes
    given = {"x": torch.randn(2, 6, 4).bfloat16(), "b": torch.randn(4).bfloat16()}
    for name, found in run(q, given).items():
        torch.testing.assert_close(found, run(p, given)[name])
