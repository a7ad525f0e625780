"""Programs in text form, fused, and explained without compiling anything."""

from __future__ import annotations

from functools import lru_cache

from tests.block.programs import ALL
from tilefold.explanation.gather import Code, region
from tilefold.explanation.model import Region
from tilefold.explanation.report import Explanation
from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse

#: 64 rows of a softmax, then a statement that needs the whole column: two kernels.
TWO_KERNELS = """
program two(n)
  input x: f32[64, n]
  dim i = 64
  dim j = n
  t[i]: f32 = sum[j] x[i, j]
  u[j]: f32 = sum[i] x[i, j] * t[i]
  return u
"""


@lru_cache
def explained(name: str, n: int = 16) -> Explanation:
    """One of the block tests' programs with every symbol equal to n."""
    p = parse({**ALL, "two": TWO_KERNELS}[name])
    fused = fuse(p)
    one = region(p, fused.program, fused, [Code() for _ in fused.kernels], dict.fromkeys(p.syms, n))
    return Explanation(p.name, (one,))


def only(name: str, n: int = 16) -> Region:
    return explained(name, n).regions[0]
