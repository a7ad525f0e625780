"""What a kernel may write over."""

from __future__ import annotations

import pytest

from tilefold.block.fuse import fuse
from tilefold.runtime.reuse import overwritable
from tilefold.tensor.text import parse

HEAD = """program f()
  input x: f32[4, 8]
  input z: f32[4, 8]
  input v: f32[8]
  input h: bf16[4, 8]
  dim i = 4
  dim j = 8
"""


def pairs(body: str) -> tuple[tuple[str, str], ...]:
    (kernel,) = fuse(parse(f"{HEAD}{body}  return y\n")).kernels
    return overwritable(kernel.block)


def test_maps_may_be_written_over_what_they_read_at_the_same_element():
    assert pairs("  y[i, j]: f32 = maximum(x[i, j] * v[j] + z[i, j], 0)\n") == (("y", "x"), ("y", "z"))


@pytest.mark.parametrize(
    "body",
    [
        "  y[i, j]: f32 = x[i, j] + x[i, 7 - j]\n",  # another element too
        "  y[j, i]: f32 = x[i, j] * 2.0\n",  # turned: the same memory is another element
        "  y[i, j]: f32 = h[i, j] * 2.0\n",  # another type
        "  y[i, j]: f32 = v[j] * 2.0\n",  # read by every row
        "  s[i]: f32 = sum[j] x[i, j]\n  y[i, j]: f32 = x[i, j] / s[i]\n",  # read again after a reduction
    ],
)
def test_nothing_else_may(body):
    assert pairs(body) == ()
