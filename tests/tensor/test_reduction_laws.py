"""The laws split, exchange and order: the same results, and reductions over common axes."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.expr import Index, Load
from tilefold.algebra.text import Names
from tilefold.algebra.text import parse as expression
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.reduction_laws import _linear_in, as_memory_lies, exchange_sums, split_axes
from tilefold.tensor.text import parse

#: A loss over all rows and columns, made of each row's softmax.
LOSS = """
program loss()
  input x: f32[5, 7]
  input y: f32[5, 7]
  dim i = 5
  dim j = 7
  m[i]: f32 = max[j] x[i, j]
  t[i]: f32 = sum[j] exp(x[i, j] - m[i])
  s[]: f32 = sum[i, j] y[i, j] * (x[i, j] - m[i] - log(t[i]))
  return s
"""
#: The maximum over all, in front of sums of rows.
SCALED = """
program scaled()
  input x: bf16[5, 7]
  dim i = 5
  dim j = 7
  m[]: bf16 = max[i, j] x[i, j]
  t[i]: f32 = sum[j] exp(x[i, j] - m)
  return t
"""
#: Heads normalised, then a product over all of them.
PRODUCT = """
program product()
  input x: f32[5, 2, 7]
  input w: f32[2, 7, 3]
  dim i = 5
  dim h = 2
  dim j = 7
  dim k = 3
  m[i, h]: f32 = sum[j] x[i, h, j]
  n[i, h, j]: f32 = x[i, h, j] / m[i, h]
  o[i, k]: f32 = sum[h, j] n[i, h, j] * w[h, j, k]
  return o
"""
#: No reduction over fewer axes is in sight.
WHOLE = """
program whole()
  input x: f32[5, 7]
  dim i = 5
  dim j = 7
  s[]: f32 = sum[i, j] x[i, j]
  q[]: f32 = sum[i, j] (x[i, j] - s) * (x[i, j] - s)
  return q
"""


def reduced(p: Program) -> dict[str, tuple[str, ...]]:
    return {c.name: c.rdims for c in p.body if c.reducer}


def same(before: Program, after: Program) -> None:
    gen = torch.Generator().manual_seed(0)
    inputs = {
        i.name: torch.randn([int(e.value) for e in i.shape], generator=gen, dtype=torch.float64).to(i.dtype.torch_dtype)
        for i in before.inputs
    }
    for name, x in run(before, inputs, syms={}).items():
        if name in before.outputs:
            torch.testing.assert_close(run(after, inputs, syms={})[name], x, rtol=1e-6, atol=1e-6)


def test_a_loss_joins_the_cascade_of_its_rows():
    before = parse(LOSS)
    after = split_axes(before)
    assert reduced(after) == {"m": ("j",), "t": ("j",), "s_in": ("j",), "s": ("i",)}
    same(before, after)


def test_a_maximum_over_all_is_cut_in_front_of_rows_and_not_rounded_between():
    before = parse(SCALED)
    after = split_axes(before)
    assert reduced(after) == {"m_in": ("i",), "m": ("j",), "t": ("j",)}
    assert after.dtype_of("m_in").value == "f32"
    same(before, after)


@pytest.mark.parametrize("text", [PRODUCT, WHOLE], ids=["a product", "equal axes"])
def test_what_stays_whole(text):
    before = parse(text)
    assert split_axes(before) == before


def test_what_is_kept_whole_on_demand():
    before = parse(LOSS)
    assert split_axes(before, frozenset({"s"})) == before


#: Columns normalised over rows and places, a product that a library computes, and a sum over rows behind it.
NORMALISED = """
program normalised()
  input x: f32[5, 2, 7]
  input w: f32[7, 3]
  dim i = 5
  dim h = 2
  dim j = 7
  dim k = 3
  m[j]: f32 = sum[i, h] x[i, h, j]
  n[i, h, j]: f32 = x[i, h, j] - m[j]
  o[i, h, k]: f32 = sum[j] n[i, h, j] * w[j, k]
  s[h, k]: f32 = sum[i] o[i, h, k]
  return s
"""


def test_what_is_behind_one_that_keeps_an_axis_cuts_nothing():
    before = parse(NORMALISED)
    assert split_axes(before) == before


#: Scores of pairs [s, u] that positions turn, their gradient, and what is summed over pairs behind it.
PAIRS = """
program pairs()
  input q: f32[5, 7, 2]
  input k: f32[6, 7, 2]
  input w: f32[7, 3]
  dim l = 5
  dim v = 6
  dim s = 7
  dim u = 2
  dim x = 3
  b[l, v]: f32 = sum[s, u] q[l, s, u] * k[v, s, u]
  p[l, v]: f32 = exp(b[l, v])
  d[l, s, u]: f32 = sum[v] p[l, v] * k[v, s, u]
  t[l, s]: f32 = d[l, s, 0] - d[l, s, 1]
  y[l, x]: f32 = sum[s] t[l, s] * w[s, x]
  return y
"""


def test_scores_of_pairs_stay_whole():
    before = parse(PAIRS)
    assert split_axes(before) == before


#: A batch norm, and the mean of each image behind it.
POOLED = """
program pooled()
  input x: f32[5, 2, 7]
  dim i = 5
  dim h = 2
  dim j = 7
  m[j]: f32 = sum[i, h] x[i, h, j]
  v[j]: f32 = sum[i, h] (x[i, h, j] - m[j]) * (x[i, h, j] - m[j])
  n[i, h, j]: f32 = (x[i, h, j] - m[j]) * v[j]
  s[i, j]: f32 = sum[h] n[i, h, j]
  return s
