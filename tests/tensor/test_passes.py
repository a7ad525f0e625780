"""Each pass keeps the meaning of a program (interpreted before and after), does its job, and leaves
alone what its side condition excludes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.tensor.constant_parts import constant_parts
from tilefold.tensor.inline import absorb_copies, inline, round_where_stored, too_long
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.passes import normalise
from tilefold.tensor.repeated import drop_repeated
from tilefold.tensor.rewrite import drop_dead, read_as_results
from tilefold.tensor.split_dims import split_dims
from tilefold.tensor.text import parse, show
from tilefold.tensor.unify import canonical_names, unify

SYMS = {"n": 6, "m": 4}


def inputs_of(p: Program) -> dict[str, torch.Tensor]:
    out = {}
    for i in p.inputs:
        shape = [int(e.value) if isinstance(e, Const) else SYMS[e.name] for e in i.shape]
        g = torch.Generator().manual_seed(len(i.name))
        values = torch.randn(shape, generator=g)
        out[i.name] = (values * 10).to(i.dtype.torch_dtype) if i.dtype is not DType.F32 else values
    return out


def results(p: Program, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    r = run(p, tensors, syms=SYMS)
    return [r[o] for o in p.outputs]


def unchanged(p: Program, q: Program, layouts=None) -> Program:
    """q computes what p does; its inputs are p's with axes cut."""
    given = inputs_of(p)
    shapes = {i.name: i.shape for i in q.inputs}
    cut = {
        name: x.reshape([int(e.value) if isinstance(e, Const) else SYMS[e.name] for e in shapes[name]])
        for name, x in given.items()
        if name in shapes
    }
    for a, b in zip(results(p, given), results(q, cut), strict=True):
        torch.testing.assert_close(a.flatten(), b.flatten(), rtol=1e-5, atol=1e-5)
    assert parse(show(q)) == q
    return q


SOFTMAX = """
program softmax(n)
  input x: f32[4, n]
  dim a = 4
  dim b = n
  dim c = 4
  dim d = n
  dim e = 4
  dim f = n
  m[a]: f32 = max[b] x[a, b]
  e1[c, d]: f32 = exp(x[c, d] - m[c])
  t[e]: f32 = sum[f] e1[e, f]
  dim g = 4
  dim h = n
  y[g, h]: f32 = e1[g, h] / t[g]
  return y
"""


def test_unify_links_readers_and_sharers():
    p = parse(SOFTMAX)
    q = unchanged(p, unify(p))
    assert len(q.sizes) == 2
    assert {d for c in q.body for d in (*c.dims, *c.rdims)} == set(q.sizes)


def test_unify_keeps_dims_of_one_statement_apart():
    p = parse("""
program gram()
  input x: f32[5, 3]
  dim i = 5
  dim j = 5
  dim d = 3
  s[i, j]: f32 = sum[d] x[i, d] * x[j, d]
  dim k = 5
  r[k]: f32 = s[k, k]
  return r
""")
    q = unchanged(p, unify(p))
    assert len(q.body[0].dims) == len(set(q.body[0].dims)) == 2


def test_unify_needs_equal_sizes():
    p = parse("""
program f(n, m)
  input x: f32[n]
  dim i = n
  dim j = m
  a[i]: f32 = x[i] * 2.0
  b[j]: f32 = a[j]
  return b
""")
    assert len(unify(p).sizes) == 2


def test_unify_prefers_the_nearest_link():
    p = parse("""
program residual()
  input x: f32[4, 3]
  input w: f32[3, 3]
  dim i = 4
  dim c = 3
  dim n = 3
  y[i, n]: f32 = sum[c] x[i, c] * w[n, c]
  dim p = 4
  dim q = 3
  r[p, q]: f32 = x[p, q] + y[p, q]
  return r
""")
    q = unchanged(p, unify(p))
    assert q.body[1].dims == q.body[0].dims


