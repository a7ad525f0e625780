"""Which statements are gradients of convolutions, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefold.tensor.convolution_gradients import Gradient, gradient, is_last, operand_orders
from tilefold.tensor.text import parse

IMAGE = """program f()
  input dy: f32[2, {y}, {y}, 6]
  input w: f32[6, 3, 3, 8]
  dim n = 2
  dim o = 6
  dim h = 13
  dim v = 13
  dim c = 8
  dim k = 3
  dim l = 3
  out[n, h, v, c]: f32 = sum[o, k, l] {body} * w[o, k, l, c]
  return out
"""
WEIGHT = """program f()
  input x: f32[2, 8, 13, 13]
  input dy: f32[2, 6, {y}, {y}]
  dim n = 2
  dim o = 6
  dim y = {y}
  dim v = {y}
  dim c = 8
  dim k = 3
  dim l = 3
  out[o, c, k, l]: f32 = sum[n, y, v] {body} * dy[n, o, y, v]
  return out
"""


def found(text: str, y: int, body: str, asked: str = "aten.convolution_backward.default") -> Gradient | None:
    p = parse(text.format(y=y, body=body))
    return gradient(replace(p.body[0], origin=asked), p)


def guarded(x: str, *conditions: str) -> str:
    for c in conditions:
        x = f"where({c}, {x}, 0.0)"
    return x


ONE = guarded(
    "dy[n, h + 1 - k, v + 1 - l, o]",
    "(h + 1 - k >= 0) & (h + 1 - k < 13)", "(v + 1 - l >= 0) & (v + 1 - l < 13)",
)  # fmt: skip
TWO = guarded(
    "dy[n, (h + 1 - k) // 2, (v + 1 - l) // 2, o]",
    "(h + 1 - k) % 2 == 0", "(v + 1 - l) % 2 == 0",
    "(h + 1 - k >= 0) & ((h + 1 - k) // 2 < 7)", "(v + 1 - l >= 0) & ((v + 1 - l) // 2 < 7)",
)  # fmt: skip


def test_the_gradient_of_an_image_reads_the_places_whose_windows_have_it():
    v = found(IMAGE, 13, ONE)
    assert v is not None and v.of == "image" and (v.batch, v.outs, v.channels) == ("n", ("o",), ("c",))
    assert [(w.stride, w.dilation, w.padding) for w in v.ways] == [(1, 1, 1)] * 2
    s = found(IMAGE, 7, TWO)
    assert s is not None and [(w.stride, w.padding) for w in s.ways] == [(2, 1)] * 2
    p = parse(IMAGE.format(y=7, body=TWO))
    assert is_last(p.body[0], s) and all(order == sorted(order) for _, order in operand_orders(s))


@pytest.mark.parametrize(
    "y, body",
    [
        (13, ONE.replace("h + 1 - k >= 0", "h - k >= 0")),  # a guard of something else
        (13, guarded("dy[n, h + 1 - k, v + 1 - l, o]", "(h + 1 - k >= 0) & (h + 1 - k < 13)")),  # one is missing
        (13, guarded(ONE, "o < 3")),  # a mask that is no guard
        (13, ONE.replace("0.0", "1.0")),
        (7, TWO.replace("where((h + 1 - k) % 2 == 0, ", "where((h - k) % 2 == 0, ")),  # the other places
        (7, TWO.replace("where((h + 1 - k) % 2 == 0, ", "where(n >= 0, ")),  # places between two
        (6, TWO.replace("< 7", "< 6")),  # a place less than the convolution makes
        (13, ONE.replace("h + 1 - k", "h - 1 + k")),  # a convolution
    ],
)
def test_what_is_no_gradient_of_an_image(y, body):
    assert found(IMAGE, y, body) is None


GROUPED = """program f()
  input dy: f32[2, 13, 13, 2, 3]
  input w: f32[{first}, 3, 3, 3, 4, 2]
  dim n = 2
  dim o = 2
  dim p = 3
  dim h = 13
  dim v = 13
  dim b = 4
  dim c = 2
  dim k = 3
  dim l = 3
  out[n, h, v, b, {last}]: f32 = sum[{rdims}p, k, l] {body} * w[{w}]
  return out
