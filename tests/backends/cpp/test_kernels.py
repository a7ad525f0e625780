"""Compiled kernels against the interpreter, which defines their meaning, and against torch."""

from __future__ import annotations

import pytest
import torch

from tests.backends.cpp.harness import compare, compiled, hostile, strided
from tests.tile.kernels import ATTENTION, GATHER, SOFTMAX, TOPK
from tilefold.algebra.dtypes import DType
from tilefold.backends.cpp.render import render
from tilefold.tile.text import parse


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (7, 9), (4, 0), (0, 5), (10, 133)])
def test_softmax(shape):
    x, y = torch.randn(shape) * 5, torch.full(shape, 9.0)
    compare(SOFTMAX, {"x": x, "y": y}, {"R": shape[0], "C": shape[1]})
    torch.testing.assert_close(y, x.softmax(-1))


def test_softmax_of_hostile_rows():
    x = hostile(40, 37)
    compare(SOFTMAX, {"x": x, "y": torch.empty_like(x)}, {"R": 40, "C": 37})


POWERS = """
kernel powers(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C]
  in r: f32[R]
  out y: f32[R, C]
  grid i:3
    for j:4
      store y[i, j] over i, j = x[i, j] * (r[i] + 1.0)**{exponent}
"""


@pytest.mark.parametrize("exponent", ["2.0", "3.0", "-1.0"])
def test_powers_of_a_row_are_named_where_they_are_computed(exponent):
    """Outside of the loop over columns, with what they are powers of."""
    x, r = torch.randn(5, 13), torch.rand(5)
    y = torch.empty_like(x)
    compare(POWERS.format(exponent=exponent), {"x": x, "r": r, "y": y}, {"R": 5, "C": 13})
    torch.testing.assert_close(y, x * (r[:, None] + 1) ** float(exponent))


@pytest.mark.parametrize("n", [0, 1, 4, 13, 40])
def test_causal_attention(n):
    q, k, v = (torch.randn(2, 3, n, 8) for _ in range(3))
    o = torch.empty_like(q)
    compare(ATTENTION, {"q": q, "k": k, "v": v, "o": o}, {"S": n})
    ref = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    torch.testing.assert_close(o, ref)


def test_strides_are_free():
    text = ATTENTION.replace(" unit 3", "")
    q, k, v = (strided(torch.randn(2, 3, 13, 8), *order) for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)))
    o = strided(torch.empty(2, 3, 13, 8), 2, 0, 3, 1)
    compare(text, {"q": q, "k": k, "v": v, "o": o}, {"S": 13})


def test_a_unit_axis_must_be_contiguous():
    q, k, v, o = (torch.randn(8, 2, 3, 4).permute(1, 2, 3, 0) for _ in range(4))
    with pytest.raises(ValueError, match=r"stride .* on axis 3, not 1"):
        compiled(ATTENTION)({"q": q, "k": k, "v": v, "o": o}, {"S": 4})


@pytest.mark.parametrize("n", [0, 1, 5])
def test_topk(n):
    x, w = torch.randn(n, 6), torch.randn(6, 10)
    w[:, 3] = w[:, 7]  # ties
    compare(TOPK, {"x": x, "w": w, "y": torch.empty(n, 3), "at": torch.empty(n, 3, dtype=torch.int64)}, {"N": n})


def test_gather_with_narrow_types():
    ids = torch.tensor([3, 0, 6, 6, 1])
    table = torch.randn(7, 5).bfloat16()
    y = torch.empty(5, 5, dtype=torch.float8_e4m3fn)
    compare(GATHER, {"ids": ids, "table": table, "y": y, "top": torch.empty(())}, {"N": 5})