def test_split_makes_heads_plain():
    p = parse("""
program heads(n)
  input x: f32[n, 5]
  input w: f32[12, 5]
  dim i = n
  dim o = 12
  dim c = 5
  y[i, o]: f32 = sum[c] x[i, c] * w[o, c]
  dim h = 3
  dim j = n
  dim d = 4
  z[h, j, d]: f32 = y[j, h * 4 + d] * 2.0
  return z
""")
    q, layouts = split_dims(p)
    unchanged(p, q)
    assert len(q.body[0].dims) == 3 and "//" not in show(q) and "*4" not in show(q).replace(" ", "")
    assert [[int(e.value) for e in group] for group in layouts["w"]] == [[3, 4], [5]]


def test_split_of_a_reduced_dim():
    p = parse("""
program out(n)
  input a: f32[3, n, 4]
  input w: f32[5, 12]
  dim i = n
  dim o = 5
  dim c = 12
  y[i, o]: f32 = sum[c] a[c // 4, i, c % 4] * w[o, c]
  return y
""")
    q = unchanged(p, split_dims(p)[0])
    assert len(q.body[0].rdims) == 2 and "//" not in show(q) and "%" not in show(q)


def test_split_of_symbolic_products():
    p = parse("""
program flat(n, m)
  input a: f32[n, m]
  dim i = n * m
  s[i]: f32 = a[i // m, i % m] * 2.0
  dim k = n
  dim l = m
  r[k]: f32 = sum[l] s[k * m + l]
  return r
""")
    q = unchanged(p, split_dims(p)[0])
    assert "//" not in show(q) and "%" not in show(q)


def test_parts_of_a_projection_are_split_only_if_all_agree():
    text = """
program parts()
  input x: f32[6]
  dim o = 6
  y[o]: f32 = x[o] * 2.0
  dim i = 3
  z[i]: f32 = y[i] + y[i + 3]{extra}
  return z
"""
    assert len(split_dims(parse(text.format(extra="")))[0].body[0].dims) == 2
    p = parse(text.format(extra=" * y[i + 1]"))
    q = unchanged(p, split_dims(p)[0])
    assert len(q.body[0].dims) == 1


def test_a_shared_head_alone_does_not_split():
    p = parse("""
program gqa()
  input q: f32[8, 5]
  input k: f32[4, 5]
  dim h = 8
  dim d = 5
  s[h]: f32 = sum[d] q[h, d] * k[h // 2, d]
  return s
""")
    assert split_dims(p)[0].body[0].dims == p.body[0].dims


def test_the_slot_dim_of_topk_is_not_split():
    p = parse("""
program top()
  input x: f32[3, 9]
  dim i = 3
  dim j = 9
  dim r = 4
  v[i, r]: f32, at[i, r]: i64 = topk[j; r] x[i, j]
  dim a = 3
  dim b = 2
  dim c = 2
  y[a, b, c]: f32 = v[a, b * 2 + c]
  return y
""")
    q = unchanged(p, split_dims(p)[0])
    assert len(q.body[0].dims) == 2


def test_inline_fuses_single_uses_and_keeps_shared_exponentials():
    p = unify(parse(SOFTMAX))
    assert [c.name for c in unchanged(p, inline(p)).body] == ["m", "e1", "t", "y"]
    chain = parse("""
program chain(n)
  input x: f32[n]
  dim i = n
  a[i]: f32 = exp(x[i])
  b[i]: f32 = tanh(a[i] + 1.0)
  c[i]: f32 = b[i] * 2.0
  return c
""")
    assert len(unchanged(chain, inline(chain)).body) == 1


