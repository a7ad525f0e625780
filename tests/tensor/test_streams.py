"""What streams, and copies of streams for reductions over different axes; the tensor interpreter says what is right."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor import streams
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

GRADIENT = """program gradient()
  input q: f32[2, {s}, 8]
  input k: f32[2, {s}, 8]
  input v: f32[2, {s}, 8]
  input g: f32[2, {s}, 8]
  input m: f32[2, {s}]
  input dot: f32[2, {s}]
  dim b = 2
  dim i = {s}
  dim j = {s}
  dim d = 8
  dim e = 8
  s[b, i, j]: f32 = sum[d] q[b, i, d] * k[b, j, d]
  p[b, i, j]: f32 = exp(where(j <= i, s[b, i, j], -inf) - m[b, i])
  dv[b, j, e]: f32 = sum[i] p[b, i, j] * g[b, i, e]
  dp[b, i, j]: f32 = sum[e] g[b, i, e] * v[b, j, e]
  ds[b, i, j]: f32 = p[b, i, j] * (dp[b, i, j] - dot[b, i])
  slope[b]: f32 = sum[i, j] ds[b, i, j] * (j - i)
  dk[b, j, d]: f32 = sum[i] q[b, i, d] * ds[b, i, j]
  dq[b, i, d]: f32 = sum[j] ds[b, i, j] * k[b, j, d]
  return dv, slope, dk, dq
"""


def program(s: int = 24, text: str = GRADIENT):
    return parse(text.format(s=s))


def test_a_gradient_of_attention_is_one_stream_with_four_ends():
    (found,) = streams.streams(program())
    assert found.members == ("s", "p", "dp", "ds")
    assert found.ends == ("dv", "slope", "dk", "dq")


def test_ends_over_other_axes_get_copies_and_the_values_stay():
    p = program()
    q, copies = streams.apart(p)
    made = {c.name for c in q.body}
    assert {n for n in made if n.endswith("_again")} == {"s_again", "p_again", "dp_again", "ds_again"}
    assert copies == (
        {"s", "p", "dp", "ds", "dv", "dk", "slope_part"},
        {"s_again", "p_again", "dp_again", "ds_again", "dq"},
    )
    gen = torch.Generator().manual_seed(0)
    x = {i.name: torch.randn(*(int(n.value) for n in i.shape), generator=gen) for i in p.inputs}
    x["m"] = x["m"].abs() + 8
    want, got = run(p, x), run(q, x)
    for n in p.outputs:
        torch.testing.assert_close(got[n], want[n], rtol=1e-5, atol=1e-5)


def test_the_sum_of_fewer_axes_is_taken_in_two_stages():
    q, _ = streams.apart(program())
    by_name = {c.name: c for c in q.body}
    first, rest = by_name["slope_part"], by_name["slope"]
    assert (first.dims, first.rdims, rest.rdims) == (("b", "j"), ("i",), ("j",))


@pytest.mark.parametrize(
    ("room", "copied"),
    [
        (streams.Room(4 * 4 * 24 * 24, 2), False),
        (streams.Room(4 * 4 * 24 * 24 - 1, 2), True),  # four tensors of float32, one index of b
        (streams.Room(4 * 4 * 24 * 24, 3), True),  # b leaves two blocks
        (None, True),
    ],
)
def test_a_stream_that_blocks_hold_whole_is_not_copied(room, copied):
    p = program()
    q, copies = streams.apart(p, room)
    assert bool(copies) == copied == any(c.name.endswith("_again") for c in q.body)
    assert copied or q == p


def test_a_stream_of_unknown_length_is_never_held_whole():
    text = GRADIENT.replace("gradient()", "gradient(S)").replace("{s}", "S")
    _, copies = streams.apart(parse(text), streams.Room(1e12, 1))
    assert len(copies) == 2


OWN_PLACE = """program own_place()
  input q: f32[96, 4]
  input k: f32[96, 4]
  dim i = 96
  dim j = 96
  dim d = 4
  s[i, j]: f32 = sum[d] q[i, d] * k[j, d]
  p[i, j]: f32 = exp(s[i, j])
  t[i]: f32 = sum[j] p[i, j]
  u[]: f32 = sum[i] p[i, {place}]
  return t, u
