"""Operands of products that are read at computed positions are stored plainly first, where that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.expr import loads
from tilefold.tensor.interp import run
from tilefold.tensor.operands import multiplied_alike, stored_operands
from tilefold.tensor.product import library_product
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: {kind}[4, {rows}, 8]
  input w: {kind}[8, 5]
  dim b = 4
  dim i = 6
  dim k = 8
  dim o = 5
  out[b, i, o]: {kind} = sum[k] x[{at}] * w[k, o]
  return out
"""


def program(at: str, kind: str = "f32", rows: int = 6):
    return parse(TEXT.format(at=at, kind=kind, rows=rows))


def test_shifted_rows_are_stored_and_then_a_product_of_the_library():
    p = program("b, (i + 2) % 6, k")
    q = stored_operands(p)
    copy, product = q.body
    assert copy.reducer is None and copy.dims == ("b", "i", "k")
    assert library_product(p.body[0], p.sizes) is None and library_product(product, q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(4, 6, 8, generator=gen), "w": torch.randn(8, 5, generator=gen)}
    torch.testing.assert_close(run(q, given)["out"], given["x"].roll(-2, 1) @ given["w"])


WINDOWS = """program f()
  input x: bf16[{images}, 6, 8]
  input w: bf16[8, 5]
  dim b = {images}
  dim i = 6
  dim k = 8
  dim o = 5
  out[b, i, o]: bf16 = sum[k] x[b, (i + 2) % 6, k] * w[k, o]
  return out
"""


@pytest.mark.parametrize(("images", "stored"), [(4, False), (30, True), (64, False)])
def test_rows_of_short_dims_alone_are_stored_where_they_fill_a_tile_together(images: int, stored: bool):
    """A kernel's tile has rows of one dim: of 30 and 6 it would have 30, of 180."""
    p = parse(WINDOWS.format(images=images))
    q = stored_operands(p)
    assert [c.name for c in q.body] == (["x_read", "out"] if stored else ["out"])
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(images, 6, 8, generator=gen).bfloat16(), "w": torch.randn(8, 5, generator=gen).bfloat16()}
    want = given["x"].double().roll(-2, 1) @ given["w"].double()
    torch.testing.assert_close(run(q, given)["out"].double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("at", "kind", "rows"),
    [
        ("b, i, k", "f32", 6),  # plain
        ("b // 2, i, k", "f32", 6),  # heads that share
        ("b, (i + 2) % 6, k", "bf16", 6),  # matrix units take it where it is
        ("b, (i + 2) % 6, k", "f32", 3),  # more is read than there is
    ],
)
def test_what_stays_as_it_is(at, kind, rows):
    p = program(at, kind, rows)
    assert stored_operands(p) is p


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_matrix_of_nothing_is_stored_in_the_other_operands_type(kind):
    text = TEXT.replace(" * w[k, o]", " * where(k == o, 1.0, 0.0)").replace("  input w: {kind}[8, 5]\n", "")
    p = parse(text.format(at="b, i, k", kind=kind, rows=6))
    constant, product = (q := stored_operands(p)).body
    assert constant.dtype is product.dtype and library_product(product, q.sizes) is not None
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(constant.dtype.torch_dtype)
    torch.testing.assert_close(run(q, {"x": x})["out"], x[..., :5])


PIXELS = """program f()
  input x: {kind}[3, 5, 8]
  input g: {kind}[3, 7, 6]
  dim m = 3
  dim n = 2
  dim p = 2
  dim i = 8
  dim o = 6
  read[m, n, p, i]: {kind} = x[m, n * 2 + p, i]
  out[i, o]: {kind} = sum[m, n, p] x[m, n * 2 + p + 1, i] * g[m, n * 3 + {at}, o]
  return out, read
"""


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_what_is_read_at_several_summed_dims_of_an_axis_is_stored(kind):
    """The gradient of an embedding of patches, which are a sequence behind a token of its own."""
    p = parse(PIXELS.format(kind=kind, at="p"))
    q = stored_operands(p)
    assert [c.name for c in q.body] == ["read", "x_read", "g_read", "out"]
    assert {c.dtype for c in q.body} == {p.dtype_of("x")}
    assert library_product(p.body[1], p.sizes) is None and library_product(q.body[-1], q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, n, d, generator=gen).to(p.dtype_of("x").torch_dtype) for n, d in ((5, 8), (7, 6)))
    want = torch.einsum("mqi,mqo->io", x[:, 1:].double(), g[:, [0, 1, 3, 4]].double())
    got = run(q, {"x": x, "g": g})["out"].double()
    torch.testing.assert_close(got, want, rtol=1e-2 if kind == "bf16" else 1e-5, atol=1e-2 if kind == "bf16" else 1e-5)