@pytest.mark.parametrize(("maps", "kept"), [(30, 1), (300, 10)])
@pytest.mark.parametrize("step", ["tanh({y}) * 0.9", "where({x} < {y}, {y}, 0.5) + {x}"])
def test_bodies_are_no_deeper_than_functions_that_call_themselves_can_go(step, maps, kept):
    """A function of a thousand elementwise operations is several statements."""
    lines = [f"  y{n + 1}[i]: f32 = {step.format(y=f'y{n}[i]', x='x[i]')}\n" for n in range(maps)]
    head = "program p()\n  input x: f32[5]\n  dim i = 5\n  y0[i]: f32 = x[i] + 1.0\n"
    p = parse(f"{head}{''.join(lines)}  return y{maps}\n")
    q = unchanged(p, inline(p))
    assert len(q.body) <= kept or "where" in step
    assert not any(too_long(c.body) for c in q.body)


def test_inline_does_not_repeat_work_in_a_product():
    p = parse("""
program gelu_mm(n)
  input x: f32[n, 4]
  input w: f32[4, 3]
  dim i = n
  dim c = 4
  dim o = 3
  g[i, c]: f32 = erf(x[i, c]) * x[i, c]
  y[i, o]: f32 = sum[c] g[i, c] * w[c, o]
  return y
""")
    assert len(unchanged(p, inline(p)).body) == 2
    bias = parse(show(p).replace("erf(x[i, c]) * x[i, c]", "x[i, c] + 0.5"))
    assert len(unchanged(bias, inline(bias)).body) == 2
    copy = parse(show(p).replace("erf(x[i, c]) * x[i, c]", "x[i, c]"))
    assert len(unchanged(copy, inline(copy)).body) == 1


def test_inline_keeps_rounding_that_is_more_than_a_hint():
    text = """
program q(n)
  input x: f32[n]
  dim i = n
  a[i]: {dtype} = x[i] * 3.0
  b[i]: f32 = a[i] + 0.25
  return b
"""
    for dtype, kept in (("e4m3", True), ("i8", True), ("bf16", False), ("f32", False)):
        p = parse(text.format(dtype=dtype))
        q = inline(p)
        assert len(q.body) == 1 and (f"{dtype}(" in show(q)) is kept
        if kept or dtype == "f32":
            unchanged(p, q)


ROUNDED = """
program rounded()
  input x: f32[6, 4]
  input w: bf16[4, 4]
  dim i = 6
  dim j = 4
  dim k = 4
  y[i, j]: f32 = exp(x[i, j]) + {first}
  z[i, k]: f32 = sum[j] bf16(y[i, j]) * w[j, k]
  u[i, j]: f32 = {second}
  return z, u{more}
"""


def test_what_every_reader_rounds_is_rounded_once():
    p = parse(ROUNDED.format(first="1.0", second="bf16(y[i, j]) + 1.0", more=""))
    q = unchanged(p, round_where_stored(p))
    assert q.body[0].dtype is DType.BF16 and "bf16(" not in show(q)


@pytest.mark.parametrize(
    ("second", "more"), [("y[i, j] + 1.0", ""), ("f16(y[i, j]) + 1.0", ""), ("bf16(y[i, j]) + 1.0", ", y")]
)
def test_what_a_reader_has_wide_stays_wide(second, more):
    p = parse(ROUNDED.format(first="1.0", second=second, more=more))
    assert round_where_stored(p) == p


def test_one_element_at_a_label_is_computed_where_it_is_read():
    text = """
program loss()
  input x: f32[6, 4]
  input t: i64[6]
  dim i = 6
  dim j = 4
  top[i]: f32 = max[j] x[i, j]
  below[i, j]: f32 = x[i, j] * x[i, j] * x[i, j] - top[i]
  total[i]: f32 = sum[j] exp(below[i, j])
  out[i]: f32 = log(total[i]) - below[i, {at}]
  return out
"""
    p = parse(text.format(at="t[i]"))
    (out,) = (c for c in inline(p).body if c.name == "out")
    assert "below" not in show(replace(p, body=(out,)))
    x = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), "t": torch.tensor([0, 1, 2, 3, 0, 1])}
    torch.testing.assert_close(run(inline(p), x)["out"], run(p, x)["out"])
    everywhere = parse(text.replace("out[i]: f32", "out[i, j]: f32").format(at="j"))
    assert "below" in show(inline(everywhere))