"""


def test_a_mean_and_a_variance_stay_whole_in_front_of_a_sum_over_fewer_axes():
    before = parse(POOLED)
    assert split_axes(before) == before


#: Heads of two features, made of a reduction over the keys that they then are summed with.
HEADS = """
program heads()
  input x: f32[5, 2, 7]
  input w: f32[5, 3]
  dim i = 5
  dim h = 2
  dim j = 7
  dim k = 3
  m[j]: f32 = max[i] x[i, 0, j]
  s[i, j]: f32 = sum[h] x[i, h, j] - m[j]
  o[k, j]: f32 = sum[i] s[i, j] * w[i, k]
  return o
"""


def test_sums_are_exchanged_unless_they_are_kept():
    p = parse(HEADS)
    assert "s" not in exchange_sums(p).names
    assert exchange_sums(p, frozenset("s")) == exchange_sums(p, frozenset("o")) == p


#: Attention of few keys in heads of 4 columns, and a projection of all heads: each sum over keys is short.
PROJECTED = """
program projected()
  input p: f32[64, 2, 13]
  input v: f32[13, 8]
  input w: f32[8, 32]
  dim i = 64
  dim h = 2
  dim c = 8
  dim k = 13
  dim o = 32
  m[i]: f32 = max[c] v[0, c] * p[i, 0, 0]
  a[i, c]: f32 = sum[k] (p[i, c // 4, k] - m[i]) * v[k, c]
  y[i, o]: f32 = sum[c] a[i, c] * w[c, o]
  return y
"""


def test_a_product_of_matrices_is_not_made_one_for_each_element_of_a_short_sum():
    p = parse(PROJECTED)
    assert exchange_sums(p) == p  # else 13 products of 64 x 8 x 32 where there is one


#: Three sums in a row, each of which could take the one before it.
ROW_OF_SUMS = """
program row()
  input x: f32[5, 2, 3, 7]
  input w: f32[2, 3, 4]
  dim i = 5
  dim h = 2
  dim j = 3
  dim k = 7
  dim o = 4
  m[i]: f32 = max[h, j] x[i, h, j, 0]
  a[i, h, j]: f32 = sum[k] x[i, h, j, k] - m[i]
  b[i, h, o]: f32 = sum[j] a[i, h, j] * w[h, j, o]
  c[i, o]: f32 = sum[h] b[i, h, o] * w[h, 0, o]
  return c
"""


def test_of_three_sums_in_a_row_none_loses_what_it_reads():
    p = parse(ROW_OF_SUMS)
    x = {"x": torch.randn(5, 2, 3, 7), "w": torch.randn(2, 3, 4)}
    done = exchange_sums(p)
    assert {"a", "b"} - set(done.names)  # one was exchanged
    torch.testing.assert_close(run(done, x)["c"], run(p, x)["c"])


TURNED = """
program turned()
  input x: f32[4, 5, 6]
  input b: f32[6]
  dim i = 4
  dim j = 6
  dim k = 5
  y[i, j, k]: f32 = x[i, k, j] + b[j]
  s[]: f32 = sum[i, j, k] y[i, j, k] * y[i, j, k]
  r[i]: f32 = sum[j, k] y[i, j, k] * x[i, k, j]
  w[k]: f32 = sum[i, j] b[j]
  return s, r, w
"""


def test_axes_are_in_the_order_of_what_is_read():
    p = parse(TURNED)
    ordered = as_memory_lies(p)
    assert [c.rdims for c in ordered.body] == [(), ("i", "k", "j"), ("k", "j"), ("i", "j")]
    assert as_memory_lies(ordered) == ordered
    x = {"x": torch.randn(4, 5, 6), "b": torch.randn(6)}
    for name, want in run(p, x).items():
        torch.testing.assert_close(run(ordered, x)[name], want)


@pytest.mark.parametrize(
    ("text", "linear"),
    [
        ("x[i]", True),
        ("x[i] * y[i]", True),
        ("y[i] * x[i]", True),
        ("-(x[i] / y[i])", True),
        ("x[i] * x[i]", False),
        ("y[i] * y[i]", False),
        ("x[i] * (y[i] + x[i])", False),
        ("(y[i] + x[i]) * x[i]", False),
        ("x[i] / x[i]", False),
        ("y[i] / x[i]", False),
        ("x[i] + y[i]", False),
    ],
)
def test_what_is_a_factor_times_a_tensor(text, linear):
    names = Names(dims={"i"}, open_tensors=True)
    assert _linear_in(expression(text, names), Load("x", (Index("i"),))) is linear


PATCHES = """
program patches()
  input x: bf16[8, 128, 48, 2]
  input w: bf16[64, 128, 2]
  input v: bf16[32, 128]
  dim i = 8
  dim m = 128
  dim j = 48
  dim n = 2
  dim l = 64
  dim r = 32
  c[i, j, l]: bf16 = sum[m, n] x[i, m, j, n] * w[l, m, n]
  a[i, j]: bf16 = sum[l] maximum(c[i, j, l], 0)
  y[i, j, n, r]: bf16 = sum[m] x[i, m, j, n] * a[i, j] * v[r, m]
  return y
"""


def test_products_are_not_split_into_more_parts_than_they_read() -> None:
    """A convolution of patches of two places, and one of each channel behind it: a part a channel is 64 times c."""
    p = split_axes(parse(PATCHES))
    assert {c.name for c in p.body} == {"c", "a", "y"}