EXPERTS = """program f()
  input x: {kind}[3, 4]
  input at: i64[6]
  input w: {kind}[4, 5]
  input v: {kind}[4, 5]
  dim i = 6
  dim k = 4
  dim l = 4
  dim o = 5
  one[i, o]: {kind} = sum[k] x[within(at[i], 3), k] * w[k, o]
  other[i, o]: {kind} = sum[l] x[within(at[i], 3), l] * v[l, o]
  return one, other
"""


def test_rows_of_a_table_are_stored_once_for_all_products_of_float32():
    """Experts of the same tokens: no kernel of ours multiplies float32 as fast as the library."""
    p = parse(EXPERTS.format(kind="f32"))
    q = stored_operands(p)
    assert [c.name for c in q.body] == ["x_read", "one", "other"]
    assert all(library_product(c, q.sizes) is not None for c in q.body[1:])
    gen = torch.Generator().manual_seed(0)
    given = {n: torch.randn(s, generator=gen) for n, s in (("x", (3, 4)), ("w", (4, 5)), ("v", (4, 5)))}
    at = torch.tensor([2, 0, 1, 1, 2, 0])
    found = run(q, {**given, "at": at})
    for name, by in (("one", "w"), ("other", "v")):
        torch.testing.assert_close(found[name], given["x"][at] @ given[by])
    assert stored_operands(bf16 := parse(EXPERTS.format(kind="bf16"))) is bf16


def test_digits_of_one_dim_are_stored_whole():
    """Frames that were repeated: the library takes rows that lie side by side."""
    text = TEXT.replace("dim i = 6", "dim i = 12").replace("[4, {rows}, 8]", "[4, 3, 4, 8]")
    p = parse(text.format(at="b, i // 4, i % 4, k", kind="bf16", rows=3))
    q = stored_operands(p)
    assert q.body[0].dims == ("b", "i", "k") and library_product(q.body[1], q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(4, 3, 4, 8, generator=gen).bfloat16(), "w": torch.randn(8, 5, generator=gen).bfloat16()}
    want = given["x"].double().reshape(4, 12, 8) @ given["w"].double()
    torch.testing.assert_close(run(q, given)["out"].double(), want, rtol=1e-2, atol=1e-2)


PATCHES = """program f()
  input x: bf16[4, {channels}, 344]
  input w: bf16[{channels}, 16, 128]
  input dy: bf16[4, 42, 128]
  dim b = 4
  dim c = {channels}
  dim i = 42
  dim k = 16
  dim o = 128
  {statement}
  return out
"""
FORWARD = "out[b, i, o]: bf16 = sum[c, k] x[b, c, i * 8 + k] * w[c, k, o]"
BACKWARD = "out[k, o]: bf16 = sum[b, i] x[b, 0, i * 8 + k] * dy[b, i, o]"


@pytest.mark.parametrize(
    ("statement", "channels", "origin", "stored"),
    [
        (FORWARD, 1, "aten.mm.default", True),  # no vector of channels, and no more than the result
        (FORWARD, 8, "aten.mm.default", False),  # the library convolves them
        (FORWARD, 1, "aten.convolution.default", False),  # asked for as that
        (BACKWARD, 1, "aten.mm.default", False),  # a short sum
    ],
)
def test_windows_of_few_channels_are_patches_that_the_library_multiplies(statement, channels, origin, stored):
    p = parse(PATCHES.format(channels=channels, statement=statement))
    p = replace(p, body=(replace(p.body[0], origin=origin),))
    q = stored_operands(p)
    assert (len(q.body) == 2) is stored
    if stored:
        assert library_product(q.body[-1], q.sizes) is not None
        p = parse(PATCHES.format(channels=channels, statement=statement).replace("bf16", "f32"))
        q = stored_operands(p)
        gen = torch.Generator().manual_seed(0)
        shapes = {i.name: [int(e.value) for e in i.shape] for i in p.inputs}
        given = {n: torch.randn(s, generator=gen, dtype=torch.float64) for n, s in shapes.items()}
        torch.testing.assert_close(run(q, given)["out"], run(p, given)["out"])


