"""Simplification, certain stretches of loops, values and rendering, on tile kernels in text form."""

from __future__ import annotations

import re

import pytest
import torch

from tests.backends.triton.kernels import made, meta, split_product, variant
from tests.tile.kernels import SOFTMAX, TOPK
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.algebra.text import Names, show
from tilefold.algebra.text import parse as parse_expr
from tilefold.backends.triton.config import TooLarge, TritonConfig
from tilefold.backends.triton.facts import certain
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.render import Rendered, render
from tilefold.backends.triton.reuse import passing
from tilefold.backends.triton.scope import Scopes
from tilefold.backends.triton.simplify import pull_scale, terms
from tilefold.backends.triton.values import Value, converted, fitted, inverse
from tilefold.block.canonical import canonical
from tilefold.block.text import parse as parse_block
from tilefold.errors import BackendError
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.tensor.text import parse as parse_tensor
from tilefold.tile.pieces import cut, lengths, product_dims
from tilefold.tile.text import parse
from tilefold.tile.text import show as show_kernel
from tilefold.tile.verify import verify


def expr(text: str) -> Expr:
    return parse_expr(text, Names(dims={"i", "j"}, tensors={"x", "b"}, syms=set()))


def code(kernel: str, config: TritonConfig | None = None, **options) -> Rendered:
    return render(verify(parse(kernel)), config or TritonConfig(), **options)


def body(r: Rendered) -> str:
    """The kernel without the device functions before it."""
    return r.source[r.source.index(f"def {r.name}(") :]


# -- expressions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "scale", "rest"),
    [
        ("x[i] * 0.5", 0.5, "x[i]"),
        ("where(j <= i, x[i] * 0.5, -inf)", 0.5, "where(j <= i, x[i], -inf)"),
        ("where(j <= i, x[i] * 0.5, 0.0)", 1.0, None),  # exact too, but no reader wants it
        ("x[i] * -0.5", 1.0, None),  # would turn a maximum into a minimum
        ("x[i] + 0.5", 1.0, None),
    ],
)
def test_positive_scales_are_pulled_out(text, scale, rest):
    k, inner = pull_scale(expr(text), loose=False)
    assert (k, inner) == (scale, expr(text if rest is None else rest))


def test_sums_are_taken_apart_into_scaled_terms():
    found = {show(x): k for k, x in terms(expr("x[i] * 2.0 - b[j]"))}
    assert found == {"x[i]": 2.0, "b[j]": -1.0}


def test_certain_stretches_of_a_causal_loop():
    e = expr("where(j <= i, x[j], -inf)")
    found = certain([e], "j", frozenset({"i"}))
    assert found.conditions == ((e.args[0], True),)
    assert not found.starts and [show(s) for s in found.stops] == ["tile_start(i) + 1"]
    assert not certain([expr("where(x[j] <= 0.0, x[j], -inf)")], "j", frozenset({"i"})).conditions


@pytest.mark.parametrize(
    ("mask", "known", "stop"),
    [
        ("(j <= i) | (j < 30)", "(j <= i) | (j < 30)", "maximum(tile_start(i) + 1, 30)"),
        ("(j <= i) & ((i - j) % 4 == 0)", "j <= i", "tile_start(i) + 1"),
        ("(j <= i) | (j % 4 == 0)", "(j <= i) | (j % 4 == 0)", "tile_start(i) + 1"),
    ],
)
def test_masks_of_several_conditions_are_known_in_part(mask, known, stop):
    found = certain([expr(f"where({mask}, x[j], -inf)")], "j", frozenset({"i"}))
    assert found.conditions == ((expr(known), True),) and not found.starts
    assert found.stops == (expr(stop),)


# -- values -----------------------------------------------------------------------------------


def test_values_are_brought_into_a_frame():
    v = Value("v", ("j", "i"), DType.F32)
    assert fitted(v, ("j", "i")) == "v"
    assert fitted(v, ("i", "j")) == "tl.permute(v, (1, 0,))"
    assert fitted(v, ("i", "k", "j")) == "tl.permute(v, (1, 0,))[:, None, :]"
    assert fitted(Value("s", (), DType.F32), ("i",)) == "s"


def test_conversions():
    assert converted(Value("3", (), DType.I64), DType.F32).code == "3.0"
    assert converted(Value("v", ("i",), DType.F16), DType.F32).code == "v.to(tl.float32)"
    assert converted(Value("v", ("i",), DType.F32), DType.F32).code == "v"
    assert converted(Value("((0 * -1) + 4)", (), DType.I64), DType.F32).code == "4.0"
    assert converted(Value("True", (), DType.BOOL), DType.F32).code == "tl.where(True, 1.0, 0.0).to(tl.float32)"
    assert converted(Value("(n + 4)", (), DType.I64), DType.F32).code == "((n + 4)).to(tl.float32)"
    assert converted(Value("(x == 3)", (), DType.BOOL), DType.I64).code == "tl.where((x == 3), 1, 0)"
    assert converted(Value("(x == 3)", ("i",), DType.BOOL), DType.I64).code == "((x == 3)).to(tl.int64)"


