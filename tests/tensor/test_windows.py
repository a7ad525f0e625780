"""Sums over windows written out are the same sums."""

from __future__ import annotations

import pytest
import torch

from tilefold.plan.gpu_windows import gpu_windows
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse
from tilefold.tensor.windows import AT_ONCE, windows_written_out

TEXT = """program f()
  input x: f32[2, 4, {h}, 9]
  input w: f32[4, {k}, 3]
  dim n = 2
  dim c = 4
  dim y = {y}
  dim v = 9
  dim k = {k}
  dim l = 3
  dim u = {u}
  s[n, c, y, v]: {dtype} = sum[k, l] where((v + l - 1 >= 0) & (v + l - 1 < 9), x[n, c, y + k, v + l - 1], 0.0) * w[c, k, l]
  out[n, c, u, v]: f32 = maximum(s[n, c, u, v], 0.0)
  return out
"""  # noqa: E501


def written_out(k: int, y: int, u: int, dtype: str = "f32"):
    p = parse(TEXT.format(h=y + k - 1, k=k, y=y, u=u, dtype=dtype))
    q = windows_written_out(p, ["s"])
    x, w = torch.randn(2, 4, y + k - 1, 9, dtype=torch.float64), torch.randn(4, k, 3, dtype=torch.float64)
    x[0, 0, 0, 0] = float("inf")  # what padding discards must stay discarded
    torch.testing.assert_close(run(q, {"x": x, "w": w})["out"], run(p, {"x": x, "w": w})["out"], equal_nan=True)
    return p, q


def test_a_small_window_is_one_map_without_its_dims():
    _, q = written_out(3, 6, 6)
    assert [c.name for c in q.body] == ["s", "out"] and all(c.reducer is None for c in q.body)
    assert not {"k", "l"} & set(q.sizes)


def test_a_large_one_is_added_up_in_parts_of_arithmetic_type():
    _, q = written_out(5, 6, 6, "bf16")
    parts = [c for c in q.body if c.name != "out"]
    assert len(parts) == -(-15 // AT_ONCE) and parts[-1].name == "s"
    assert [c.dtype.value for c in parts] == ["f32"] * (len(parts) - 1) + ["bf16"]


def test_only_the_part_that_is_read_is_made():
    p, q = written_out(3, 6, 4)
    assert p.sizes[p.body[0].dims[2]].value == 6 and q.sizes[q.body[0].dims[2]].value == 4
    p, q = written_out(5, 6, 4)
    assert all(q.sizes[c.dims[2]].value == 4 for c in q.body)


@pytest.mark.parametrize(
    "k, change, wins",
    [
        (3, ("", ""), True),
        (29, ("", ""), False),  # too long to be unrolled
        (3, ("x[n, c,", "x[n, 0,"), False),  # what outputs share is for the library, which reads it once
    ],
)
def test_which_windows_are_written_out(k, change, wins):
    text = TEXT.format(h=8 + k - 1, k=k, y=8, u=8, dtype="f32")
    assert bool(gpu_windows(parse(text.replace(*change)))) is wins


@pytest.mark.parametrize("edge, wins", [(4, True), (5, False)])
def test_even_windows_are_written_out_where_channels_are_contiguous(edge, wins):
    """The library has kernels of odd ones for that memory: 4 x 4 of such an image took 701 us on an H100."""
    text = f"""program f()
  input x: f32[8, {127 + edge}, {127 + edge}, 64]
  input w: f32[64, {edge}, {edge}]
  dim n = 8
  dim y = 128
  dim v = 128
  dim c = 64
  dim k = {edge}
  dim l = {edge}
  s[n, y, v, c]: f32 = sum[k, l] x[n, y + k, v + l, c] * w[c, k, l]
  return s
"""
    assert bool(gpu_windows(parse(text))) is wins


@pytest.mark.parametrize("summed, wins", [("n, y, v", False), ("y, v", True)])
def test_windows_under_the_statistics_of_a_batch_are_the_librarys(summed, wins):
    """A kernel that sums each channel as well computes far fewer products a second."""
    text = TEXT.format(h=58, k=3, y=56, u=56, dtype="f32").replace("[2, 4", "[32, 96").replace("w: f32[4", "w: f32[96")
    text = text.replace("dim n = 2", "dim n = 32").replace("dim c = 4", "dim c = 96")
    kept = ", ".join(d for d in ("n", "c", "y", "v") if d not in summed.split(", "))
    line = f"  m[{kept}]: f32 = sum[{summed}] s[n, c, y, v] * s[n, c, y, v]\n"
    text = text.replace("  return out", line + "  return out, m")
    assert bool(gpu_windows(parse(text))) is wins


PIXELS = """program pixels()
  input m: f32[8, {k}, 64, 55, 128]
  input u: f32[8, 2, {k}, 55, 128]
  dim n = 8
  dim c = 2
  dim k = {k}
  dim a = 64
  dim h = 55
  dim w = 128
  s[n, c, a, h, w]: f32 = sum[k] {product}
  return s
"""


@pytest.mark.parametrize(
    "k, product, wins",
    [
        (9, "m[n, k, a, h, w] * u[n, c, k, h, w]", True),
        (64, "m[n, k, a, h, w] * u[n, c, k, h, w]", False),  # too long to be unrolled
    ],
)
def test_products_of_pixels_that_the_library_would_copy_are_written_out(k, product, wins):
    assert bool(gpu_windows(parse(PIXELS.format(k=k, product=product)))) is wins


def test_products_that_the_library_takes_as_they_lie_are_its_own():
    text = PIXELS.format(k=9, product="m[n, k, a, h, w] * u[n, c, k, h, w]").replace(
        "s[n, c, a, h, w]", "s[n, h, w, c, a]"
    )
    text = text.replace("m: f32[8, 9, 64, 55, 128]", "m: f32[8, 55, 128, 9, 64]").replace(
        "m[n, k, a, h, w]", "m[n, h, w, k, a]"
    )
    text = text.replace("u: f32[8, 2, 9, 55, 128]", "u: f32[8, 55, 128, 2, 9]").replace(
        "u[n, c, k, h, w]", "u[n, h, w, c, k]"
    )
    assert not gpu_windows(parse(text))


def test_products_of_vectors_are_folds():
    """Norms and dot products of quaternions share a kernel with what is made of them."""
    text = """program norms()
  input a: f32[65536, 4]
  input b: f32[65536, 4]
  dim i = 65536
  dim j = 4
  s[i]: f32 = sum[j] a[i, j] * b[i, j]
  t[i]: f32 = sum[j] a[i, j] * a[i, j]
  return s, t
"""
    assert not gpu_windows(parse(text))


def test_parts_of_several_sums_have_names_of_their_own():
    """A part of s is s_1, or s_1_2 beside another sum of that name, of which a part is s_1_2 too."""
    text = TEXT.format(h=18, k=13, y=6, u=6, dtype="f32")
    (line,) = [x for x in text.splitlines() if x.lstrip().startswith("s[")]
    text = text.replace(line, line + "\n" + line.replace("  s[", "  s_1[")).replace(
        "s[n, c, u, v]", "s[n, c, u, v] * s_1[n, c, u, v]"
    )
    p = parse(text)
    q = windows_written_out(p, ["s", "s_1"])
    names = [c.name for c in q.body]
    assert len(names) == len(set(names)) > 8
    x, w = torch.randn(2, 4, 18, 9, dtype=torch.float64), torch.randn(4, 13, 3, dtype=torch.float64)
    torch.testing.assert_close(run(q, {"x": x, "w": w})["out"], run(p, {"x": x, "w": w})["out"])