READ_TWICE = """
program read_twice()
  input x: f32[6, 8]
  input y: f32[6, 8]
  input b: f32[8]
  input s: f32[6]
  dim i = 6
  dim j = 8
  h[i, j]: f32 = {map}
  t[i]: f32 = sum[j] exp(h[i, j])
  u[j]: f32 = max[i] tanh(h[i, j])
  return t, u
"""


@pytest.mark.parametrize(
    ("map", "inlined"),
    [
        ("x[i, j] + b[j]", True),
        ("(x[i, j] + b[j]) * s[i]", True),
        ("exp(x[i, j]) + b[j]", False),
        ("x[i, j] + y[i, j]", False),  # two tensors as large
    ],
)
def test_a_bias_is_added_by_each_reader_rather_than_stored(map, inlined):
    p = parse(READ_TWICE.format(map=map))
    assert ("h[" not in show(unchanged(p, inline(p)))) is inlined


POOLED = """
program pooled()
  input x: f32[3, {n}, {n}]
  dim c = 3
  dim i = {n}
  dim j = {n}
  dim k = 4
  dim l = 4
  y[c, i, j]: f32 = tanh(x[c, i, j]) * exp(x[c, i, j]) / (1.0 + exp(x[c, i, j]))
  z[c, k, l]: f32 = maximum(maximum(y[c, {s} * k, {s} * l], y[c, {s} * k, {s} * l + 1]), maximum(y[c, {s} * k + 1, {s} * l], y[c, {s} * k + 1, {s} * l + 1]))
  return z
"""  # noqa: E501


@pytest.mark.parametrize(("n", "stride", "inlined"), [(8, 2, True), (9, 2, True), (5, 1, False)])
def test_what_windows_read_once_is_computed_in_them(n, stride, inlined):
    p = parse(POOLED.format(n=n, s=stride))
    assert ("y[" not in show(unchanged(p, inline(p)))) is inlined


def test_outputs_are_not_inlined_away():
    p = parse("""
program two(n)
  input x: f32[n]
  dim i = n
  a[i]: f32 = exp(x[i])
  b[i]: f32 = a[i] + 1.0
  return a, b
""")
    assert [c.name for c in unchanged(p, inline(p)).body] == ["a", "b"]


def test_a_permuted_copy_is_stored_directly():
    p = parse("""
program t(n)
  input x: f32[n, 4, 5]
  dim i = n
  dim j = 4
  dim k = 5
  s[i, j]: f32 = sum[k] x[i, j, k]
  y[j, i]: f32 = s[i, j]
  return y
""")
    q = unchanged(p, absorb_copies(p))
    (c,) = q.body
    assert (c.name, c.dims, c.reducer) == ("y", ("j", "i"), "sum")


@pytest.mark.parametrize(
    "copy, why",
    [
        ("y[j, i]: f32 = s[i, 0]", "not every element"),
        ("y[i, few]: f32 = s[i, few]", "a slice"),
        ("y[i, j]: bf16 = s[i, j] + 0.0", "not a copy"),
    ],
)
def test_other_readers_are_not_copies(copy, why):
    p = parse(f"""
program t(n)
  input x: f32[n, 4, 5]
  dim i = n
  dim j = 4
  dim k = 5
  dim few = 3
  s[i, j]: f32 = sum[k] x[i, j, k]
  {copy}
  return y
""")
    assert len(absorb_copies(p).body) == 2, why


def test_two_copies_of_one_result_keep_one_statement_each():
    p = parse("""
program t(n)
  input x: f32[n]
  dim i = n
  s[i]: f32 = exp(x[i])
  a[i]: f32 = s[i]
  b[i]: f32 = s[i]
  return a, b
""")
    q = unchanged(p, absorb_copies(p))
    assert [c.name for c in q.body] == ["a", "b"]