"""


@pytest.mark.parametrize("place", ["i", "(i + 3) % 96"])
def test_what_is_read_at_a_place_that_follows_from_its_row_does_not_stream(place):
    alone = OWN_PLACE.replace("  u[]: f32 = sum[i] p[i, {place}]\n", "").replace(", u", "")
    assert len(streams.streams(parse(alone))) == 1
    assert streams.streams(parse(OWN_PLACE.format(place=place))) == []


def test_ends_whose_names_are_crossed_are_told_apart_by_what_they_read():
    """Queries and keys that are slices of one tensor have gradients with common names."""
    crossed = "dq[b, j, d]: f32 = sum[i] ds[b, j, i] * k[b, i, d]"
    p = program(text=GRADIENT.replace("dq[b, i, d]: f32 = sum[j] ds[b, i, j] * k[b, j, d]", crossed))
    q, copies = streams.apart(p)
    assert [sorted(n for n in part if n[0] == "d" and "p" not in n and "s" not in n) for part in copies] == [
        ["dk", "dv"],
        ["dq"],
    ]
    assert next(c for c in q.body if c.name == "dq").dims == ("b", "i", "d")
    gen = torch.Generator().manual_seed(0)
    x = {i.name: torch.randn(*(int(n.value) for n in i.shape), generator=gen) for i in p.inputs}
    x["m"] = x["m"].abs() + 8
    want, got = run(p, x), run(q, x)
    for n in p.outputs:
        torch.testing.assert_close(got[n], want[n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GRADIENT.format(s=12), "scores that are no larger than queries and keys"),
        (GRADIENT.format(s=24).replace("return dv,", "return ds, dv,"), "a result that has to be in memory"),
        (
            GRADIENT.format(s=24)
            .replace("sum[i, j] ds[b, i, j] * (j - i)", "sum[i] ds[b, i, t[i]]")
            .replace("  input m:", "  input t: i64[24]\n  input m:"),
            "elements at places that data give",
        ),
        (GRADIENT.format(s=24).replace(", 8]", ", 512]").replace("= 8", "= 512"), "features that do not fit on chip"),
    ],
)
def test_what_does_not_stream_stays(text, why):
    p = parse(text)
    assert streams.apart(p) == (p, ()), why


def test_one_kind_of_end_needs_no_copy():
    p = program(
        text=GRADIENT.replace("return dv, slope, dk, dq", "return dq").replace(
            "slope[b]: f32 = sum[i, j] ds[b, i, j] * (j - i)\n  ", ""
        )
    )
    kept = tuple(c for c in p.body if c.name in ("s", "p", "dp", "ds", "dq"))
    p = type(p)(p.name, p.inputs, p.sizes, kept, p.outputs, p.syms)
    assert streams.apart(p) == (p, ())
    assert streams.belongs(p) == {"s", "p", "dp", "ds", "dq"}


def test_a_hidden_layer_does_not_stream():
    p = parse("""program mlp()
  input x: f32[512, 64]
  input w: f32[64, 256]
  input u: f32[256, 64]
  dim i = 512
  dim h = 256
  dim d = 64
  dim e = 64
  a[i, h]: f32 = sum[d] x[i, d] * w[d, h]
  g[i, h]: f32 = tanh(a[i, h])
  y[i, e]: f32 = sum[h] g[i, h] * u[h, e]
  return y
""")
    assert streams.streams(p) == []


WINDOWED = """program f()
  input x: f32[64, 8]
  input w: f32[8, 96]
  input v: f32[96, 8]
  dim i = 64
  dim c = 8
  dim o = 8
  dim h = 96
  wide[i, h]: f32 = sum[c] x[i, c] * w[c, h]
  near[i, h]: f32 = wide[i, h] + {beside}
  mean[h]: f32 = sum[i] near[i, h]
  out[i, o]: f32 = sum[h] near[i, h] * v[h, o]
  return mean, out