def test_a_long_sum_for_a_few_places_is_a_product_of_patches():
    """The gradient of a projection of patches: no library of convolutions cuts it."""
    text = PATCHES.replace("[4, ", "[128, ").replace("dim b = 4", "dim b = 128")
    q = stored_operands(parse(text.format(channels=1, statement=BACKWARD)))
    assert len(q.body) == 2 and library_product(q.body[-1], q.sizes) is not None


HEADS = """program f()
  input x: bf16[2, 3, 6, 8]
  input w: bf16[5, 3, 8]
  dim b = 2
  dim i = 4
  dim h = 3
  dim k = 8
  dim o = 5
  out[b, i, o]: bf16 = sum[h, k] x[b, h, i + 2, k] * w[o, h, k]
  return out
"""


def test_tokens_behind_the_first_are_stored_where_heads_are_summed_too():
    """Of one summed dim they are read where they are: `test_what_stays_as_it_is`."""
    p = parse(HEADS)
    q = stored_operands(p)
    assert [c.name for c in q.body] == ["x_read", "out"]
    assert library_product(q.body[1], q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(2, 3, 6, 8, generator=gen).bfloat16(),
        "w": torch.randn(5, 3, 8, generator=gen).bfloat16(),
    }
    want = torch.einsum("bhik,ohk->bio", given["x"][:, :, 2:].double(), given["w"].double())
    torch.testing.assert_close(run(q, given)["out"].double(), want, rtol=1e-2, atol=1e-2)


def test_a_copy_that_is_a_result_is_what_the_product_reads():
    """A backward wants it too: it is made once, in front of the product."""
    text = HEADS.replace("  return out", "  kept[b, i, h, k]: bf16 = x[b, h, i + 2, k]\n  return out, kept")
    q = stored_operands(parse(text))
    assert [c.name for c in q.body] == ["kept", "out"]
    assert library_product(q.body[1], q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    given = {n: torch.randn(s, generator=gen).bfloat16() for n, s in (("x", (2, 3, 6, 8)), ("w", (5, 3, 8)))}
    want = torch.einsum("bhik,ohk->bio", given["x"][:, :, 2:].double(), given["w"].double())
    torch.testing.assert_close(run(q, given)["out"].double(), want, rtol=1e-2, atol=1e-2)


MIXED = """program f()
  input s: f32[16, 24]
  input v: bf16[24, 8]
  input k: bf16[16, 8]
  dim i = 16
  dim j = 24
  dim d = 8
  p[i, j]: f32 = exp(s[i, j])
  y[i, d]: {kind} = sum[j] p[i, j] * v[j, d]
  z[j, d]: bf16 = sum[i] p[i, j] * k[i, d]
  return {kept}y, z
"""


def mixed(kind: str = "bf16", kept: str = ""):
    p = parse(MIXED.format(kind=kind, kept=kept))
    q = multiplied_alike(p, {"y", "z"})
    gen = torch.Generator().manual_seed(0)
    given = {"s": torch.randn(16, 24, generator=gen)}
    given |= {n: torch.randn(m, 8, generator=gen).bfloat16() for n, m in (("v", 24), ("k", 16))}
    want, got = run(p, given), run(q, given)
    for n in ("y", "z"):
        torch.testing.assert_close(got[n].float(), want[n].float(), rtol=2e-2, atol=5e-2)
    return p, q


def test_an_operand_of_float32_is_stored_as_the_products_multiply_it():
    """The library multiplied the weights of 16 x 6 heads of 64 x 729 scores, whose gradients were of float32, without
    matrix units: 160 us on an H100 in four products, after it had converted their other operands."""
    _, q = mixed()
    assert [(c.name, c.dtype.value) for c in q.body] == [("p", "bf16"), ("y", "bf16"), ("z", "bf16")]


def test_one_that_others_read_is_copied_once():
    _, q = mixed(kept="p, ")
    assert [(c.name, c.dtype.value) for c in q.body][:3] == [("p", "f32"), ("p_short", "bf16"), ("y", "bf16")]
    assert len(q.body) == 4 and q.body[-1].body.args[0].tensor == "p_short"


def test_products_that_are_of_float32_read_it_as_it_is():
    _, q = mixed(kind="f32")
    assert [c.name for c in q.body] == ["p", "y", "p_short", "z"]
    assert [ld.tensor for ld in loads(q.body[1].body)] == ["p", "v"]
    p = parse(MIXED.format(kind="bf16", kept=""))
    assert multiplied_alike(p, set()) is p
