"""Which statements are convolutions of a library, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefold.tensor.convolution import convolution, is_windowed
from tilefold.tensor.index_simplify import const
from tilefold.tensor.product import library_product
from tilefold.tensor.text import parse

HEAD = """program f()
  input x: f32[2, 8, 13, 15]
  input w: f32[6, 8, 3, 3]
  dim n = 2
  dim o = 6
  dim y = {y}
  dim v = {v}
  dim c = 8
  dim k = 3
  dim l = 3
"""


def found(body: str, y: int = 13, v: int = 15):
    p = parse(f"{HEAD.format(y=y, v=v)}  out[n, o, y, v]: f32 = sum[c, k, l] {body}\n  return out\n")
    return convolution(p.body[0], p)


def guarded(y: str, v: str, conditions: str) -> str:
    return f"where({conditions}, x[n, c, {y}, {v}], 0.0) * w[o, c, k, l]"


PADDED = "(y + k - 1 >= 0) & (y + k - 1 < 13) & (v + l - 1 >= 0) & (v + l - 1 < 15)"


def test_padding_is_a_guard_of_both_ends():
    v = found(guarded("y + k - 1", "v + l - 1", PADDED))
    assert v is not None and [(s.stride, s.dilation, s.padding) for s in v.space] == [(1, 1, 1)] * 2
    assert (v.batch, v.outs, v.channels, v.groups) == (("n",), ("o",), ("c",), ())


def test_strides_and_dilations_are_factors():
    v = found("x[n, c, y * 2 + k, v + l * 3] * w[o, c, k, l]", y=6, v=9)
    assert v is not None and [(s.stride, s.dilation, s.padding) for s in v.space] == [(2, 1, 0), (1, 3, 0)]


def test_a_guard_without_the_factor_of_stride_and_dilation_is_of_the_same_places():
    conditions = "(y + k - 1 >= 0) & (y + k - 1 < 7) & (v * 2 + l * 2 - 2 >= 0) & (v + l - 1 < 8)"
    v = found(guarded("y * 2 + k * 2 - 2", "v * 2 + l * 2 - 2", conditions), y=7, v=8)
    assert v is not None and [(s.stride, s.dilation, s.padding) for s in v.space] == [(2, 2, 2)] * 2
    assert [s.extent for s in v.space] == [const(13), const(15)]
    odd = found(guarded("y * 2 + k * 2 - 1", "v + l", "(y + k - 1 >= 0) & (y + k < 7)"), y=6, v=13)
    assert odd is not None and odd.space[0].padding == 1 and odd.space[0].extent == const(13)


def test_padding_that_only_the_first_window_reaches_needs_no_other_guard():
    """Windows 5 apart, from -1: the last of 3 reads places 9 to 11 of 13."""
    v = found(guarded("y * 5 + k - 1", "v + l", "y * 5 + k - 1 >= 0"), y=3, v=13)
    assert v is not None and (v.space[0].stride, v.space[0].padding, v.space[0].extent) == (5, 1, const(13))


@pytest.mark.parametrize(
    "start, end",
    [("y + k - 2 >= 0", "y + k - 1 < 7"), ("y + k - 1 >= 0", "y + k - 1 < 6"), ("y + k >= 0", "y + k < 8")],
)
def test_a_guard_of_fewer_or_more_places_is_no_padding(start: str, end: str):
    assert found(guarded("y * 2 + k * 2 - 2", "v + l", f"({start}) & ({end})"), y=7, v=13) is None


@pytest.mark.parametrize(
    "body, y, v",
    [
        (guarded("y + k - 1", "v + l - 1", "(y + k - 1 < 13) & (v + l - 1 >= 0) & (v + l - 1 < 15)"), 13, 15),
        (guarded("y + k - 1", "v + l - 1", "(y + k - 1 >= 0) & (v + l - 1 >= 0) & (v + l - 1 < 15)"), 13, 15),
        (guarded("y + k - 1", "v + l - 1", f"{PADDED} & (c < 4)"), 13, 15),  # a mask that is no padding
        (guarded("y + k - 1", "v + l - 1", PADDED).replace("0.0", "1.0"), 13, 15),  # padding by ones
        ("x[n, c, y * 2 + k, v + l * 3] * w[o, c, k, l]", 5, 9),  # a place less than the library makes
        ("x[n, c, 10 - y + k, v + l] * w[o, c, k, l]", 11, 13),  # the image from its end
        ("x[n, c, y + k, v + l] * w[o, c, k, k]", 11, 13),  # taps of the diagonal
        ("maximum(x[n, c, y + k, v + l], 0.0) * w[o, c, k, l]", 11, 13),  # not a plain operand
        ("x[n, c, y + k, v + k] * w[o, c, k, l]", 11, 13),
    ],
)
def test_what_no_library_computes(body, y, v):
    assert found(body, y, v) is None


def test_groups_may_be_a_dim_or_a_quotient():
    text = """program f()
  input x: f32[2, 4, {c}, 9]
  input w: f32[8, {c}, 3]
  dim n = 2
  dim o = 8
  dim y = 7
  dim c = {c}
  dim k = 3
  out[n, o, y]: f32 = sum[c, k] x[n, o // 2, c, y + k] * w[o, c, k]
  return out
"""
    p = parse(text.format(c=5))
    v = convolution(p.body[0], p)
    assert v is not None and v.spread == 2 and not v.depthwise(p.sizes)
    p = parse(text.format(c=5).replace("o // 2", "o // 3"))
    assert convolution(p.body[0], p) is None
    p = parse(
        "program f()\n  input x: f32[2, 8, 9]\n  input w: f32[8, 1, 3]\n"
        "  dim n = 2\n  dim o = 8\n  dim y = 7\n  dim k = 3\n"
        "  out[n, o, y]: f32 = sum[k] x[n, o, y + k] * w[o, 0, k]\n  return out\n"
    )
    v = convolution(p.body[0], p)
    assert v is not None and v.groups == ("o",) and v.depthwise(p.sizes) and not v.pointwise


def test_groups_may_be_stretches_of_outputs_of_several_dims():
    """A group norm has groups of its own, which may be more than the convolution's or fewer."""
    text = """program f()
  input x: f32[2, 4, 5, 9]
  input w: f32[{g}, {o}, 5, 3]
  dim n = 2
  dim g = {g}
  dim o = {o}
  dim y = 7
  dim c = 5
  dim k = 3
  out[n, g, o, y]: f32 = sum[c, k] x[n, {group}, c, y + k] * w[g, o, c, k]
  return out
"""
    for g, o, group, spread in ((8, 2, "g // 2", 4), (2, 8, "g * 2 + o // 4", 4), (2, 6, "g * 2 + o // 3", 3)):
        p = parse(text.format(g=g, o=o, group=group))
        v = convolution(p.body[0], p)
        assert v is not None and (v.spread, v.outs, v.groups) == (spread, ("g", "o"), ())
    for g, o, group in ((4, 4, "g // 2"), (2, 8, "g * 2 + o // 5"), (2, 8, "g + o // 4"), (8, 2, "o * 2 + g // 4")):
        p = parse(text.format(g=g, o=o, group=group))
        assert convolution(p.body[0], p) is None


def test_scores_of_heads_that_share_keys_are_none():
    """Two axes of the keys tell the group: an index that queries have too, and a quotient."""
    text = """program f()
  input k: f32[4, 2, 96, 16]
  input q: f32[4, 10, 1, 16]
  dim i = 4
  dim j = 10
  dim l = 96
  dim m = 16
  out[i, j, l]: f32 = sum[m] k[i, j // 5, l, m] * q[i, j, 0, m]
  return out
"""
    p = parse(text)
    assert convolution(p.body[0], p) is None


def test_a_matrix_product_is_none_but_single_taps_are_one():
    text = """program f()
  input x: f32[2, 8, 5, 5]
  input w: f32[6, 8{unit}]
  dim n = 2
  dim o = 6
  dim y = 5
  dim v = 5
  dim c = 8
  out[n, o, y, v]: f32 = sum[c] x[n, c, y, v] * w[o, c{zero}]
  return out
"""
    p = parse(text.format(unit=", 1, 1", zero=", 0, 0"))
    v = convolution(p.body[0], p)
    assert v is not None and v.pointwise and len(v.space) == 2 and not is_windowed(p.body[0])
    p = parse(text.format(unit="", zero=""))
    assert convolution(p.body[0], p) is None
    text = text.replace("[2, 8", "[1, 8").replace("[n, o", "[o").replace("[n, c", "[0, c").replace("  dim n = 2\n", "")
    p = parse(text.format(unit=", 1, 1", zero=", 0, 0"))
    v = convolution(p.body[0], p)  # one image: its rows are no batch
    assert v is not None and v.pointwise and v.batch == () and [s.out for s in v.space] == ["y", "v"]


@pytest.mark.parametrize(
    "x, w",
    [
        ("[0, h, j, c]", "[0, h, o, c]"),  # scores of one sequence
        ("[n, j, 0, h, c]", "[n, 0, h, o, c]"),  # a part of packed queries, keys and values
        ("[0, j, c]", "[o, c]"),
        ("[o, c]", "[0, j, c]"),
        (
            "[n, c, h, j]",
            "[n, h, c, o, 0]",
        ),  # values of heads times a feature map of keys, which ends in an axis of one
    ],
)
def test_places_of_axes_make_no_convolution_of_a_product(x: str, w: str):
    extent = {"n": 2, "h": 4, "j": 9, "o": 6, "c": 8}
    for other in (1, 3):
        shapes = [", ".join(str(extent.get(ix, other)) for ix in ld.strip("[]").split(", ")) for ld in (x, w)]
        used = [d for d in extent if d in x + w]
        dims = "\n".join(f"  dim {d} = {extent[d]}" for d in used)
        p = parse(
            f"program f()\n  input x: f32[{shapes[0]}]\n  input w: f32[{shapes[1]}]\n{dims}\n"
            f"  out[{', '.join(used[:-1])}]: f32 = sum[c] x{x} * w{w}\n  return out\n"
        )
        assert convolution(p.body[0], p) is None


def test_a_matrix_and_a_vector_are_none():
    """`x @ v[:, None]`: an axis of extent 1, but not several outputs of a place."""
    p = parse("""program f()
  input x: f32[8, 5]
  input v: f32[5, 1]
  dim i = 8
  dim k = 5
  out[i]: f32 = sum[k] x[i, k] * v[k, 0]
  return out
""")
    assert convolution(p.body[0], p) is None


def test_a_place_of_an_axis_is_no_window():
    """`x[:, 0] @ w`: a product of a slice, which a library takes, not a convolution whose stride leaves one place."""
    text = """program f()
  input x: f32[4, 8, 5]
  input w: f32[5, 6]
  dim i = 4
  dim j = 6
  dim k = 5
  out[i, j]: f32 = sum[k] x[i, {at}, k] * w[k, j]
  return out
"""
    for at in (0, 3):
        p = parse(text.format(at=at))
        assert convolution(p.body[0], p) is None and library_product(p.body[0], p.sizes) is not None


BLOCKS = """program f()
  input x: {kind}[2, 8, 5, 7]
  input w: {kind}[8, 6, 2, 2]
  dim n = 2
  dim o = 6
  dim y = 5
  dim v = 7
  dim c = 8
  dim k = 2
  dim l = 2
  out[{dims}]: {kind} = sum[c] x[n, c, y, v] * w[c, o, k, l]
  return out
"""


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_blocks_of_a_transposed_convolution_are_planes_of_channels(kind):
    p = parse(BLOCKS.format(kind=kind, dims="n, o, k, l, y, v"))
    found = convolution(p.body[0], p)
    assert found is not None and found.pointwise and found.outs == ("o", "k", "l") and len(found.space) == 2
    turned = parse(BLOCKS.format(kind=kind, dims="n, y, v, o, k, l"))
    assert convolution(turned.body[0], turned) is None  # a product of rows
    theirs = replace(turned.body[0], origin="aten.convolution.default")
    assert convolution(theirs, turned) is not None


def test_single_taps_behind_places_are_a_products_unless_they_may_be_rounded():
    text = BLOCKS.replace("[2, 8, 5, 7]", "[2, 5, 7, 8]").replace("[8, 6, 2, 2]", "[6, 8, 1, 1]")
    text = text.replace("x[n, c, y, v] * w[c, o, k, l]", "x[n, y, v, c] * w[o, c, 0, 0]")
    for kind, origin, wanted in (
        ("f32", "aten.convolution.default", True),
        ("bf16", "aten.convolution.default", False),
        ("f32", "aten.mm.default", False),
    ):
        p = parse(text.format(kind=kind, dims="n, y, v, o"))
        found = convolution(replace(p.body[0], origin=origin), p)
        assert (found is not None) is wanted, (kind, origin)


def test_turned_weights_without_their_tap_may_be_rounded_too():
    """The gradient of an image reads them so: eager computes it in TF32 as well."""
    text = BLOCKS.replace("[2, 8, 5, 7]", "[2, 5, 7, 8]").replace("[8, 6, 2, 2]", "[6, 8]")
    text = text.replace("x[n, c, y, v] * w[c, o, k, l]", "x[n, y, v, c] * w[o, c]").format(
        kind="f32", dims="n, y, v, o"
    )
    p = parse(text)
    found = convolution(replace(p.body[0], origin="aten.convolution_backward.default"), p)
    assert found is not None and found.pointwise and (found.batch, len(found.space)) == (("n",), 2)
    assert convolution(replace(p.body[0], origin="aten.mm.default"), p) is None


GROUPED = """program f()
  input x: bf16[2, 5, 7, 3, 8]
  input w: bf16[18, 8, 1, 1]
  dim n = 2
  dim y = 5
  dim v = 7
  dim o = 18
  dim c = 8
  out[n, y, v, o]: bf16 = sum[c] x[n, y, v, {group}, c] * w[o, c, 0, 0]
  return out
"""


def test_groups_that_are_stretches_of_outputs_are_a_convolution_of_single_taps():
    p = parse(GROUPED.format(group="o // 6"))
    found = convolution(p.body[0], p)
    assert found is not None and found.pointwise and found.spread == 6 and len(found.space) == 2
    few = parse(GROUPED.format(group="o // 9"))  # two groups of an image that has three
    assert convolution(few.body[0], few) is None