"""


def test_channels_may_be_in_groups_of_a_norm():
    body = ONE.replace(", o]", ", o, p]")
    p = parse(GROUPED.format(first=2, last="c", rdims="o, ", body=body, w="o, p, k, l, b, c"))
    c = replace(p.body[0], origin="aten.convolution_backward.default")
    v = gradient(c, p)
    assert v is not None and (v.outs, v.channels, v.groups) == (("o", "p"), ("b", "c"), False)
    assert is_last(c, v) and all(order == sorted(order) for _, order in operand_orders(v))


def test_groups_of_several_channels_are_no_gradient():
    body = ONE.replace(", o]", ", o, p]")
    p = parse(GROUPED.format(first=2, last="o", rdims="", body=body, w="o, p, k, l, b, 0"))
    assert gradient(replace(p.body[0], origin="aten.convolution_backward.default"), p) is None


PADDED = ("(y * 2 + k - 1 >= 0) & (y * 2 + k - 1 < 13)", "(v * 2 + l - 1 >= 0) & (v * 2 + l - 1 < 13)")


def test_the_gradient_of_a_weight_is_a_convolution_with_large_taps_that_was_asked_for():
    body = guarded("x[n, c, y * 2 + k - 1, v * 2 + l - 1]", *PADDED)
    v = found(WEIGHT, 7, body)
    assert v is not None and v.of == "weight" and (v.batch, v.outs, v.channels) == ("n", ("o",), ("c",))
    assert [(w.stride, w.dilation, w.padding) for w in v.ways] == [(2, 1, 1)] * 2
    assert found(WEIGHT, 7, body, "aten.convolution.default") is None
    assert found(WEIGHT, 7, body, "aten.mul.Tensor") is None


@pytest.mark.parametrize(
    "y, body",
    [
        (7, guarded("x[n, c, y * 2 + k - 1, v * 2 + l - 1]", PADDED[0])),
        (
            6,
            guarded("x[n, c, y * 2 + k - 1, v * 2 + l - 1]", *PADDED),
        ),  # places that the convolution makes are left out
        (7, guarded("x[n, c, y * 2 + k - 1, v * 2 + k - 1]", PADDED[0])),  # taps of the diagonal
        (7, "maximum(x[n, c, y + k, v + l], 0.0)"),  # not a plain operand
    ],
)
def test_what_is_no_gradient_of_a_weight(y, body):
    assert found(WEIGHT, y, body) is None


def test_an_axis_of_unknown_or_no_extent_is_none_of_a_gradient():
    """Of two places of an image, windows of three taps are at no place; and a library wants numbers."""
    text = WEIGHT.replace("13, 13]", "{n}, 13]").replace("y}, {y}]", "y}, 11]").replace("v = {y}", "v = 11")
    body = "x[n, c, y + k, v + l]"
    for size, y in ((2, 0), (13, 11)):
        p = parse(text.format(n=size, y=y, body=body))
        of = gradient(replace(p.body[0], origin="aten.convolution_backward.default"), p)
        assert (of is None) is (y == 0)
    p = parse(text.replace("program f()", "program f(s)").format(n="s + 2", y="s", body=body))
    assert gradient(replace(p.body[0], origin="aten.convolution_backward.default"), p) is None


def test_a_tap_alone_is_an_axis_of_a_gradient():
    """Of a convolution of 1 x 3 taps, whose places are 13 and 11."""
    text = WEIGHT.replace("dim k = 3", "dim k = 1").replace("y}, {y}]", "y}, 11]").replace("v = {y}", "v = 11")
    of = found(text, 13, "x[n, c, y + k, v + l]")
    assert of is not None and [w.taps.value for w in of.ways] == [1, 3]