# -- kernels ----------------------------------------------------------------------------------


def test_ragged_lanes_are_masked_where_they_are_reduced_and_stored():
    text = body(code(SOFTMAX, bins={"j": 16}))
    assert "tl.where(" in text and "mask=" in text
    for line in text.splitlines():
        if "tl.reduce(" in line or "tl.sum(" in line:
            assert "tl.where(" in line or "j_b" in text  # masked, or in the stretch that has no ragged tile
        if "tl.store(" in line:
            assert "mask=" in line


ROWS = """
kernel rows()
  dim i = {rows}
  dim j = {columns}
  in x: f32[{rows}, {columns}] unit 1
  out y: f32[{rows}] unit 0
  grid i:4
    alloc m: f32[i:4] tile
    m[i] = max over j: x[i, j]
    store y[i] over i = m[i]
"""


def test_no_masks_where_every_lane_is_valid():
    text = body(code(ROWS.format(rows=8, columns=16)))
    assert "mask" not in text and "tl.where" not in text


def test_masks_where_lanes_are_not():
    text = body(code(ROWS.format(rows=8, columns=17)))
    assert 'tl.where(ok_j[None, :], x_x, float("-inf"))' in text and "tl.arange(0, 32)" in text
    assert "mask=ok_i" in body(code(ROWS.format(rows=7, columns=16)))


SUMMED = """
kernel summed()
  dim i = 16
  dim j = 8
  dim k = 500
  in x: bf16[16, 8, 500] unit 2
  out y: bf16[16, 8, 500] unit 2
  out z: f32[500] unit 0
  grid k:64
    alloc d: f32[k:64, j:8, i:16] tile
    d[k, j, i] = x[i, j, k] * x[i, j, k]
    alloc s: f32[k:64] tile
    s[k] = sum over i, j: d[k, j, i]
    store y[i, j, k] over i, j, k = {stored}
    store z[k] over k = s[k]
"""


@pytest.mark.parametrize(("stored", "turned"), [("d[k, j, i]", False), ("d[k, j, i] + x[i, j, k]", True)])
def test_a_value_is_stored_with_its_axes_in_the_order_that_it_is_held_in(stored, turned):
    """Sums over several axes have their columns first. In the order of the result's axes threads exchanged the elements
    (gradients of GELU and of its bias, 16 x 500 rows of 2,048 columns: 91 us on an H200, 63 without)."""
    line = next(x for x in body(code(SUMMED.format(stored=stored))).splitlines() if "tl.store(at_y" in x)
    assert ("tl.permute(" in line) == turned
    assert ("ok_k[:, None, None]" in line) != turned


BESIDE = """
kernel beside()
  dim i = 64
  in x: f32[{extent}] unit 0
  out y: f32[64] unit 0
  grid i:16
    store y[i] over i = where(i * 2 - 1 >= 0, x[i * 2 - 1], 0.0) + where(i + 1 < {end}, x[i * 2 + 2], 0.0)
"""


@pytest.mark.parametrize(("extent", "end", "chosen"), [(128, 64, 0), (128, 63, 1), (127, 64, 1)])
def test_elements_outside_of_a_tensor_are_chosen_by_the_load_alone(extent, end, chosen):
    """i + 1 < 64 says 2 i + 2 < 128; other ends are other conditions."""
    text = body(code(BESIDE.format(extent=extent, end=end)))
    assert text.count("tl.where(") == chosen and text.count("mask=") == 2


LATER = """
kernel later()
  dim i = 64
  dim j = 64
  in x: f32[64, 64] unit 1
  out y: f32[64] unit 0
  grid i:16
    alloc s: f32[i:16] tile
    fill s = 0.0
    for j:{tile} in tile_start(i) .. size(j)
      s sum= over j: where(i <= j, x[i, j], 0.0)
    store y[i] over i = s[i]
"""


def test_a_loop_from_a_tiles_start_has_no_ragged_end():
    """Keys under a causal mask: the queries from their own tile on, in tiles that both start and end at multiples."""
    text = body(code(LATER.format(tile=16)))
    assert text.count("for j0 in") == 2 and "ok_j" not in text  # at the edge of the mask, and behind it
    ragged = body(code(LATER.format(tile=32)))
    assert "ok_j" in ragged  # a tile of 32 may begin at 16


PARTS = """
kernel parts()
  dim i = 8
  dim j = 1024
  in x: f32[{blocks}] unit 0
  in y: f32[64] unit 0
  out z: f32[8] unit 0
  grid i:1
    alloc s: f32[] tile
    fill s = 0.0
    for j:64 in tile_start(i) * {each} .. tile_start(i) * {each} + {each}
      s sum= over j: x[j // 64] * y[j % 64]
    store z[i] over i = s
"""


