"""Who reads whom in a program: found once."""

from __future__ import annotations

from dataclasses import replace

from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

CHAIN = parse("""program p()
  input x: f32[4]
  dim i = 4
  a[i]: f32 = exp(x[i])
  b[i]: f32 = a[i] + x[i]
  c[i]: f32 = a[i] * b[i]
  d[i]: f32 = exp(x[i])
  return c, d
""")


def test_a_program_has_one_graph() -> None:
    assert Graph.of(CHAIN) is Graph.of(CHAIN)
    other = replace(CHAIN, body=CHAIN.body[:2], outputs=("b",))
    assert Graph.of(other).program is other
    assert Graph.of(other).consumers == {"a": ("b",), "b": ()}


def test_all_that_a_statement_depends_on_and_all_that_depends_on_it() -> None:
    g = Graph.of(CHAIN)
    assert [g.above(n) for n in "abcd"] == [frozenset(), {"a"}, {"a", "b"}, frozenset()]
    assert [g.below(n) for n in "abcd"] == [{"b", "c"}, {"c"}, frozenset(), frozenset()]