"""


def test_what_reads_its_neighbours_does_not_stream():
    """A block of a window that is written out needs rows of other blocks: computed again for each, they are no less
    work than what is saved."""
    beside = "where(i >= 1, wide[i - 1, h], 0.0)"
    assert not streams.streams(parse(WINDOWED.format(beside=beside)))
    (found,) = streams.streams(parse(WINDOWED.format(beside="wide[i, h]")))
    assert found.members == ("wide", "near") and set(found.ends) == {"mean", "out"}


PLACES = """program places()
  input x: f32[20, 42, 8]
  input e: f32[128, 8]
  input v: f32[64, 128]
  input w: f32[{outputs}, 42, 128]
  dim b = 20
  dim m = 42
  dim k = 8
  dim n = 128
  dim o = 64
  dim y = {outputs}
  h[b, m, n]: f32 = sum[k] x[b, m, k] * e[n, k]
  t[b, m, n]: f32 = tanh(h[b, m, n])
  s[b, m, o]: f32 = sum[n] t[b, m, n] * v[o, n]
  z[b, y]: f32 = sum[m, n] t[b, m, n] * w[y, m, n]
  return s, z
"""


@pytest.mark.parametrize(("outputs", "streamed"), [(3, True), (96, False)])
def test_a_stream_whose_first_stage_leaves_as_much_as_it_is_does_not_stream(outputs, streamed):
    """A last layer reads all features of all places: in stages it would leave [20, 42, 96] of [20, 42, 128]."""
    p = parse(PLACES.format(outputs=outputs))
    assert bool(streams.streams(p)) == streamed
    assert ("z_part" in {c.name for c in streams.apart(p)[0].body}) == streamed


WINDOW = """program window()
  input q: f32[2, 14, 14, 8]
  input k: f32[2, 14, 14, 8]
  dim b = 2
  dim x = 14
  dim y = 14
  dim u = 14
  dim v = 14
  dim d = 8
  dim e = 8
  dim {x} = 14
  dim {y} = 14
  dim {u} = 14
  dim {v} = 14
  s[b, x, y, u, v]: f32 = sum[d] q[b, x, y, d] * k[b, u, v, d]
  up[b, x, y, u]: f32 = sum[v] s[b, x, y, u, v]
  across[b, x, y, v]: f32 = sum[u] s[b, x, y, u, v]
  dq[b, {x}, {y}, e]: f32 = sum[{u}, {v}] s[b, {x}, {y}, {u}, {v}] * k[b, {u}, {v}, e]
  return up, across, dq
"""


@pytest.mark.parametrize("names", ["xyuv", "uvxy", "zwtr"])
def test_what_axes_are_called_decides_nothing_about_first_stages(names):
    """Sums over lines of scores keep an axis more than the queries' gradient: in stages that would leave a gradient for
    each line (421 MB of 46 MB of scores). Its statement may call the axes otherwise."""
    given = dict(zip("xyuv", names, strict=True))
    text = WINDOW
    if names != "zwtr":
        text = "\n".join(line for line in text.splitlines() if "dim {" not in line)
    p = parse(text.format(**given))
    assert not streams.streams(p)
    assert "dq_part" not in {c.name for c in streams.apart(p)[0].body}


CHAMFER = """program chamfer()
  input x: f32[2, 40, 3]
  input y: f32[2, 50, 3]
  dim b = 2
  dim i = 40
  dim j = 50
  dim k = 3
  d[b, i, j]: f32 = sum[k] (x[b, i, k] - y[b, j, k]) * (x[b, i, k] - y[b, j, k])
  m[b, i]: f32 = min[j] d[b, i, j]
  n[b, j]: f32 = min[i] d[b, i, j]
  c[b, i]: f32 = sum[j] where(d[b, i, j] == m[b, i], 1.0, 0.0)
  g[b, i]: f32 = sum[j] where(d[b, i, j] == m[b, i], n[b, j] / c[b, i], 0.0)
  return m, n, g
"""


def test_distances_of_points_are_computed_again_by_each_fold():
    """A table of 8 x 2048 x 2500 distances was written and read twice: 428 us on an H100, Inductor's 156."""
    p = program(text=CHAMFER)
    q, copies = streams.apart(p)
    names = [c.name for c in q.body if c.rdims == ("k",)]
    assert len(names) == len(copies) == 4  # c waits for m, and g for c
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(2, 40, 3, generator=gen), "y": torch.randn(2, 50, 3, generator=gen)}
    assert all(torch.equal(run(p, given)[n], run(q, given)[n]) for n in p.outputs)


def test_distances_that_are_a_result_or_of_long_rows_stay():
    p = program(text=CHAMFER.replace("return m", "return d, m"))
    assert streams.apart(p) == (p, ())
    p = program(text=CHAMFER.replace("3]", "30]").replace("k = 3", "k = 30"))
    assert streams.apart(p) == (p, ())
