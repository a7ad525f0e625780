"""Operands of channels-last convolutions are stored so, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.expr import loads
from tilefold.tensor.channels_last import channels_last_operands, taps_in_front
from tilefold.tensor.convolution import convolution, is_channels_last
from tilefold.tensor.inline import absorb_copies
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

DIMS = """  dim n = 2
  dim o = 6
  dim y = 7
  dim v = 5
  dim c = 8
  dim k = 3
  dim l = 3
  dim h = 9
"""
TEXT = (
    """program f()
  input x: f32[2, 8, 9, 7]
  input w: f32[6, 8, 3, 3]
"""
    + DIMS
    + """  dim b = 7
  r[n, c, h, b]: f32 = maximum(x[n, c, h, b], 0.0)
  out[n, y, v, o]: f32 = sum[c, k, l] r[n, c, y + k, v + l] * w[o, c, k, l]
  return {results}
"""
)


def converted(text: str, contiguous: dict[str, int]):
    p = parse(text)
    q = channels_last_operands(p, contiguous)
    inputs = {i.name: torch.randn([int(e.value) for e in i.shape], dtype=torch.float64) for i in p.inputs}
    want, got = run(p, inputs, exact=True), run(q, inputs, exact=True)
    for name in p.outputs:
        torch.testing.assert_close(got[name], want[name])
    return q


def test_a_map_is_stored_as_its_only_reader_wants_it_and_an_input_is_copied():
    q = converted(TEXT.format(results="out"), {})
    assert [c.name for c in q.body] == ["r", "w_last", "out"]
    assert q.body[0].dims == ("n", "h", "b", "c")
    form = convolution(q.body[-1], q)
    assert form is not None and is_channels_last(q.body[-1], form)
    assert form.x.index[-1].dim == form.w.index[-1].dim == "c"


@pytest.mark.parametrize(
    "text, contiguous, copies",
    [
        (TEXT.format(results="out, r"), {"w": 1}, ["r_last"]),  # somebody else needs it as it is
        (TEXT.format(results="out").replace("r[n, c, y", "x[n, c, y"), {"x": 1, "w": 1}, []),  # already so
        (TEXT.format(results="out").replace("r[n, c, y", "x[n, c, y"), {}, ["x_last", "w_last"]),
        (TEXT.format(results="out").replace("out[n, y, v, o]", "out[n, o, y, v]"), {}, []),  # not wanted
    ],
)
def test_what_is_copied(text, contiguous, copies):
    q = converted(text, contiguous)
    assert [c.name for c in q.body if c.name not in ("r", "out")] == copies


def test_images_are_convolved_as_they_lie_and_what_copies_the_result_is_a_kernel():
    """The library would convert operands and result: it reads images with contiguous channels, the user gets planes."""
    text = TEXT.format(results="z").replace("  return", "  z[n, o, y, v]: f32 = out[n, y, v, o]\n  return")
    assert [c.name for c in absorb_copies(parse(text)).body] == ["r", "out", "z"]
    single = text.replace("sum[c, k, l]", "sum[c]").replace("y + k, v + l", "y, v").replace("c, k, l]", "c, 0, 0]")
    assert [c.name for c in absorb_copies(parse(single)).body] == ["r", "z"]  # a product writes either


def test_the_gradient_of_an_image_is_not_turned_by_the_library_either():
    text = """program g()
  input dy: f32[2, 9, 7, 6]
  input w: f32[6, 8, 3, 3]
  dim n = 2
  dim o = 6
  dim c = 8
  dim h = 9
  dim b = 7
  dim k = 3
  dim l = 3
  g[n, h, b, c]: f32 = sum[o, k, l] where((h + 1 - k >= 0) & (h + 1 - k < 9), where((b + 1 - l >= 0) & (b + 1 - l < 7), dy[n, h + 1 - k, b + 1 - l, o], 0.0), 0.0) * w[o, c, k, l]
  z[n, c, h, b]: f32 = g[n, h, b, c]
  return z