def test_a_quotient_is_one_number_on_tiles_that_start_at_multiples():
    """A segment of 128 indices has whole tiles of 64, one of 100 has tiles that two blocks share."""
    whole = body(code(PARTS.format(blocks=16, each=128)))
    assert "(j0 // 64)" in whole and "tf_floordiv" not in whole and "tf_mod" not in whole
    torn = body(code(PARTS.format(blocks=16, each=100)))
    assert "(j0 // 64)" not in torn and "(i_j // 64)" in torn and "(i_j % 64)" in torn


COUNTED = """
kernel counted()
  dim i = 8
  dim j = 256
  in x: f32[8, 256] unit 1
  in y: f32[8] unit 0
  out n: i64[8] unit 0
  out z: f32[8, 256] unit 1
  grid i:1
    alloc c: i64[i:1] tile
    c[i] = sum over j: i64({counted})
    store n[i] over i = c[i]
    store z[i, j] over i, j = x[i, j] / y[i]
"""


@pytest.mark.parametrize(("counted", "condition"), [("x[i, j] == 0.0", True), ("x[i, j]", False)])
def test_conditions_are_counted_in_32_bits_and_round_nothing(counted, condition):
    """A tile has fewer elements than 32 bits count; quotients beside what is rounded to whole numbers are exact."""
    text = body(code(COUNTED.format(counted=counted)))
    assert ("tl.int32), 0)).to(tl.int64)" in text) == condition
    assert ("tf_quotient" in text) != condition


SHORT = """
kernel short()
  dim i = 4096
  in x: bf16[4096, {each}] unit 1
  out y: bf16[4096] unit 0
  grid i:1024
    store y[i] over i = maximum(x[i, 0], x[i, {each} - 1])
"""


@pytest.mark.parametrize(("each", "flat"), [(3, True), (7, True), (15, True), (16, False), (64, False)])
def test_elements_of_short_rows_are_loaded_one_by_one(each, flat):
    """A thread that has eight rows, as it has eight elements of what is stored, reads from eight lines of the cache."""
    assert ("tl.reshape" in body(code(SHORT.format(each=each)))) == flat


WEIGHTED = """
kernel weighted()
  dim i = 4096
  in x: f32[4096, 3] unit 1
  in m: f32[4096] unit 0
  out y: f32[4096] unit 0
  grid i:1024
    store y[i] over i = m[i] * x[i, 0] + m[i] * x[i, 2]
"""


def test_elements_of_short_rows_are_where_those_of_a_weight_are():
    """One by one they would come to the threads that have their weights through shared memory."""
    assert "tl.reshape" not in body(code(WEIGHTED))


REPEATED = """
kernel repeated()
  dim i = 8192
  in x: f32[{part}] unit 0
  out y: f32[8192] unit 0
  grid i:1024
    store y[i] over i = x[i % {part}]
"""


@pytest.mark.parametrize(("part", "together"), [(2048, True), (1024, True), (512, False), (1536, False)])
def test_what_is_left_of_a_dim_goes_on_with_it_through_a_tile(part, together):
    """Elements of a repeated row: neighbours are loaded in vectors."""
    text = body(code(REPEATED.format(part=part)))
    by_element = f"i_i % {part}" in text or re.search(rf"tf_rest\(i_i, \d+, \d+, {part}\)", text) is not None
    assert (f"(i0 % {part})" in text) == together and by_element != together
    assert ("tl.reshape" in text) != together


def test_a_dim_without_indices_is_masked():
    text = body(code(ROWS.format(rows=8, columns=0)))
    assert "r_j < 0" in text and 'float("-inf")' in text


def test_unbounded_and_too_large_values_are_refused():
    with pytest.raises(BackendError, match="size is not bounded"):
        code(ROWS.replace("kernel rows()", "kernel rows(N)").replace("{columns}", "N").format(rows=8))
    wide = ROWS.replace("    m[i]", "    alloc w: f32[i:4, j:100000] tile\n    w[i, j] = x[i, j]\n    m[i]")
    with pytest.raises(BackendError, match="elements in a thread block"):
        code(wide.format(rows=8, columns=100_000))


LONG = """
kernel long()
  dim i = 16
  dim j = 256
  dim k = {depth}
  in x: f32[16, {depth}] unit 1
  in y: f32[{depth}, 256] unit 1
  out o: f32[16, 256] unit 1
  grid
    alloc s: f32[i:16, j:256] tile
    s[i, j] = gemm over k: x[i, k] * y[k, j]
    store o[i, j] over i, j = s[i, j]
"""


def test_operands_of_products_fit_into_shared_memory():
    """The matrix unit reads them from there: 256 KB of y are refused before they are compiled."""
    assert "tl.dot" in body(code(LONG.format(depth=128)))
    with pytest.raises(TooLarge, match="y would hold 65536 elements"):
        code(LONG.format(depth=256))