def test_narrow_picks_the_part_of_a_concatenation():
    p = parse("""
program cat()
  input a: f32[4]
  input b: f32[4]
  dim t = 2
  dim i = 4
  y[t, i]: f32 = where(t * 4 + i < 4, a[i + 4 * t], b[i + 4 * t - 4])
  return y
""")
    q = unchanged(p, narrow(p))
    assert "where(t < 1, a[i], b[i])" in show(q)


def test_narrow_decides_what_is_certain_and_nothing_else():
    text = """
program f()
  input a: f32[4]
  dim i = 4
  y[i]: f32 = where(i < {bound}, a[i], -1.0)
  return y
"""
    for bound, left in ((4, "= a[i]"), (9, "= a[i]"), (0, "= -1.0"), (2, "where(i < 2")):
        p = parse(text.format(bound=bound))
        assert left in show(unchanged(p, narrow(p)))


def test_narrow_compares_numbers():
    """A comparison that is left of a mask of documents where there is one alone: the others' bounds count then."""
    text = """
program f()
  input a: f32[4]
  dim i = 4
  y[i]: f32 = where({condition} & (i < 2), a[i], -1.0)
  return y
"""
    for condition, left in (("(0 == 0)", "where(i < 2, a[i], -1.0)"), ("(0 != 0)", "= -1.0"), ("(1 == 0)", "= -1.0")):
        p = parse(text.format(condition=condition))
        assert left in show(unchanged(p, narrow(p)))


def test_narrow_uses_both_bounds_of_a_branch():
    p = parse("""
program rotate_half()
  input x: f32[3, 8]
  dim h = 3
  dim d = 8
  y[h, d]: f32 = where(d < 4, -x[h + (d + 4) // 8, (d + 4) % 8], x[h + (d + 4) // 8 - 1, (d + 4) % 8])
  return y
""")
    assert "where(d < 4, -x[h, d + 4], x[h, d - 4])" in show(unchanged(p, narrow(p)))


def test_narrow_folds_conditions_that_always_or_never_hold():
    text = """
program f(n)
  input a: f32[n, n]
  dim i = n
  dim j = n
  y[i, j]: f32 = where({condition}, a[i, j], -1.0)
  return y
"""
    decided = {"True & (i >= 0)": True, "(i < 0) | (j > n)": False, "~(i <= n - 1)": False, "i - j < n": True}
    for condition, holds in decided.items():
        p = parse(text.format(condition=condition))
        assert ("= a[i, j]" if holds else "= -1.0") in show(unchanged(p, narrow(p))), condition
    for condition in ("i < j", "i - j < n - 1", "i >= 1", "a[i, j] > 0"):
        p = parse(text.format(condition=condition))
        assert "where(" in show(unchanged(p, narrow(p))), condition


def test_dead_and_repeated_statements_go():
    p = parse("""
program r(n)
  input x: f32[n, 3]
  dim i = n
  dim j = 3
  a[i]: f32 = sum[j] x[i, j]
  dead[i]: f32 = max[j] x[i, j]
  b[i]: f32 = sum[j] x[i, j]
  c[i]: f32 = min[j] x[i, j]
  y[i]: f32 = a[i] * b[i] + c[i]
  return y
""")
    q = unchanged(p, drop_dead(drop_repeated(p)))
    assert [c.name for c in q.body] == ["a", "c", "y"]


RESULTS = """
program heads(n)
  input x: f32[n, 3, 2, 5]
  input b: f32[3, 2, 5]
  input w: f32[3, 2, 5, 4]
  dim i = n
  dim q = 3
  dim h = 2
  dim c = 5
  dim o = 4
  a[i, q, h, c]: f32 = x[i, q, h, c] + b[q, h, c]
  y[i, o]: f32 = sum[q, h, c] a[i, q, h, c] * w[q, h, c, o]
  kept[{kept}]: f32 = x[i, q, h, c] + b[q, h, c]
  return y, kept
"""


