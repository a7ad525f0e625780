"""Products of repeated rows have each row once, and the same results."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import fuse
from tilefold.tensor.interp import run
from tilefold.tensor.repeats import products_of_repeats
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: f32[3, {held}, 5]
  input w: f32[5, 7]
  dim i = 3
  dim l = 12
  dim m = 5
  dim o = 7
  y[i, l, o]: f32 = sum[m] x[i, {at}, m] * w[{row}, o]
  z[i, l, o]: f32 = y[i, {read}, o] * y[i, {read}, o]
  return {out}
"""


def program(at: str = "l // 4", held: int = 3, row: str = "m", read: str = "l", out: str = "z"):
    return parse(TEXT.format(at=at, held=held, row=row, read=read, out=out))


def inputs(held: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {"x": torch.randn(3, held, 5, generator=gen), "w": torch.randn(5, 7, generator=gen)}


@pytest.mark.parametrize(("at", "held"), [("l // 4", 3), ("l // 5", 3), ("l % 4", 4)])
@pytest.mark.parametrize("read", ["l", "11 - l"])
@pytest.mark.parametrize("out", ["z", "y"])
def test_each_row_once(at: str, held: int, read: str, out: str):
    p = program(at, held, read=read, out=out)
    q = products_of_repeats(p)
    product = next(c for c in q.body if c.reducer is not None)
    assert [int(q.sizes[d].value) for d in product.dims] == [3, held, 7]
    assert [c.name for c in q.body] == (["y_once", "z"] if out == "z" else ["y_once", "y", "z"])
    torch.testing.assert_close(run(q, inputs(held))[out], run(p, inputs(held))[out])


@pytest.mark.parametrize(
    ("at", "held", "row"),
    [("l", 12, "m"), ("l // 4", 3, "(m + l) % 5"), ("(l // 4 + l % 3) % 3", 3, "m"), ("l % 12", 12, "m")],
)
def test_rows_that_are_not_repeated_stay(at: str, held: int, row: str):
    p = program(at, held, row)
    assert products_of_repeats(p) == p


def test_repeated_frames_and_pixels():
    def frames(x, w, z):
        return torch.tanh(torch.nn.functional.conv1d(torch.repeat_interleave(x, 6, -1), w) + z)

    def pixels(x, w, z):
        y = torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest")
        return torch.relu(torch.nn.functional.conv2d(y, w) * z)

    gen = torch.Generator().manual_seed(0)
    for fn, shape in ((frames, (2, 8, 5)), (pixels, (2, 8, 5, 4))):
        space = [n * (6 if fn is frames else 2) for n in shape[2:]]
        args = [torch.randn(s, generator=gen) for s in (shape, (16, 8, *[1] * len(space)), (2, 16, *space))]
        torch.testing.assert_close(fuse(fn)(*args), fn(*args), rtol=1e-4, atol=1e-4)