PRODUCT = """
kernel chain()
  dim i = 64
  dim j = 64
  dim k = 64
  dim l = 64
  in x: f16[64, 64] unit 1
  in y: f16[64, 64] unit 1
  in z: f16[64, 64] unit 1
  out o: f32[64, 64] unit 1
  grid
    alloc s: f32[i:64, j:64] tile
    s[i, j] = gemm over k: x[i, k] * y[k, j]
    alloc p: f32[i:64, j:64] tile
    p[i, j] = s[i, j] * 0.5
    alloc r: f32[{r}] tile
    r[{axes}] = gemm over {over}: {a} * {b}
    store o[{axes}] over {axes} = r[{axes}]
"""


def chain(axes: str, over: str, a: str, b: str) -> str:
    r = ", ".join(f"{d}:64" for d in axes.split(", "))
    return body(code(PRODUCT.format(r=r, axes=axes, over=over, a=a, b=b)))


def dots(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if "tl.dot(" in line]


def test_operands_keep_their_scale():
    """p is kept without its factor only where every reader applies it; a product reads it as it is."""
    text = chain("i, l", "j", "p[i, j]", "z[j, l]")
    assert "v_p = (v_s * 0.5)" in text


@pytest.mark.parametrize(
    ("axes", "over", "a", "b"),
    [("j, l", "i", "p[i, j]", "z[i, l]"), ("l, i", "j", "z[l, j]", "p[i, j]")],
    ids=["left operand", "right operand"],
)
def test_no_product_has_the_transpose_of_a_product_as_operand(axes, over, a, b):
    """P^T Z as (Z^T P)^T, Z P^T as (P Z^T)^T: compiled wrongly for Hopper otherwise."""
    last = dots(chain(axes, over, a, b))[-1]
    assert "tl.permute(v_p" not in last and last.startswith("v_r = tl.permute(tl.dot(")


def test_plain_products_are_not_turned():
    assert dots(chain("i, l", "j", "p[i, j]", "z[j, l]"))[-1].startswith("v_r = tl.dot(")


INTEGERS = """program f()
  input x: {x}[64, 128]
  input w: {w}[128, 64]
  dim i = 64
  dim j = 64
  dim k = 128
  y[i, j]: f32 = sum[k] {a} * {b}
  return y
"""


@pytest.mark.parametrize(
    ("x", "w", "a", "b", "precision"),
    [
        ("bf16", "i8", "x[i, k]", "bf16(w[k, j])", ""),
        ("bf16", "i32", "f32(x[i, k])", "f32(w[k, j])", "ieee"),  # not rounded to what the other operand has
        ("f32", "i8", "x[i, k]", "f32(w[k, j])", "ieee"),
        ("i8", "i8", "x[i, k]", "w[k, j]", ""),
        ("i8", "i32", "x[i, k]", "w[k, j]", None),
    ],
)
def test_integers_are_multiplied_in_the_type_that_the_program_gives_them(x, w, a, b, precision):
    (fused,) = fuse_for_gpu(parse_tensor(INTEGERS.format(x=x, w=w, a=a, b=b))).kernels
    found = dots(body(variant(TritonKernel(canonical(fused.block).block)).rendered))
    if precision is None:
        assert not found
    else:
        (dot,) = found
        assert (f'"{precision}"' if precision else "float16") in dot and (precision == "") == ("precision" not in dot)


COMPUTED = """
kernel computed()
  dim i = 64
  dim j = 64
  dim k = 64
  in x: bf16[64, 64] unit 1
  in y: bf16[64, 64] unit 1
  in t: f32[64] unit 0
  out o: f32[64, 64] unit 1
  grid
    alloc a: f32[i:64, k:64] tile
    a[i, k] = x[i, k] * t[i]
    alloc b: f32[j:64, k:64] tile
    b[j, k] = y[j, k] * t[j]
    alloc r: f32[i:64, j:64] tile
    r[i, j] = {gemm} over k: a[i, k] * b[j, k]
    store o[i, j] over i, j = r[i, j]
"""


@pytest.mark.parametrize(("gemm", "kind"), [("gemm", "bfloat16"), ("gemm.f32", "ieee")])
def test_operands_that_are_computed_have_16_bits_unless_they_are_kept(gemm, kind):
    """Also beside an input of float32: statistics, by which queries and keys are normalised."""
    (dot,) = dots(body(code(COMPUTED.format(gemm=gemm))))
    assert kind in dot


def test_a_product_of_a_result_and_a_transposed_result_is_refused():
    both = PRODUCT.replace("in z: f16[64, 64] unit 1\n", "").format(
        r="i:64, l:64", axes="i, l", over="j", a="p[i, j]", b="q[l, j]"
    )
    second = "    alloc q: f32[l:64, j:64] tile\n    q[l, j] = gemm over k: x[l, k] * y[k, j]\n    alloc r"
    with pytest.raises(BackendError, match="transposed product"):
        code(both.replace("    alloc r", second))