def test_what_a_result_has_in_another_order_is_read_there():
    p = parse(RESULTS.format(kept="q, i, h, c"))
    q = unchanged(p, read_as_results(p))
    assert [c.name for c in q.body] == ["kept", "y"]
    turned = parse(RESULTS.format(kept="q, c, h, i"))  # other neighbours
    assert read_as_results(turned) is turned


def test_a_product_is_the_same_by_other_names():
    """a b and its transpose, which unifying gives other dims; not one of other extents, nor a sum of rows."""
    p = parse("""
program r(n)
  input a: f32[4, 4]
  input b: f32[4, 4]
  dim i = 4
  dim j = 4
  dim k = 4
  dim few = 3
  s[i, j]: f32 = sum[k] a[i, k] * b[k, j]
  t[j, i]: f32 = sum[k] a[j, k] * b[k, i]
  u[few, i]: f32 = sum[k] a[few, k] * b[k, i]
  v[i]: f32 = sum[j] a[i, j]
  w[j]: f32 = sum[i] a[j, i]
  y[i, j]: f32 = s[i, j] + t[j, i]
  z[few, i]: f32 = u[few, i] + v[i] + w[i]
  return y, z
""")
    q = unchanged(p, drop_dead(drop_repeated(p)))
    assert [c.name for c in q.body] == ["s", "u", "v", "w", "y", "z"]


@pytest.mark.parametrize("folded", [False, True])
def test_a_product_is_read_across(folded):
    """Factors commute, so that a product has a transpose; a reduction has its own in its order."""
    p = parse(f"""
program r(n)
  input a: f32[n, 4]
  input b: f32[n, 4]
  dim i = n
  dim j = n
  dim k = 4
  s[i, j]: f32 = sum[k] a[i, k] * b[j, k]
  t[i, j]: f32 = sum[k] b[i, k] * a[j, k]
  y[i, j]: f32 = s[i, j] + 2.0 * t[i, j]
  m[i]: f32 = {"max[j] exp(t[i, j])" if folded else "y[i, 0]"}
  return y, m
""")
    q = unchanged(p, drop_dead(drop_repeated(p)))
    assert [c.name for c in q.body] == ["s", *["t"] * folded, "y", "m"]
    assert ("s[j, i]" in show(q)) != folded


def test_names_avoid_tensors_and_symbols():
    p = parse("""
program t(j)
  input i: f32[j]
  dim dim_one = j
  y[dim_one]: f32 = i[dim_one]
  return y
""")
    assert canonical_names(p).body[0].dims == ("k",)


def test_normalise_is_stable():
    p = parse(SOFTMAX)
    once, _ = normalise(p)
    twice, _ = normalise(once)
    assert once == twice
    unchanged(p, once)


SPREAD = """
program spread()
  input x: f32[5, 7]
  input y: f32[5, 7]
  input a: bool[7]
  input b: f32[5, 7]
  dim i = 5
  dim j = 7
  m[i, j]: bool = {mask}
  u[i, j]: f32 = where(m[i, j], x[i, j], 0.0)
  v[i, j]: f32 = where(m[i, j], y[i, j], 1.0)
  return u, v
"""


@pytest.mark.parametrize(
    ("mask", "inlined"),
    [
        ("(j <= i) & a[j]", True),
        ("(j <= i) & (b[i, j] > 0.5)", False),
        ("(exp(b[0, j]) > 0.5) & (exp(b[i, 0]) > 2.0)", False),
    ],
)
def test_masks_of_rows_and_columns_are_computed_where_they_are_read(mask: str, inlined: bool) -> None:
    """Unless they are as large as what they are computed from, or expensive."""
    p = parse(SPREAD.format(mask=mask))
    q = inline(p)
    assert ("m" not in {c.name for c in q.body}) == inlined
    args = {"x": torch.randn(5, 7), "y": torch.randn(5, 7), "a": torch.rand(7) > 0.5, "b": torch.randn(5, 7)}
    for name, want in run(p, args).items():
        if name != "m":
            assert torch.equal(run(q, args)[name], want)