"""  # noqa: E501
    p = parse(text)
    asked = replace(p, body=(replace(p.body[0], origin="aten.convolution_backward.default"), p.body[1]))
    assert [c.name for c in absorb_copies(asked).body] == ["g", "z"]


GROUPS = """program f()
  input x: f32[2, 9, 7, 6]
  input w: f32[6, 3, 3, 3]
  dim n = 2
  dim o = 6
  dim y = 7
  dim v = 5
  dim c = 3
  dim k = 3
  dim l = 3
  dim h = 9
  dim b = 7
  dim g = 2
  r[n, h, b, g, c]: f32 = maximum(x[n, h, b, g * 3 + c], 0.0)
  out[{made}]: f32 = sum[c, k, l] r[n, y + k, v + l, o // 3, c] * w[o, c, k, l]
  return out
"""


@pytest.mark.parametrize(("made", "stored"), [("n, o, y, v", "ngchb"), ("n, y, v, o", "nhbgc")])
def test_groups_read_images_in_the_order_of_their_result(made, stored):
    q = converted(GROUPS.format(made=made), {})
    assert "".join(q.body[0].dims) == stored and q.body[0].name == "r"


@pytest.mark.parametrize(
    ("index", "after", "copies"),
    [
        ("o, c, k, l", True, ["r", "v2", "out"]),  # a result that is this copy is the operand, wherever it stood
        ("o, c, k, l", False, ["v2", "r", "out"]),
        ("o, c, l, k", True, ["r", "w_last", "out", "v2"]),  # another order
    ],
)
def test_a_copy_that_is_there_already_is_read(index, after, copies):
    line = f"  v2[o, k, l, c]: f32 = w[{index}]\n"
    text = TEXT.format(results="out, v2")
    text = text.replace("  return", line + "  return") if after else text.replace("  r[n", line + "  r[n")
    q = converted(text, {})
    assert [c.name for c in q.body] == copies


def test_a_slice_of_an_operand_is_read_where_it_is():
    text = TEXT.format(results="out").replace("x: f32[2, 8", "x: f32[2, 10").replace("r[n, c, y", "x[n, c, y")
    assert [c.name for c in converted(text, {"w": 1}).body if c.name != "r"] == ["out"]


def test_windows_of_one_channel_want_taps_in_front():
    text = """program f()
  input x: f32[2, 8, 9]
  input w: f32[8, 3]
  dim n = 2
  dim c = 8
  dim y = 7
  dim v = 5
  dim k = 3
  out[n, y, c]: f32 = sum[k] x[n, c, y + k] * w[c, k]
  return out
"""
    q = converted(text, {})
    assert [c.name for c in q.body] == ["x_last", "out"]
    assert taps_in_front(q, []) == q
    q = taps_in_front(q, ["out"])
    assert [c.name for c in q.body] == ["x_last", "w_last", "out"]
    x, w = torch.randn(2, 8, 9, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    torch.testing.assert_close(run(q, {"x": x, "w": w})["out"], run(parse(text), {"x": x, "w": w})["out"])
    assert [len(c.dims) for c in q.body[:2]] == [3, 2] and q.body[1].dims[-1] == q.body[1].body.index[0].dim


@pytest.mark.parametrize("index, copies", [("x[n, c, y]", ["x_last"]), ("x[n, y, c]", [])])
def test_rows_on_both_sides_of_what_is_summed_are_put_together(index, copies):
    shape = "3, 5, 7" if copies else "3, 7, 5"
    q = converted(
        f"""program f()
  input x: f32[{shape}]
  input w: f32[5, 4]
  dim n = 3
  dim c = 5
  dim y = 7
  dim o = 4
  out[n, y, o]: f32 = sum[c] {index} * w[c, o]
  return out
""",
        {},
    )
    assert [c.name for c in q.body if c.name != "out"] == copies


@pytest.mark.parametrize("given, copies", [(True, []), (False, ["s"])])
def test_an_input_that_can_be_a_batch_stays_as_it_lies(given, copies):
    """Whoever computes it writes it in the order of one product; what is given would be copied."""
    s = "" if given else "\n  s[n, c, y]: f32 = maximum(x[n, c, y], 0.0)"
    q = converted(
        f"""program f()
  input x: f32[3, 5, 136]
  input w: f32[128, 5]
  dim n = 3
  dim c = 5
  dim y = 136
  dim o = 128{s}
  out[n, o, y]: f32 = sum[c] {"x" if given else "s"}[n, c, y] * w[o, c]
  return out
""",
        {},
    )
    assert [c.name for c in q.body if c.name != "out"] == copies
    assert given or q.body[0].dims == ("n", "y", "c")


def test_a_result_that_only_the_program_reads_is_written_as_a_batch():
    text = """program f()
  input a: f32[3, 5, 136]
  input x: f32[128, 5]
  dim e = 3
  dim c = 5
  dim f = 136
  dim n = 128
  h[n, e, f]: f32 = sum[c] x[n, c] * a[e, c, f]
  out[n, e, f]: f32 = exp(h[n, e, f])
  return {results}
"""
    q = converted(text.format(results="out"), {})
    assert [(c.name, c.dims) for c in q.body] == [("h", ("e", "n", "f")), ("out", ("n", "e", "f"))]
    assert [c.name for c in converted(text.format(results="out, h"), {}).body] == ["a_last", "h", "out"]


POOLED = (
    """program f()
  input x: f32[2, 8, 9, {width}]
  input w: f32[6, 8, 1, 1]
"""
    + DIMS
    + """  dim b = {width}
  means[n, y, v, c]: f32 = sum[k, l] x[n, c, y + k, v + l] * 0.1
  twice[n, y, v, c]: f32 = x[n, c, y, v] + x[n, c, y + 2, v + 2]
  rows[n, c, y, v]: f32 = sum[k, l] x[n, c, y + k, v + l] * 0.3
  out[n, h, b, o]: f32 = sum[c] x[n, c, h, b] * w[o, c, 0, 0]
  return means, twice, rows, out
"""
)


@pytest.mark.parametrize("width", [10, 8])
def test_windows_stored_as_a_copy_lies_read_that(width):
    """Others keep to the tensor: few places, a result in planes, or planes whose rows fill lanes."""
    q = converted(POOLED.format(width=width), {})
    read = {c.name: {x.tensor for x in loads(c.body)} for c in q.body}
    assert read["out"] == {"x_last", "w"}
    assert read["means"] == ({"x_last"} if width == 10 else {"x"}) and read["twice"] == read["rows"] == {"x"}
    names = [c.name for c in q.body]
    assert width != 10 or names.index("x_last") < names.index("means")
