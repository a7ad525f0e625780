"""Maps put in where they are read."""

from __future__ import annotations

from tilefold.block.stages import inline_maps
from tilefold.tensor.analysis import Graph, expr_flops
from tilefold.tensor.text import parse

STEPS = 64


def test_a_state_that_is_read_twice_by_the_next_is_one_expression():
    """An unrolled recurrence: by places where it is read, the first state would be 2^63 expressions."""
    states = "\n".join(f"  s{n}[i]: f32 = maximum(s{n - 1}[i], k[i]) + s{n - 1}[i]" for n in range(1, STEPS))
    p = parse(
        f"program f()\n  input k: f32[8]\n  dim i = 8\n  s0[i]: f32 = k[i] + 1.0\n{states}\n  return s{STEPS - 1}\n"
    )
    body = inline_maps(Graph.of(p), p.body[-1].body, lambda _: True)
    assert expr_flops(body) == 3 * 2 ** (STEPS - 1) - 2
