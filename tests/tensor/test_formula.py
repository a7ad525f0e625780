# ruff: noqa: E741  (l is the papers' index)
"""`derive`: text and functions give the same Fold; mistakes are errors with a way out."""

from __future__ import annotations

import warnings

import pytest

from tests.algebra import cascades as c
from tilefold.errors import NotFusibleError, ParseError
from tilefold.tensor.formula import (
    argmax_,
    derive,
    exp,
    max_,
    maximum,
    prod_,
    size,
    sqrt,
    sum_,
    topk_,
    where,
)


def test_functions_and_text_agree() -> None:
    functions = derive(
        m=lambda p, i, l: max_[l](where(l <= i, p[i, l] * 0.125, float("-inf"))),
        t=lambda p, m, i, l: sum_[l](exp(where(l <= i, p[i, l] * 0.125, float("-inf")) - m[i])),
        o=lambda p, v, m, t, i, e, l: sum_[l](
            exp(where(l <= i, p[i, l] * 0.125, float("-inf")) - m[i]) / t[i] * v[l, e]
        ),
    )
    text = derive(c.ATTENTION_MASKED.replace("bf16", ""))
    assert functions.fold == text.fold and functions.update == text.update


def test_functions_with_operators_and_choices() -> None:
    got = derive(
        m=lambda x, l: sum_[l](x[l] ** 2),
        s=lambda x, y, m, l: sum_[l](x[l] * y[l] / sqrt(maximum(m - 10, 0.001))),
    )
    assert got.fold.finish == derive(c.SUM_SUM.replace("x1", "x").replace("x2", "y").replace("10.0", "10")).fold.finish
    got = derive(s=lambda x, l: sum_[l](x[l]), q=lambda x, s, l: sum_[l]((x[l] - s / size(l)) ** 2))
    assert got.fold == derive(c.VARIANCE).fold
    got = derive(
        m=lambda x, l: argmax_[l](-x[l]), k=lambda x, l, r: topk_[l, r](abs(x[l])), P=lambda x, l: prod_[l](x[l])
    )
    assert [v.reducer for v in got.fold.state] == ["argmax", "topk", "prod"]
    assert dict(got.fold.finish).keys() == {"m", "m_index", "k", "k_index", "P"}


def test_maps_are_substituted_and_dims_inferred() -> None:
    d = derive("""
        s[i] = sum[l] x[i, l]
        mean[i] = s[i] / size(l)   # a map
        q[i] = sum[l] (x[i, l] - mean[i]) ** 2
    """)
    # the sum, the count, the squares about the mean, and what rounding leaves of the sum of x - mean
    assert [v.dims for v in d.fold.state] == [("i",), (), ("i",), ("i",)]


def test_dtypes_reach_the_state() -> None:
    d = derive("t = sum[l] x[l]", dtypes={"t": "f64", "x": "bf16"})
    assert d.fold.state[0].dtype.value == "f64"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no reduction"),
        ("y = x + 1", "no reduction"),
        ("m max[l] x[l]", "not a statement"),
        ("m + 1 = max[l] x[l]", "left of `=`"),
        ("m = max[l] x[l] +", "not an expression"),
        ("m = max[l] frobnicate(x[l])", "unknown function frobnicate"),
        ("m = max[l] x[l]\nt = sum[k] y[k]", "reduces over k"),
        ("m[l] = max[l] x[l]", "keeps l, which it reduces"),
        ("a, b = sum[l] x[l]", "sum has one result"),
        ("s[r] = topk[l] x[l]", "top-k is written"),
        ("y[l] = x[l] + 1.0\nm = max[l] y[l, l]", "y has 1 dims, not 2: 'm = "),
        ("t = sum[l] x[l, e]", r"e is neither kept nor reduced: 't = (?s:.*)hint: `t\[e\] = "),
        ("y = x[l] + 1.0\nm = max[l] y", "l is neither kept nor reduced: 'y = "),
        ("s[r], i[r] = topk[l; r] x[l, e]", r"e is neither(?s:.*)hint: `s\[e, r\] = "),
        ("s[r], i[r] = topk[l; r] x[l, r]", "r is neither kept nor reduced"),
        ("s[r], i = topk[l; r] x[l]", "s and i have other dims: 's"),
        ("s = topk[l; r] x[l]", "top-k is written"),
        ("s[r] = topk[l; r, q] x[l]", "top-k is written"),
        ("t = sum[l] x[l] * x", "x has 1 dims, not 0: 't = "),
        ("m = max[l] x[l]\ns = sum[l] x[m[l]]", "m has 0 dims, not 1: 's = "),
        ("m[i] = max[l] x[i, l]\ns = sum[l] y[l] * m", "m has 1 dims, not 0: 's = "),
        ("m[i] = max[l] x[i, l]\ns[i] = sum[l] x[i, l] * m[0]", "m is a result, and read at no dim that s keeps: 's"),
        ("m[i] = max[l] x[i, l]\na = argmax[l] m[l]", "m is a result, and read at no dim that a keeps: 'a"),
        ("m = max[l] x[l] > 0.0", "m is the max of a condition: 'm = (?s:.*)hint: any"),
        ("m = argmin[l] x[l] == 1.0", "m is the argmin of a condition"),
        ("y[l] = x[l] > 0.0\ns[r], i[r] = topk[l; r] y[l]", "s is the topk of a condition"),
    ],
)
def test_mistakes_in_text(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        derive(text)


def test_mistakes_in_calls() -> None:
    with pytest.raises(ParseError, match="either a formula or functions"):
        derive()
    with pytest.raises(ParseError, match="returns a reduction"):
        derive(m=lambda x, l: x[l])
    with pytest.raises(ParseError, match="unknown dtype"):
        derive("m = max[l] x[l]", dtypes={"x": "float99"})
    with pytest.raises(ParseError, match="can be indexed"):
        derive(m=lambda x, l: max_[l]((x[l] + 1)[l]))
    with pytest.raises(NotFusibleError, match="new function of the inputs"):
        derive("r = sum[l] x[l]\ny = sum[l] exp(x[l] / r)")
    assert derive(c.QUANTISE_GEMM, ignore_rounding=True).fold.finish


def test_what_python_warns_of_is_an_error_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ParseError, match="not part of the expression language"):
            derive("t = sum[l] 1if x[l] else 0")
