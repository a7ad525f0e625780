"""The text form: round trips of written and of random kernels, and lines that cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tile.kernels import ALL, ATTENTION
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, call
from tilefold.errors import ParseError
from tilefold.tile.ir import (
    Alloc,
    Buffer,
    Fill,
    For,
    Gemm,
    Kernel,
    Map,
    Reduce,
    Select,
    Store,
    TensorParam,
    Tiled,
)
from tilefold.tile.text import parse, show


@pytest.mark.parametrize("name", ALL)
def test_written_kernels_round_trip(name):
    kernel = parse(ALL[name])
    assert parse(show(kernel)) == kernel


def test_show_reads_as_documented():
    text = show(parse(ATTENTION))
    for line in (
        "  in q: f32[2, 3, S, 8] unit 3",
        "  grid b:1 h:1 i:4",
        "    for j:3 in 0 .. minimum(size(j), tile_stop(i))",
        "      mn[i] max= over j: s[j, i]",
        "      acc[i, e] gemm= over j: s[j, i] * v[b, h, j, e]",
        "    store o[b, h, i, e] over i, e = acc[i, e] / t[i]",
    ):
        assert line in text.splitlines()


DIMS, SYMS = ("i", "j", "d1"), ("S", "n")
BUFFERS = {"acc": ("i",), "p": ("j", "i"), "ix": ("i",), "scalar": ()}
names_of_dims = st.sampled_from(DIMS)
leaves = st.one_of(
    st.floats(width=32).map(lambda v: Const(v, DType.F32)),
    st.floats().map(lambda v: Const(v, DType.F64)),
    st.integers(-5, 300).map(lambda v: Const(v, DType.I64)),
    st.booleans().map(lambda v: Const(v, DType.BOOL)),
    names_of_dims.map(Index),
    names_of_dims.map(Size),
    st.sampled_from(SYMS).map(Sym),
    st.sampled_from(["x", "scalar"]).map(lambda n: Load(n, (Index("i"),) if n == "x" else ())),
)


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    binary = st.sampled_from(["add", "sub", "mul", "div", "pow", "mod", "lt", "eq", "and", "or", "maximum"])
    unary = st.sampled_from(["neg", "exp", "abs", "not"])
    return st.one_of(
        st.builds(call, binary, inner, inner),
        st.builds(call, unary, inner),
        st.builds(lambda a, b, c: Call("where", (a, b, c)), inner, inner, inner),
        st.builds(Cast, inner, st.sampled_from(list(DType))),
        st.builds(lambda a: Load("x", (a,)), inner),
    )


exprs = st.recursive(leaves, _grow, max_leaves=6)
dim_lists = st.lists(names_of_dims, min_size=1, max_size=3, unique=True).map(tuple)
access = st.builds(lambda i: Load("x", (i,)), exprs)
bounds = st.none() | st.integers(0, 9).map(lambda v: Const(v, DType.I64)) | names_of_dims.map(Size)
simple = st.one_of(
    st.builds(Fill, st.sampled_from(list(BUFFERS)), exprs),
    st.builds(Map, st.sampled_from(list(BUFFERS)), exprs),
    st.builds(Reduce, st.sampled_from(list(BUFFERS)), st.sampled_from(["sum", "max"]), dim_lists, exprs, st.booleans()),
    st.builds(Gemm, st.sampled_from(list(BUFFERS)), access, access, dim_lists, st.booleans()),
    st.builds(
        Select,
        st.just("acc"),
        st.just("ix"),
        st.sampled_from(["argmax", "topk"]),
        dim_lists,
        exprs,
        exprs,
        st.booleans(),
    ),
    st.builds(Store, st.just("y"), st.lists(exprs, max_size=3).map(tuple), dim_lists, exprs),
)
statements = st.recursive(
    simple,
    lambda inner: st.builds(
        For, names_of_dims, st.integers(1, 64), st.lists(inner, max_size=3).map(tuple), bounds, bounds
    ),
    max_leaves=6,
)
scopes = st.sampled_from(["tile", "panel"])
extents = st.integers(1, 99).map(lambda v: Const(v, DType.I64)) | names_of_dims.map(Size)


@st.composite
def kernels(draw):
    allocs = tuple(
        Alloc(Buffer(n, dims, tuple(draw(extents) for _ in dims), draw(st.sampled_from(list(DType))), draw(scopes)))
        for n, dims in BUFFERS.items()
    )
    tensors = (
        TensorParam("x", draw(st.sampled_from(list(DType))), (Sym("S"),), "in", draw(st.sampled_from([None, 0]))),
        TensorParam("y", DType.F32, (Sym("n") * 2 + 1,), "out"),
        TensorParam("w", DType.F32, (), "scratch"),
    )
    grid = tuple(Tiled(d, draw(st.integers(1, 9))) for d in draw(st.just(()) | dim_lists))
    body = tuple(draw(st.lists(statements, max_size=5)))
    return Kernel("k0", SYMS, {"i": Sym("S"), "j": Const(3, DType.I64), "d1": Sym("n")}, tensors, grid, allocs + body)


@settings(max_examples=150, deadline=None)
@given(kernels())
def test_random_kernels_round_trip(kernel):
    assert parse(show(kernel)) == kernel


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernel attention(S)", "program attention(S)", "starts with `kernel"),
        ("grid b:1", "grid b", "a grid entry is `dim:tile`"),
        ("f32[d:8, i:4]", "f31[d:8, i:4]", "unknown dtype 'f31'"),
        ("qt[d, i] = q", "qt[i, d] = q", r"the dims of qt are \[d, i\]"),
        ("k[b, h, j, d] * qt[d, i]", "k[b, h, j, d] + qt[d, i]", "gemm multiplies two loads"),
        ("fill t = 0.0", "fill t 0.0", "not a statement: 'fill t 0.0'"),
        ("fill t = 0.0", "  fill t = 0.0", "unexpected indentation"),
        ("mn = m[i]", "mn = mm[i]", "unknown tensor mm"),
        ("dim d = 8", "dam d = 8", "expected `dim`, a tensor or `grid`"),
    ],
)
def test_unreadable_text_is_named(old, new, message):
    assert old in ATTENTION
    with pytest.raises(ParseError, match=message):
        parse(ATTENTION.replace(old, new, 1))


def test_selection_needs_a_payload():
    with pytest.raises(ParseError, match="ends with `-> payload`"):
        parse(ALL["routing"].replace(" -> j", ""))


def test_text_after_the_body_is_refused():
    with pytest.raises(ParseError, match="outside the kernel's body"):
        parse(ALL["softmax"] + "  dim k = 3\n")