def test_selection_is_by_unique_keys():
    text = body(code(TOPK, bins={"i": 2}))
    assert "tf_rank(" in text and "tl.static_range(3)" in text and "-9223372036854775808" in text


# -- pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "pieces"),
    [(64, (64,)), (80, (64, 16)), (576, (512, 64)), (192, (128, 64)), (24, (24,)), (90, (64, 16, 10)), (7, (7,))],
)
def test_lengths_of_pieces(n, pieces):
    assert lengths(n) == pieces
    assert sum(lengths(n)) >= n


def test_pieces_of_a_product():
    text = """
kernel product()
  dim i = 64
  dim j = 64
  dim k = 80
  in x: f16[64, 80] unit 1
  in y: f16[80, 64] unit 1
  out o: f32[64, 64] unit 1
  grid
    alloc s: f32[i:64, j:64] tile
    s[i, j] = gemm over k: x[i, k] * y[k, j]
    store o[i, j] over i, j = s[i, j]
"""
    k = verify(parse(text))
    pieces = verify(cut(k, product_dims(k)))
    shown = show_kernel(pieces)
    assert "gemm over k_0" in shown and "gemm= over k_1: x[i, k_1 + 64]" in shown
    made = body(render(pieces, TritonConfig()))
    assert len(dots(made)) == 2 and "ok_k" not in made
    assert cut(k, ("i", "j")) == k


TWICE = """
kernel twice()
  dim i = 6
  dim j = {columns}
  in x: f32[6, {columns}] unit 1
  in w: f32[{columns}] unit 0
  out y: f32[6, {columns}] unit 1
  grid i:1
    alloc s: f32[i:1] tile
    fill s = 0.0
    for j:16
      s sum= over j: x[i, j]
    for j:16
      store y[i, j] over i, j = x[i, j] * s[i] * w[j]
"""


def test_a_row_read_twice_is_kept_and_read_backwards():
    text = body(code(TWICE.format(columns=64)))
    first, second = text.split("for j_back in")
    assert second.startswith(" tl.range(0, 64, 16") and "j0 = 48 - j_back" in second
    assert first.count('"evict_last"') == 1 and second.count('"evict_first"') == 2  # x and y, not what blocks share
    assert re.search(r"x_w = tl.load\([^\n]*", second)[0].count("evict") == 0


def test_the_ragged_end_of_a_row_read_twice_comes_first():
    text = body(code(TWICE.format(columns=70)))
    second = text[text.index("j_back") :]
    assert second.count("for j_back" if second.startswith("for") else "j_back in") == 2
    assert second.index("mask=") < second.index("for j_back")


PAIRS = """
kernel pairs(R)
  dim i = R
  dim k = 64
  dim l = 32
  dim m = {last}
  in a: f32[R, 64] unit 1
  in b: f32[64, 32, {last}] unit 2
  out y: f32[R, 32, {last}] unit 2
  grid i:16
    alloc t: f32[i:16, l:32, m:{last}] tile
    t[i, l, m] = gemm over k: a[i, k] * b[k, l, m]
    store y[i, l, m] over i, l, m = t[i, l, m]
"""


@pytest.mark.parametrize("last", [2, 8])
def test_few_last_columns_of_a_right_operand_are_laid_transposed(last):
    """Triton has no layout of shared memory for them."""
    made = body(code(PAIRS.format(last=last)))
    assert "tl.dot(" in made and ("tl.permute(tl.reshape(tl.permute(" in made) == (last < 8)


WEIGHTS = """
kernel weights(R)
  dim i = R
  dim k = {deep}
  dim l = {last}
  in a: bf16[R, {deep}] unit 1
  in b: bf16[{last}, {deep}] unit 1
  out y: f32[R, {last}] unit 1
  grid i:64
    alloc t: f32[i:64, l:{last}] tile
    t[i, l] = gemm over k: a[i, k] * b[l, k]
    store y[i, l] over i, l = t[i, l]
"""


@pytest.mark.parametrize(("last", "deep", "turned"), [(256, 128, True), (512, 64, True), (512, 128, False)])
def test_no_tall_operand_is_turned_in_shared_memory(last, deep, turned):
    """Triton 3.6 reads other elements of it than it wrote there."""
    made = body(code(WEIGHTS.format(last=last, deep=deep), TritonConfig(warps=8)))
    assert "tl.dot(" in made and ("tl.permute(" in made) == turned


