"""Byte counts against hand arithmetic."""

from __future__ import annotations

import pytest

from tests.explanation.fixtures import only
from tilefold.explanation.traffic import Sizes, Traffic, human, operators
from tilefold.tensor.ir import Compute
from tilefold.tensor.text import parse

N = 16


def row(t: Traffic, name: str) -> tuple[int, int]:
    (found,) = [r for r in t.rows if r.name == name]
    return found.before, found.after


def test_softmax_by_hand():
    t = only("softmax", N).traffic  # x[5, n], f32; four statements, each on its own before
    x, vector = 5 * N * 4, 5 * 4
    assert row(t, "x") == (2 * x, x)  # max and exp read it; one kernel reads it once
    assert row(t, "m") == (2 * vector, 0)  # written by max, read by exp
    assert row(t, "e") == (3 * x, 0)  # written, read by sum and by the division
    assert row(t, "t") == (2 * vector, 0)
    assert row(t, "y") == (x, x)
    assert (t.before, t.after) == (6 * x + 4 * vector, 2 * x)
    assert t.change == "68% less"


def test_attention_by_hand():
    t = only("attention", N).traffic
    qkv, scores = 2 * 3 * N * 8 * 4, 2 * 3 * N * N * 4
    assert row(t, "q") == row(t, "k") == row(t, "v") == (qkv, qkv)
    assert row(t, "s") == (2 * scores, 0)
    assert row(t, "c") == (3 * scores, 0)
    assert t.after == 4 * qkv


def test_two_kernels_pass_a_tensor_through_memory():
    r = only("two", N)
    assert len(r.kernels) == 2
    assert row(r.traffic, "t") == (2 * 64 * 4, 2 * 64 * 4)
    assert sum(k.bytes for k in r.kernels) == r.traffic.after


def test_a_gather_is_charged_for_what_it_touches():
    p = parse("""
program lookup(n)
  input table: f32[1000, 8]
  input at: i64[n]
  dim i = n
  dim d = 8
  y[i, d]: f32 = table[at[i], d] + 1.0
  return y
""")
    sizes = Sizes(p, {"n": 3})
    found = [ld for ld in p.body[0].body.args if hasattr(ld, "tensor")]  # type: ignore[attr-defined]
    assert sizes.touched("table", found) == 3 * 8 * 4
    assert Sizes(p, {"n": 5000}).touched("table", found) == sizes.nbytes("table") == 1000 * 8 * 4


def test_sizes_need_every_symbol():
    p = parse("program f(n)\n input x: f32[n]\n dim i = n\n y[i]: f32 = x[i] + 1.0\n return y")
    with pytest.raises(KeyError, match="n"):
        Sizes(p, {})


def test_statements_of_one_aten_call_are_one_operator_and_others_are_not():
    p = parse("""
program f(n)
  input x: f32[n]
  dim i = n
  add[i]: f32 = x[i] + 1.0
  add_1[i]: f32 = add[i] + 1.0
  softmax_max[]: f32 = max[i] add_1[i]
  softmax_exp[i]: f32 = exp(add_1[i] - softmax_max)
  return softmax_exp
""")
    names = ["aten.add.Tensor", "aten.add.Tensor", "aten._softmax.default", "aten._softmax.default"]
    body = tuple(_with_origin(c, o) for c, o in zip(p.body, names, strict=True))
    ops = operators(type(p)(p.name, p.inputs, p.sizes, body, p.outputs, p.syms))
    assert [(o.title, [c.name for c in o.members]) for o in ops] == [
        ("add", ["add"]), ("add", ["add_1"]), ("softmax", ["softmax_max", "softmax_exp"]),
    ]  # fmt: skip
    assert len(operators(p)) == 4


def _with_origin(c: Compute, origin: str) -> Compute:
    return Compute(c.name, c.dims, c.dtype, c.body, c.reducer, c.rdims, c.index_name, c.loc, origin)


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123456, "123 kB"), (4.2e9, "4.2 GB")]
)
def test_bytes_for_people(n, text):
    assert human(n) == text