def test_a_sum_of_what_a_map_has_is_the_sum_of_the_same_elements_written_out():
    """A softmax and its logarithm: exponentials that one stores are summed once."""
    p = parse("""program both()
      input x: bf16[5, 7]
      dim i = 5
      dim j = 7
      m[i]: f32 = max[j] x[i, j]
      e[i, j]: f32 = exp(x[i, j] - m[i])
      s[i]: f32 = sum[j] e[i, j]
      n[i]: f32 = max[j] x[i, j]
      t[i]: f32 = sum[j] exp(x[i, j] - n[i])
      y[i, j]: f32 = e[i, j] / s[i] * (x[i, j] - n[i] - log(t[i]))
      return y
    """)
    q = unchanged(p, drop_repeated(p))
    assert [c.name for c in q.body] == ["m", "e", "s", "y"]
    rounded = parse(show(p).replace("e[i, j]: f32", "e[i, j]: bf16"))
    assert "t" in {c.name for c in drop_repeated(rounded).body}


CORNERS = """program corners()
  input x: f32[9, 4]
  dim i = 9
  dim j = 4
  e[i, j]: f32 = exp(x[i, j])
  k[i, j]: f32 = where(j < 2, e[i, j] - e[i, j + 2] * 0.5, e[i, j - 2] + e[i, j] * 0.5)
  area[i]: f32 = (k[i, 0 + 2] - k[i, 0]) * (k[i, 1 + 2] - k[i, 1])
  y[i]: f32 = area[i] / (k[i, 2] + {more})
  return y{result}
"""


def test_what_is_read_by_its_places_alone_is_a_map_for_each():
    p = parse(CORNERS.format(more="1.0", result=""))
    q = unchanged(p, constant_parts(p))
    assert all(c.dims == ("i",) and "where" not in show(replace(q, body=(c,))) for c in q.body)
    assert len(q.body) == 4 + 4 + 2


@pytest.mark.parametrize(("more", "result"), [("1.0", ", k"), ("k[i, i % 4]", "")])
def test_what_something_else_reads_is_kept_beside_cheap_parts(more, result):
    p = parse(CORNERS.format(more=more, result=result))
    q = unchanged(p, constant_parts(p))
    assert {"e", "k"} <= {c.name for c in q.body} and "area[i]: f32 = (k_2[i] - k_0[i])" in show(q)


def test_what_something_else_reads_and_is_dear_is_not_taken_apart():
    dear = "where(j < 2, " + "exp(" * 8 + "e[i, j]" + ")" * 8 + ", 0.0)"
    p = parse(CORNERS.format(more="1.0", result=", k").replace("  area", f"  d[i, j]: f32 = {dear}\n  area", 1))
    p = parse(show(p).replace("k[i, 0]", "d[i, 0]").replace("return y, k", "return y, k, d"))
    q = constant_parts(p)
    assert "d[i, 0]" in show(q) and "k_2[i]" in show(q)


SIDES = """program sides()
  input x: f32[9, 4]
  input w: f32[4]
  dim i = 9
  dim j = {n}
  e[i, j]: f32 = exp(x[i, j])
  s[i]: f32 = {reducer}[j] e[i, j] * e[i, j]
  t[i]: f32 = max[j] x[i, j] - w[j]
  y[i]: f32 = s[i] / (e[i, 0] * e[i, 1]) + t[i]
  return y
"""


@pytest.mark.parametrize(("n", "reducer"), [(2, "sum"), (4, "max"), (4, "prod")])
def test_a_short_reduction_of_what_is_read_by_its_places_is_written_out(n, reducer):
    p = parse(SIDES.format(n=n, reducer=reducer))
    q = unchanged(p, constant_parts(p))
    assert all(c.reducer is None and c.dims == ("i",) for c in q.body)


def test_a_reduction_of_what_nobody_reads_by_its_places_is_none():
    p = parse(SIDES.format(n=2, reducer="sum").replace("(e[i, 0] * e[i, 1])", "2.0"))
    assert constant_parts(p) is p