PERHAPS = """
kernel halves(R)
  dim i = R
  dim s = 2
  dim t = 1
  dim l = 16
  in x: f32[31, R] unit 1
  out y: f32[2, R] unit 1
  grid s:1 i:16
    alloc a: f32[i:16, l:16] tile
    alloc b: f32[i:16] tile
    fill a = 0.0
    fill b = 0.0
    for t:1 in 0 .. (minimum(31, tile_start(s) * 16 + 16) - tile_start(s) * 16) // 16
      a[i, l] = a[i, l] + x[s * 16 + t * 16 + l, i]
    b[i] sum= over l: a[i, l]
    store y[s, i] over s, i = b[i]
"""


def test_a_loop_of_perhaps_one_round_is_a_loop():
    """Its statements are of one index: lanes would need statements that reduce over them."""
    assert "for t0 in tl.range(0, t_hi, 1" in body(code(PERHAPS))


def test_a_row_read_once_has_no_hints():
    once = TWICE.format(columns=64).replace("x[i, j] * s[i]", "s[i]")
    assert "evict" not in body(code(once)) and "back" not in body(code(once))


def test_names_are_given_once():
    s = Scopes()
    names = [s.fresh(stem) for stem in ("x_a", "x_a", "x_a_1", "x_a", "x_a_1")]
    assert len(set(names)) == len(names)


def test_what_must_hold_in_a_loop_is_asserted_once_behind_it():
    """An assertion is a call, which spills registers, and a barrier."""
    s = Scopes()
    s.open()
    for n, lanes in enumerate(("True", "ok", "True")):
        s.checked(f"i{n} < 9", "exists", 1, lanes, (8,))
    s.close("for k in range(4):", loop=True)
    s.checked("i9 < 9", "exists", 0, "True", (8,))
    s.checked("i < 9", "exists", 0, "True", ())
    lines = s.finished()
    assert lines[0] == "exist = tl.full([8], True, tl.int1)"
    assert "    exist = exist & exists & (exists_2 | ~(ok)) & exists_3" in lines
    assert lines[-2:] == ["tf_exist(exist & exists_4, True)", "tf_exist(exists_5, True)"]
    assert sum("tf_exist" in x for x in lines) == 2


def test_every_line_of_source_is_python():
    for kernel, bins in ((SOFTMAX, {"j": 16}), (TOPK, {"i": 2}), (ROWS.format(rows=5, columns=9), {})):
        r = code(kernel, bins=bins)
        compile(r.source, r.name, "exec")
        assert re.match(r"import triton\n", r.source)


def test_interpreted_sources_have_plain_ranges():
    text = body(code(SOFTMAX.replace("for j:4", "for j:2"), TritonConfig(), bins={"i": 8}, interpreted=True))
    assert "tf_range(" in text and "tl.range(" not in text


def test_a_plain_difference_is_not_scaled_before_it_is_taken_where_float32_is_kept():
    kept = body(code(SOFTMAX, TritonConfig({"i": 4, "j": 4})))
    assert "tl.exp(" in kept and "tl.exp2(" not in kept  # large scores: (x - m) is exact, x log2 e - m log2 e is not
    narrow = body(code(SOFTMAX.replace("f32[R, C]", "f16[R, C]"), TritonConfig({"i": 4, "j": 4})))
    assert "tl.exp2(" in narrow


@pytest.mark.parametrize("tile,by_map", [(64, 2), (128, 2)])
def test_a_ragged_end_inside_a_tensor_is_not_read_by_tensor_map(tile, by_map):
    """What lies behind a segment's end is the next segment, not zeros."""
    config = TritonConfig({"i": 1, "j": 64, "k": 64, "l": tile}, stages=3, descriptors=True)
    k = TritonKernel(split_product(), lambda block, sizes: config)
    made = body(variant(k).rendered)
    assert made.count(".load([") == by_map
    assert made.count("mask=ok_l") == (0 if 320 % tile == 0 else 2)


READ = """
block rows()
  input x: {kind}[{held}, {columns}]
  input w: f32[{columns}]
  dim i = {rows}
  dim j = {columns}
  result y[{out}]: f32
  forall i
    init s[i]: f32 = 0.0
    for j
      accum s = sum[j] {read}
    {store}
  return y
"""
SUMS = {"out": "i", "store": "store y[i] over (i) = s[i]"}
ALL_OF_IT = {"out": "i, j", "store": "store y[i, j] over (i, j) = s[i] * w[j]"}


def streams_by(
    rows: int = 8192, columns: int = 4096, kind: str = "bf16", read: str = "x[i, j] * w[j]", each: int = 1, **more: str
) -> frozenset[str]:
    """each: rows of the result for every row of x."""
    facts = {"rows": rows * each, "held": rows, "columns": columns, "kind": kind, "read": read}
    return passing(parse_block(READ.format(**facts, **(more or SUMS))))


def test_what_is_read_once_and_is_larger_than_the_cache_streams_by():
    assert streams_by() == {"x"}  # the weights are for all rows
    assert streams_by(rows=1024) == frozenset()  # the next kernel may find it in the cache
    assert streams_by(kind="f32", rows=4096) == {"x"}