SELECTS = """
kernel selects(N)
  dim i = 5
  dim j = N
  dim r = 4
  in x: f32[5, N]
  out hi: i64[5]
  out lo: i64[5]
  out best: f32[5, 4]
  out at: i64[5, 4]
  grid i:2
    alloc a: f32[i:2] tile
    alloc ai: i64[i:2] tile
    alloc b: f32[i:2] tile
    alloc bi: i64[i:2] tile
    alloc c: f32[i:2, r:4] tile
    alloc ci: i64[i:2, r:4] tile
    a[i], ai[i] = argmax over j: x[i, j] -> j
    b[i], bi[i] = argmin over j: x[i, j] -> j + 100
    c[i, r], ci[i, r] = topk over j: x[i, j] -> j
    store hi[i] over i = ai[i]
    store lo[i] over i = bi[i]
    store best[i, r] over i, r = c[i, r]
    store at[i, r] over i, r = ci[i, r]
"""


@pytest.mark.parametrize("n", [0, 1, 3, 40])
@pytest.mark.parametrize("make", [hostile, lambda *s: torch.randint(0, 3, s).float()])
def test_best_elements(n, make):
    x = make(5, n)
    out = {"hi": torch.empty(5), "lo": torch.empty(5), "at": torch.empty(5, 4)}
    out = {k: v.to(torch.int64) for k, v in out.items()}
    compare(SELECTS, {"x": x, "best": torch.empty(5, 4), **out}, {"N": n})


COMBINES = """
kernel combines(N)
  dim i = 3
  dim j = N
  dim r = 2
  in x: f32[3, N]
  in p: i64[3, N]
  out best: f32[3, 2]
  out at: i64[3, 2]
  grid i:1
    alloc c: f32[i:1, r:2] tile
    alloc ci: i64[i:1, r:2] tile
    c[i, r], ci[i, r] = topk over j: x[i, j] -> p[i, j]
    store best[i, r] over i, r = c[i, r]
    store at[i, r] over i, r = ci[i, r]
"""


def test_slots_that_a_segment_did_not_fill_are_no_candidates():
    none = float("-inf")
    x = torch.tensor([[none, none, none, -3.0], [5.0, 2.0, none, 7.0], [none, none, none, none]])
    p = torch.tensor([[0, -1, 4, 5], [0, 1, -1, 4], [-1, -1, 7, -1]])
    out = {"best": torch.empty(3, 2), "at": torch.empty(3, 2, dtype=torch.int64)}
    compare(COMBINES, {"x": x, "p": p, **out}, {"N": 4})
    assert out["at"].tolist() == [[5, 0], [4, 0], [7, -1]]
    assert out["best"].tolist() == [[-3.0, none], [7.0, 5.0], [none, none]]


LANES = """
kernel lanes(N, M)
  dim i = 2
  dim k = N
  dim j = M
  in x: {dtype}[2, N, M] unit 2
  in p: i64[2, N, M] unit 2
  out top: {dtype}[2, M]
  out at: i64[2, M]
  out low: i64[2, N]
  out late: i64[2, M]
  grid i:1
    alloc a: {dtype}[i:1, j:size(j)] tile
    alloc ai: i64[i:1, j:size(j)] tile
    alloc b: {dtype}[i:1, k:size(k)] tile
    alloc bi: i64[i:1, k:size(k)] tile
    alloc c: {dtype}[i:1, j:size(j)] tile
    alloc ci: i64[i:1, j:size(j)] tile
    fill a = {least}
    fill ai = -1
    for k:7
      a[i, j], ai[i, j] argmax= over k: x[i, k, j] -> k
    fill b = {most}
    fill bi = -1
    for j:100
      b[i, k], bi[i, k] argmin= over j: x[i, k, j] -> 3 * j + i
    c[i, j], ci[i, j] = argmax over k: x[i, k, j] -> p[i, k, j]
    store top[i, j] over i, j = a[i, j]
    store at[i, j] over i, j = ai[i, j]
    store low[i, k] over i, k = bi[i, k]
    store late[i, j] over i, j = ci[i, j]
"""


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i64", "i8"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (40, 17), (9, 257), (0, 5)])
def test_best_elements_of_lanes(dtype, shape):
    kind = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "i64": torch.int64, "i8": torch.int8}
    torch.manual_seed(sum(shape))
    x = torch.randint(-2, 3, (2, *shape)).to(kind[dtype])  # ties
    least, most = (float("-inf"), float("inf")) if x.is_floating_point() else (-128, 127)
    if x.is_floating_point():
        specials = torch.tensor([-torch.inf, torch.inf, torch.nan, -0.0], dtype=x.dtype)
        x = torch.where(torch.rand(x.shape) < 0.3, specials[torch.randint(0, 4, x.shape)], x)
        if shape[0] > 2:
            x[0, :, 0], x[1, 0] = -torch.inf, torch.inf
    unfilled = x.double() == -torch.inf
    p = torch.where(unfilled, torch.randint(-1, 50, x.shape), torch.randint(0, 50, x.shape))
    ints = {
        n: torch.empty(2, m, dtype=torch.int64) for n, m in (("at", shape[1]), ("low", shape[0]), ("late", shape[1]))
    }
    text = LANES.format(dtype=dtype, least=least, most=most)
    compare(
        text, {"x": x, "p": p, "top": torch.empty(2, shape[1], dtype=x.dtype), **ints}, {"N": shape[0], "M": shape[1]}
    )


