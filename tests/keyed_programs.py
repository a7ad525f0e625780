"""Programs with sums by keys, and their arguments."""

from __future__ import annotations

import torch

from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

#: Rows that are picked twice, with what is made of them; indices count from either end.
PICKED = """program picked()
  input at: i64[37]
  input to: i64[20]
  input x: bf16[50, 24]
  input g: i64[37]
  input w: f32[20, 24]
  dim r = 11
  dim q = 11
  dim k = 37
  dim l = 20
  dim j = 24
  dim i = 24
  m[k, j]: bf16 = x[g[k], j] * 2.0
  y[r, j]: {dtype} = sum[k] where(within(where(at[k] < 0, at[k] + 11, at[k]), 11) == r, m[k, j], 0.0)
  u[q, i]: f32 = sum[l] where(q == within(to[l], 11), w[l, i], 0.0)
  z[r, j]: f32 = {total}
  return z
"""
#: Places along two axes, of batches; one that is none adds nothing.
PLACES = """program places()
  input at: i64[3, 29]
  input to: i64[29]
  input v: f32[3, 29, 5]
  dim b = 3
  dim r = 6
  dim s = 4
  dim k = 29
  dim j = 5
  y[b, r, s, j]: f32 = sum[k] where((r == at[b, k]) & (s == to[k]), v[b, k, j], 0.0)
  return y
"""
#: Their maxima.
MAXIMA = PLACES.replace("sum[k]", "max[k]").replace(", 0.0)", ", -inf)")
#: Rows of a canvas, as an image of three digits; some of what is added is beyond it.
IMAGE = """program image()
  input at: i64[29]
  input v: f32[29, 5]
  dim b = 2
  dim r = 6
  dim s = 4
  dim k = 29
  dim j = 5
  y[b, j, r, s]: f32 = sum[k] where(at[k] == (b * 6 + r) * 5 + s, v[k, j], 0.0)
  return y
"""


def picked(total: str = "y[r, j] + u[r, j]", dtype: str = "f32") -> Program:
    """PICKED, whose result is this."""
    return parse(PICKED.format(total=total, dtype=dtype))


def arguments(p: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of any of these programs: the first row is named by half of the indices."""
    gen = torch.Generator().manual_seed(seed)

    def whole(*shape: int, least: int, most: int) -> torch.Tensor:
        found = torch.randint(least, most, shape, generator=gen)
        return torch.where(torch.rand(shape, generator=gen) < 0.5, 0, found)

    if p.name == "places":
        return {
            "at": whole(3, 29, least=-2, most=8),
            "to": whole(29, least=0, most=4),
            "v": torch.randn(3, 29, 5, generator=gen),
        }
    if p.name == "image":
        return {"at": whole(29, least=-7, most=70), "v": torch.randn(29, 5, generator=gen)}
    return {
        "at": whole(37, least=-11, most=11),
        "to": whole(20, least=0, most=11),
        "x": torch.randn(50, 24, generator=gen).bfloat16(),
        "g": torch.randint(50, (37,), generator=gen),
        "w": torch.randn(20, 24, generator=gen),
    }