def test_what_several_blocks_read_does_not_stream_by():
    assert streams_by(read="x[i, j] * x[i, maximum(j - 1, 0)]") == frozenset()
    assert streams_by(read="x[i // 2, j]", each=2) == frozenset()


def test_nothing_streams_by_where_as_much_is_written():
    assert streams_by(**ALL_OF_IT) == frozenset()


def test_neighbours_that_share_a_sector_do_not_stream_by():
    assert streams_by(rows=1 << 23, columns=3, kind="f32") == frozenset()
    assert streams_by(rows=1 << 22, columns=32, kind="bf16") == {"x"}


def test_what_streams_by_leaves_the_cache_first():
    once = TWICE.format(columns=64).replace("x[i, j] * s[i]", "s[i]")
    text = body(code(once, passing=frozenset({"x"})))
    assert re.search(r"x_x = tl.load\([^\n]*", text)[0].count("evict_first") == 1
    assert re.search(r"x_w = tl.load\([^\n]*", text)[0].count("evict") == 0


POWER = """
kernel power()
  dim i = 16
  in x: f32[16] unit 0
  out y: f32[16] unit 0
  grid i:16
    store y[i] over i = ({base}) ** {n}
"""


@pytest.mark.parametrize("n", [0.25, 0.75, 1.5, "-0.75"])
def test_powers_of_normal_numbers_in_quarters_are_roots(n):
    text = body(code(POWER.format(base="x[i] * x[i] + 1.0", n=n)))
    assert "tl.sqrt(" in text and "pow(" not in text


@pytest.mark.parametrize(
    ("base", "n", "function"),
    [
        ("x[i]", 0.75, "tf_pow"),
        ("x[i] * x[i]", 0.75, "tf_pow_of_positive"),
        ("x[i] * x[i] + 1.0", 0.7, "tf_pow_of_positive"),
    ],
)
def test_other_powers_are_functions(base, n, function):
    """Without branches; one of what is not negative has no signs to see to."""
    text = body(code(POWER.format(base=base, n=n)))
    assert f"{function}(" in text
    assert f"tl.full([], {n}, tl.float32))" in text  # not made of the base: infinity times 0 is NaN


NINTHS = """
kernel ninths()
  dim i = 64
  in x: f32[64] unit 0
  out y: f32[64] unit 0
  grid i:64
    store y[i] over i = x[i] / {by}
"""


@pytest.mark.parametrize(
    ("by", "made"),
    [
        (9.0, "tf_by_parts(x_x, 0.1111111044883728, 6.6227"),
        (8.0, "(x_x * 0.125)"),
        (1e35, "(x_x / 1e+35)"),
        ("x[i]", "(x_x / x_x)"),
    ],
)
def test_a_number_that_divides_is_multiplied_by_as_its_inverse(by, made):
    assert made in body(code(NINTHS.format(by=by)))


ROUNDED = """
kernel rounded()
  dim i = 8
  dim j = 64
  in x: f32[8, 64] unit 1
  out y: f32[8, 64] unit 1
  out z: f32[8]
  grid i:1
    alloc m: f32[i:1] tile
    m[i] = max over j: abs(x[i, j])
    store z[i] over i = m[i] / 127.0
    store y[i, j] over i, j = round(x[i, j] / (m[i] / 127.0))
"""


def test_a_number_divides_where_something_is_rounded_as_it_does_in_eager():
    """x / (max |x| / 127) is half of a whole number where x is half of the maximum: the scale's last place decides."""
    text = body(code(ROUNDED))
    assert "tf_times(v_m, 0.007874015718698502)" in text and ", 127.0" not in text


PLANES = """
kernel planes()
  dim i = 6
  dim c = 4
  dim j = 8
  dim l = 30
  in x: f32[6, 4, 8, 30]
  out y: f32[6]
  out z: f32[6, 8]
  grid i:2
    alloc s: f32[i:2] tile
    alloc t: f32[i:2, j:8] tile
    s = sum over c, j, l: x[i, c, j, l]
    t = max over c, l: x[i, c, j, l]
    store y[i] over i = s[i]
    store z[i, j] over i, j = t[i, j]
"""


def test_axes_that_are_reduced_and_side_by_side_are_one():
    """One after the other, warps hand on all that the other axes have: 60.5 us on an H100 for 33 MB of images."""
    found = code(PLANES)
    lines = [x for x in body(found).splitlines() if "tl.sum(" in x or "tl.reduce(" in x]
    assert "tl.sum(tl.reshape(" in lines[0] and "[2, 1024]), 1)" in lines[0]  # 4 x 8 x 32 lanes
    assert lines[1].count("tl.reduce(") == 1 and "[2, 8, 128]), 2, tf_max)" in lines[1]