ACROSS = """
kernel across(N, M)
  dim i = 2
  dim j = N
  dim k = M
  dim h = 3
  in x: f32[2, N, M] unit 2
  in y: {dtype}[2, M + 1, N + 2] unit 2
  in z: {dtype}[M, N] unit 1
  in t: f32[3, M, N] unit 2
  out o: f32[2, N, M] unit 2
  out n: {dtype}[2, N, M] unit 2
  out s: f32[2, M, N] unit 2
  grid i:1 j:{tile} k:{tile}
    store o[i, j, k] over i, j, k = x[i, j, k] + f32(y[i, k + 1, j + 2]) * f32(z[k, j])
    store n[i, j, k] over i, j, k = z[k, j]
    alloc a: f32[i:1, k:{tile}, j:{tile}] tile
    a[i, k, j] = sum over h: t[h, k, j] * x[i, j, k]
    store s[i, k, j] over i, k, j = a[i, k, j]
"""


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8", "bool", "i64"])
@pytest.mark.parametrize(
    ("shape", "tile"), [((1, 1), 64), ((8, 130), 200), ((40, 17), 24), ((37, 128), 128), ((0, 9), 16)]
)
def test_what_lies_across_is_turned(dtype, shape, tile):
    n, m = shape
    torch.manual_seed(n + m)
    kind = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "i64": torch.int64, "i8": torch.int8}
    of = kind.get(dtype, torch.bool)
    make = hostile if of.is_floating_point else lambda *s: torch.randint(-3, 4, s)
    ins = {"x": torch.randn(2, n, m), "y": make(2, m + 1, n + 2).to(of), "z": make(m, n).to(of)}
    ins["t"] = torch.randn(3, m, n)
    outs = {"o": torch.empty(2, n, m), "n": torch.empty(2, n, m, dtype=of), "s": torch.empty(2, m, n)}
    compare(ACROSS.format(dtype=dtype, tile=tile), {**ins, **outs}, {"N": n, "M": m})


def test_only_what_is_inside_of_its_tensor_is_turned():
    text = ACROSS.format(dtype="f32", tile=32)
    assert render(parse(text)).count("tf::turn(") >= 3
    assert "tf::turn(y" not in render(parse(text.replace("k + 1, j + 2", "k + 2, j + 2")))


REDUCERS = """
kernel reducers(R, C)
  dim i = R
  dim j = C
  in x: {dtype}[R, C]
  out y: {dtype}[6, R]
  out z: {dtype}[6, C]
  grid
    alloc a: {dtype}[i:size(i)] panel
    alloc b: {dtype}[j:size(j)] panel
{body}
"""


def reducers(dtype: str) -> str:
    lines = []
    ops = ("sum", "max", "min", "prod") if dtype != "bool" else ("any", "all", "max", "min")
    for n, op in enumerate(ops):
        lines += [f"    a = {op} over j: x[i, j]", f"    store y[{n}, i] over i = a[i]"]
        lines += [f"    b = {op} over i: x[i, j]", f"    store z[{n}, j] over j = b[j]"]
    lines += ["    a max= over j: x[i, j]", "    store y[5, i] over i = a[i]"]
    return REDUCERS.format(dtype=dtype, body="\n".join(lines))


