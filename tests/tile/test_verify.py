"""The verifier: every rule has a kernel that keeps it and one that breaks it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tile.kernels import ALL
from tilefold.algebra.expr import Call, Index, Size, call, lit
from tilefold.algebra.text import Names
from tilefold.algebra.text import parse as expr
from tilefold.errors import VerifyError
from tilefold.tile.affine import segment_of, separates
from tilefold.tile.ir import Map
from tilefold.tile.text import parse
from tilefold.tile.verify import verify


@pytest.mark.parametrize("name", ALL)
def test_written_kernels_are_valid(name):
    verify(parse(ALL[name]))


BREAKS = [
    # names and header
    ("softmax", "dim j = C", "dim j = C\n  dim C = R", "C is both a dim and a symbol"),
    ("softmax", "dim i = R", "dim i = R / 2", "the size of i is not an integer"),
    ("softmax", "in x: f32[R, C]", "in x: f32[R, C]\n  in x: f32[R]", "tensor x is declared twice"),
    ("softmax", "in x: f32[R, C]", "in x: f32[R, C] unit 2", "x has no axis 2"),
    ("softmax", "grid i:3", "grid i:3 i:2", "a loop over i inside a loop over i"),
    ("softmax", "grid i:3", "grid i:0", "a tile of 0 indices"),
    ("bag", "out top: f32[]", "out top: f32[]\n  out lost: f32[]", "output lost is never stored"),
    # loops
    ("attention", "for j:3 in", "for i:3 in", "for i:3 .*: a loop over i inside a loop over i"),
    ("attention", "size(j), tile_stop", "size(z), tile_stop", r"a loop bound: size\(z\) is not known here"),
    ("attention", "tile_stop(i)", "i", "a loop bound may not depend on an index"),
    ("attention", "tile_stop(i)", "q[0, 0, 0, 0]", "must be over symbols and sizes only"),
    ("attention", "tile_stop(i)", "size(j) * 0.5", "a loop bound is not an integer"),
    ("attention", "s[j, i] * 0.125", "s[j, i] * tile_stop(i)", "tile_stop is legal in loop bounds only"),
    # buffers
    ("attention", "alloc t: f32[i:4]", "alloc t: f32[i:3]", r"alloc t.*: an extent of 3 does not bound the range of i"),
    (
        "attention",
        "    alloc t: f32[i:4]",
        "    alloc m: f32[i:4] tile\n    alloc t: f32[i:4]",
        "m is already declared",
    ),
    (
        "attention",
        "    alloc t: f32[i:4]",
        "    alloc q: f32[i:4] tile\n    alloc t: f32[i:4]",
        "q is already declared",
    ),
    ("attention", "alloc t: f32[i:4]", "alloc t: f32[i:4, i:4]", "dim i appears twice"),
    ("attention", "fill t = 0.0", "fill t = i + 1", "fills with a value that varies"),
    ("attention", "    fill t = 0.0\n", "", "t is read before it is written"),
    ("attention", "    fill acc = 0.0\n", "", "acc is read before it is written"),
    ("softmax", "      mn = m[i]\n", "", "accumulates into mn, which is not written yet"),
    ("softmax", "fill t = 0.0", "fill t = 0.0\n    fill lost = 0.0", "no buffer lost in scope"),
    # expressions
    ("softmax", "mn max= over j: x[i, j]", "mn max= over j: x[i]", "x has 2 axes, not 1"),
    ("softmax", "mn = m[i]", "mn = x[i, j]", "index j has several values here and is not a dim of the statement"),
    ("softmax", "max= over j: x[i, j]", "max= over j: x[i, j * 0.5]", "an index of x is not an integer"),
    ("softmax", "max= over j: x[i, j]", "max= over j: y[i, j]", "loads the output y"),
    ("softmax", "m = mn[i]", "m = mn[i] + m[i + 0]", "reads m, which it writes, at another element"),
    ("softmax", "mn max= over j: x[i, j]", "mn max= over j: x[i, j] + mn[i]", "reads mn, which it writes"),
    # reductions
    ("softmax", "mn max= over j", "mn maxx= over j", "maxx is not one of sum"),
    ("softmax", "mn max= over j: x[i, j]", "mn max= over : x[i, 0]", "reduces over nothing"),
    ("softmax", "mn max= over j", "mn max= over j, i", "dim i appears twice"),
    (
        "attention",
        "gemm over d: k[b, h, j, d]",
        "gemm over d: k[b, h, j // i64(k[b, h, j, d]), d]",
        "gemm takes no indirect loads",
    ),
    ("attention", "gemm over d: k[b, h, j, d]", "gemm over d: k[b, h, j, 0]", "d is summed but is not a dim of both"),
    ("attention", "gemm over d: k[b, h, j, d]", "gemm over d: k[b, h, 0, d]", "j is a dim of neither operand"),
    ("attention", "gemm over d: k[b, h, j, d]", "gemm over d: k[b, j, j, d]", "k uses a dim for two of its axes"),
    # selections
    ("routing", "topk= over j", "topp= over j", "topp is not one of argmax"),
    ("routing", "alloc where_: i64", "alloc where_: f32", "where_ holds f32, not integers"),
    ("routing", "best[i, r], where_[i, r]", "best[i, r], best[i, r]", "two buffers of the same dims"),
    ("routing", "-> j", "-> s[i, j]", "the payload is not an integer"),
    ("routing", "grid i:2", "grid i:2 r:1", "the slot dim r is cut into tiles"),
    # stores
    ("softmax", "store y[i, j] over", "store x[i, j] over", "x is not an output"),
    ("softmax", "store y[i, j] over", "store y[i] over", "y has 2 axes, not 1"),
    ("softmax", "store y[i, j] over", "store y[0, j] over", "different values of i store to the same element"),
    ("softmax", "store y[i, j] over", "store y[i + j, 0] over", "different values of i store to the same element"),
    ("softmax", "store y[i, j] over i, j =", "store y[i, j] over j =", "index i has several values here"),
    ("softmax", "grid i:3", "grid i:3 r:1", "different values of r store to the same element"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), BREAKS)
def test_broken_kernels_are_refused(name, old, new, message):
    text = ALL[name].replace("dim j = C", "dim j = C\n  dim r = 4")
    assert old in text
    with pytest.raises(VerifyError, match=message):
        verify(parse(text.replace(old, new, 1)))


def test_names_that_text_cannot_hold():
    kernel = parse(ALL["softmax"])
    for name in ("lambda", "x.y", "inf"):
        with pytest.raises(VerifyError, match="is not a usable name"):
            verify(replace(kernel, tensors=(replace(kernel.tensors[0], name=name), kernel.tensors[1])))


def test_operations_of_the_wrong_arity():
    kernel = parse(ALL["softmax"])
    bad = Map("m", Call("exp", (Index("i"), Index("i"))))
    with pytest.raises(VerifyError, match=r"no operation exp of 2 argument\(s\)"):
        verify(replace(kernel, body=(*kernel.body[:5], bad, *kernel.body[5:])))


def test_error_names_the_loops_and_the_statement():
    text = ALL["softmax"].replace("mn max= over j: x[i, j]", "mn max= over j: x[i]")
    with pytest.raises(VerifyError) as err:
        verify(parse(text))
    assert str(err.value).startswith("kernel softmax / for j:4 / mn[i] max= over j: x[i]: ")


@pytest.mark.parametrize("index", ["i * 4 + r, j", "j, i, r", "i + ids[r], j", "i * size(r) + r, j", "i + r, r"])
def test_stores_that_may_be_disjoint_pass(index):
    assert all(_separates(index, d) for d in ("i", "r"))


@pytest.mark.parametrize(("index", "dim"), [("j, 0", "i"), ("i + r, j", "i"), ("i * 3 + r, j", "r"), ("i - r, 0", "r")])
def test_stores_that_collide_are_seen(index, dim):
    assert not _separates(index, dim)


def _separates(index: str, dim: str) -> bool:
    names = Names(dims={"i", "j", "r"}, tensors={"ids"})
    return separates([expr(e, names) for e in index.split(", ")], dim, {"i": 8, "j": None, "r": 4})


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_refusals_are_right(coefficients, extents):
    """Where `separates` says False, enumeration finds two values of the dim at one address."""
    dims = ["i", "j", "r"][: len(coefficients)]
    e = call("add", 7, sum((c * Index(d) for c, d in zip(coefficients, dims, strict=True)), start=Index("z") * 0))
    at: dict[int, set[int]] = {}
    for point in itertools.product(*(range(n) for n in extents[: len(dims)])):
        at.setdefault(sum(c * p for c, p in zip(coefficients, point, strict=True)), set()).add(point[0])
    if extents[0] > 1 and not separates([e], "i", {**dict(zip(dims, extents, strict=False)), "z": 1}):
        assert any(len(values) > 1 for values in at.values())


def test_segments_of_a_loop_store_apart():
    at, n, d = call("tile_start", Index("s")), lit(8), Size("l")
    own = call("minimum", d, call("mul", call("add", at, 1), n))
    assert segment_of(call("mul", at, n), own) == "s"
    rest = call("mul", call("maximum", call("sub", d, at), 0), lit(2))
    assert segment_of(call("add", call("mul", at, n), rest), own) == "s"
    assert segment_of(call("add", call("mul", at, n), lit(-1)), own) is None  # begins in the one before
    rows = lit(4)  # of each of n places
    whole = call("minimum", d, call("mul", call("mul", call("add", at, 1), n), rows))
    assert segment_of(call("mul", call("mul", at, n), rows), whole) == "s"
    assert segment_of(call("mul", call("mul", at, rows), rows), whole) is None
    by_itself = call("minimum", d, call("mul", call("add", at, 1), Index("s")))
    assert segment_of(call("mul", at, Index("s")), by_itself) is None
    longer = call("minimum", d, call("mul", call("add", at, 2), n))  # overlaps with the next one's
    assert segment_of(call("mul", at, n), longer) is None
    assert segment_of(call("mul", at, lit(4)), own) is None and segment_of(None, own) is None


@pytest.mark.parametrize(("extent", "tile"), [(4, 4), (4, 5), (1, 1), (1, 4)])
def test_a_loop_of_one_turn_may_store_what_it_does_not_index(extent, tile):
    text = ALL["softmax"].replace("dim j = C", f"dim j = C\n  dim r = {extent}")
    text = text.replace("grid i:3", f"grid i:3 r:{tile}")
    assert verify(parse(text)) == parse(text)