@pytest.mark.parametrize(("rows", "joined"), [(1, True), (2, False), (4, True)])
def test_axes_are_one_where_the_threads_of_a_row_are_neighbours(rows, joined):
    """Vectors of 4 elements: 8 threads have the 30 of a line, and 8 threads of two rows, not of four, are apart."""
    text = PLANES.replace("8, 30]", "8, 30] unit 3").replace("i:2", f"i:{rows}")
    line = next(x for x in body(code(text)).splitlines() if "tl.sum(" in x)
    assert ("tl.reshape(" in line) == joined


def test_lines_of_16_bits_take_half_the_threads():
    text = PLANES.replace("8, 30]", "8, 30] unit 3").replace("i:2", "i:4").replace("x: f32", "x: bf16")
    line = next(x for x in body(code(text)).splitlines() if "tl.sum(" in x)
    assert "tl.reshape(" not in line


DIVIDED = """
kernel divided()
  dim i = 4096
  in x: f32[14, 304] unit 1
  in n: {dtype}[4096] unit 0
  out y: f32[4096] unit 0
  out z: i64[4096] unit 0
  grid i:1024
    store y[i] over i = x[i // 304, i % 304]
    store z[i] over i = n[i] // {by} + n[i] % {by}
"""


def test_quotients_of_positions_are_products_and_those_by_powers_of_two_shifts():
    """The compiler does not know that positions are not below 0; data may be, and a shift rounds them down all the
    same."""
    text = body(code(DIVIDED.format(dtype="i64", by=16)))
    m, s = inverse(304)
    assert f"tf_whole(i_i, {m}, {s})" in text and f"tf_rest(i_i, {m}, {s}, 304)" in text
    assert ">> 4" in text and "& 15" in text and "tf_floordiv" not in text
    data = body(code(DIVIDED.format(dtype="i64", by=12)))
    assert "tf_floordiv(x_n, 12)" in data and "tf_mod(x_n, 12)" in data


def test_inverses_are_exact_for_all_positions():
    for n in (*range(3, 2000, 7), 58320, 2**16 + 1, 2**30 + 1, 2**31 - 1):
        m, s = inverse(n)
        most = (2**31 - 1) // n * n
        assert m < 2**32
        for x in {0, 1, n - 1, n, n + 1, 2**31 - 1, 2**31 - 2, most, most - 1, min(most + n - 1, 2**31 - 1)}:
            assert x // n == x * m >> (32 + s), (x, n)


WHOLE = """
kernel parts()
  dim i = 4096
  in x: f32[8192] unit 0
  out y: f32[4096] unit 0
  grid i:1024
    store y[i] over i = x[i64(floor(f32(i) * {step}))]
"""


def test_whole_parts_that_are_positions_have_32_bits():
    assert ".to(tl.int64)" not in body(code(WHOLE.format(step=1.5)))
    assert ".to(tl.int64)" in body(code(WHOLE.format(step=1e6)))


CHOSEN = """
kernel chosen(R, C)
  dim i = R
  dim j = C
  in x: f32[C, R, 8] unit 2
  in at: i64[R] unit 0
  out y: f32[R]
  grid i:4
    alloc t: f32[i:4] tile
    fill t = 0.0
    for j:1
      t = t[i] + x[j, i, within(at[i], 8)]
    store y[i] over i = t[i]
"""


def test_a_load_stands_in_its_loop_though_the_index_that_data_chose_stands_before():
    """The index has an address of its own, which says nothing of where the load may stand."""
    before, loop = body(code(CHOSEN)).split("for j0 in")
    assert "x_at = tl.load(" in before
    assert "p_x + j0" in loop
    assert "j0" not in before


ONE_INDEX = """
kernel one_index()
  dim i = 4096
  dim j = 1
  in x: f32[4096, 3] unit 1
  in y: f32[4096] unit 0
  in z: f32[4096] unit 0
  out o: f32[4096] unit 0
  grid i:1024
    alloc s: f32[i:1024] tile
    fill s = 0.0
    for j:1
      s = s[i] + x[i, j + 1] * where(j + 1 < 1, z[i], where(j + 1 < 2, y[i], z[i]))
    store o[i] over i = s[i]
"""


def test_conditions_on_an_index_that_is_a_number_are_decided():
    """Triton takes no condition of numbers for a mask, and would compile what such conditions discard."""
    text = body(code(ONE_INDEX)).split("pid =")[1]
    assert "tl.where" not in text and "(0 + 1)" not in text
    assert "p_y" in text and "p_z" not in text


def test_a_square_that_is_subtracted_is_rounded_first():
    """A mean of squares less the square of the mean, of one element: 0, not what a fused multiply-subtract leaves."""
    (k,) = made(lambda s, m: (s - m * m).relu(), *(meta(64, 32, dtype=torch.float32) for _ in "sm"))
    assert "- tf_times(" in variant(k).rendered.source