@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (70, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "bool"])
def test_reducers_along_both_axes(dtype, shape):
    kinds = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "i32": torch.int32, "bool": torch.bool}
    kind = kinds[dtype]
    x = (torch.randn(shape) * 2).to(kind)
    y, z = torch.zeros(6, shape[0], dtype=kind), torch.zeros(6, shape[1], dtype=kind)
    compare(reducers(dtype), {"x": x, "y": y, "z": z}, {"R": shape[0], "C": shape[1]})


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 200, 4096])
def test_long_sums_down_columns_are_added_up_in_runs(rows):
    """One after the other, 4096 elements lose 3e-6 and more."""
    x = torch.rand(rows, 8) + 1
    y, z = torch.zeros(6, rows), torch.zeros(6, 8)
    compiled(reducers("f32"))({"x": x, "y": y, "z": z}, {"R": rows, "C": 8})
    torch.testing.assert_close(z[0].double(), x.double().sum(0), rtol=3e-7, atol=0)


def test_reductions_of_hostile_values():
    x = hostile(30, 41, huge=2.0, tiny=0.5)  # sums and products of huge ones depend on their order
    compare(reducers("f32"), {"x": x, "y": torch.zeros(6, 30), "z": torch.zeros(6, 41)}, {"R": 30, "C": 41})


INDEXING = """
kernel indexing(N)
  dim i = N
  dim j = 7
  in x: f32[N, 7]
  in order: i32[N]
  in start: i64[]
  out shifted: f32[N, 7]
  out mirrored: f32[N, 7]
  out permuted: f32[N, 7]
  out halves: f32[N, 7]
  out slope: f32[N, 7]
  out spread: f32[N, 14]
  grid i:4
    store shifted[i, j] over i, j = where((j >= 2) & (j < 5), x[i, j - 2], where(i < 1, -1.0, x[i - 1, j]))
    store mirrored[i, j] over i, j = x[N - 1 - i, 6 - j]
    store permuted[i, j] over i, j = x[order[i], (j * 3) % 7]
    store halves[i, j] over i, j = where(start < 0, x[i + 1000, j - 1000], x[i // 2, j // 2])
    store slope[i, j] over i, j = 0.25 * (j - i) + (i * i % 5) / (j + 1)
    store spread[i, 2 * j + 1] over i, j = x[i, j]
    store spread[i, 2 * j] over i, j = -x[i, j]
"""


@pytest.mark.parametrize("n", [0, 1, 6, 19])
def test_index_expressions(n):
    x = torch.randn(n, 7)
    out = {k: torch.zeros(n, 7) for k in ("shifted", "mirrored", "permuted", "halves", "slope")}
    ins = {"x": x, "order": torch.randperm(n).int(), "start": torch.tensor(1), "spread": torch.zeros(n, 14)}
    compare(INDEXING, {**ins, **out}, {"N": n})


def test_loads_out_of_range_read_nothing_outside():
    """A user's bad gather index stays inside the tensor."""
    n = 3
    x = torch.randn(n, 7)
    out = {k: torch.zeros(n, 7) for k in ("shifted", "mirrored", "permuted", "halves", "slope")}
    order = torch.tensor([2**30, -5, 1], dtype=torch.int32)
    ins = {"x": x, "order": order, "start": torch.tensor(-1), "spread": torch.zeros(n, 14)}
    compare(INDEXING, {**ins, **out}, {"N": n})


BLOCKED = """
kernel blocked(N)
  dim i = N
  dim j = 11
  in x: f32[N, 11]
  out y: f32[N, 11]
  grid
    for i:8 in 0 .. minimum(size(i), 20)
      alloc row: f32[i:8, j:11] tile
      row = x[i, j] * 2.0
      for j:4 in 2 .. size(j)
        store y[i, j] over i, j = row[i, j] + j
"""


@pytest.mark.parametrize("n", [0, 3, 8, 33])
def test_loops_with_bounds(n):
    compare(BLOCKED, {"x": torch.randn(n, 11), "y": torch.zeros(n, 11)}, {"N": n})


NARROW = """
kernel narrow(N)
  dim i = N
  in x: f32[N]
  in w: f64[N]
  in k: i64[N]
{outs}
  grid i:64
{stores}
"""
KINDS = {
    "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "i32": torch.int32, "i16": torch.int16,
    "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def test_every_type_is_stored_cast_and_loaded_as_in_torch():
    outs = "\n".join(f"  out {s}_{d}: {d}[N]" for d in KINDS for s in ("x", "w", "k", "c"))
    stores = []
    for d in KINDS:
        stores += [f"    store {s}_{d}[i] over i = {s}[i]" for s in ("x", "w", "k")]
        stores += [f"    store c_{d}[i] over i = {d}({d}(x[i]) + 1)"]
    n = 300
    x = torch.randn(n) * torch.tensor([1e-3, 1, 30])[torch.arange(n) % 3]
    out = {f"{s}_{d}": torch.zeros(n, dtype=t) for d, t in KINDS.items() for s in ("x", "w", "k", "c")}
    k = torch.arange(n) - 100
    compare(NARROW.format(outs=outs, stores="\n".join(stores)), {"x": x, "w": x.double(), "k": k, **out}, {"N": n})


def test_shapes_and_dtypes_are_checked():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"y has shape \(3, 5\), not \(3, 4\)"):
        compiled(SOFTMAX)({"x": x, "y": torch.empty(3, 5)}, {"R": 3, "C": 4})
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        compiled(SOFTMAX)({"x": x.double(), "y": x.clone()}, {"R": 3, "C": 4})


def test_threads_follow_torch():
    before = torch.get_num_threads()
    x = torch.randn(100, 50)
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            compare(SOFTMAX, {"x": x, "y": torch.empty_like(x)}, {"R": 100, "C": 50})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", ["floor", "ceil", "trunc", "round", "abs"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_what_leaves_integers_as_they_are(op: str, dtype: torch.dtype) -> None:
    name = {torch.int64: "i64", torch.int32: "i32", torch.bool: "bool"}[dtype]
    text = f"kernel f(N)\n  dim i = N\n  in x: {name}[N] unit 0\n  out y: {name}[N] unit 0\n  grid i:8\n"
    text += f"    store y[i] over i = {op}(x[i])\n"
    x = (torch.arange(21) % 3 - (0 if dtype is torch.bool else 1)).to(dtype)
    y = torch.zeros_like(x)
    compiled(text)({"x": x, "y": y}, {"N": 21})
    assert torch.equal(y, x.abs() if op == "abs" and dtype is not torch.bool else x)


SECONDS = """
kernel seconds(M, N)
  dim i = M
  dim j = N
  in x: {kind}[M, 2 * N] unit 1
  out y: {kind}[M, N]
  out z: {kind}[M, N]
  grid i:1
    store y[i, j] over i, j = x[i, 2 * j + 1]
    store z[i, j] over i, j = x[i, 2 * j]
"""


@pytest.mark.parametrize("kind", ["f32", "f64", "bf16", "i32", "i64", "i8"])
@pytest.mark.parametrize("n", [1, 7, 8, 16, 31, 32, 33, 64, 150])
def test_every_second_element_is_read_and_written_alone(kind, n):
    dtype = DType(kind).torch_dtype
    x = torch.arange(3 * 2 * n).view(3, 2 * n).remainder(100).to(dtype)
    both = torch.full((3, n, 2), 77, dtype=dtype)
    beside = torch.full((3, n, 2), 77, dtype=dtype)
    kernel = compiled(SECONDS.format(kind=kind))
    kernel({"x": x, "y": both[..., 0], "z": beside[..., 1]}, {"M": 3, "N": n})
    assert torch.equal(both[..., 0], x[:, 1::2]) and torch.equal(beside[..., 1], x[:, ::2])
    assert (both[..., 1] == 77).all() and (beside[..., 0] == 77).all()
    turned = x.flip(1).contiguous()
    kernel({"x": turned, "y": both[..., 0], "z": both[..., 1]}, {"M": 3, "N": n})
    assert torch.equal(both[..., 0], turned[:, 1::2]) and torch.equal(both[..., 1], turned[:, ::2])
