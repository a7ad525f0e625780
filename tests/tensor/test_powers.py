"""Powers of two leave the operands of products: the results stay what they were, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.powers import powers_apart
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: bf16[6, 5]
  input w: bf16[7, 5]
  input n: f32[6]
  dim i = 6
  dim j = 7
  dim k = 5
  s[i, k]: f32 = x[i, k] * {by}
  y[i, j]: f32 = sum[k] s[i, k] * w[j, k]
  z[i, j]: f32 = {z}
  return {out}
"""
READ = "sqrt(maximum(n[i] - y[i, j], 0.5))"


def program(by: str = "2.0", z: str = READ, out: str = "z"):
    return parse(TEXT.format(by=by, z=z, out=out))


def inputs() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 5, generator=gen).bfloat16() for n in (6, 7))
    return {"x": x, "w": w, "n": torch.randn(6, generator=gen)}


@pytest.mark.parametrize("by", ["2.0", "-2.0", "0.125", "1024.0"])
def test_what_reads_the_product_has_the_scale(by: str):
    p = program(by)
    q = powers_apart(p)
    assert [c.name for c in q.body] == ["y", "z"]
    assert torch.equal(run(q, inputs())["z"], run(p, inputs())["z"])


@pytest.mark.parametrize(
    "p",
    [
        program(by="3.0"),  # no power of two: rounds otherwise
        program(by="1.0e30"),
        program(out="y"),  # a result would be scaled in a kernel of its own
        program(out="z, s"),  # needed anyway
        program(z="y[i, j] + sqrt(s[i, 0])"),
        parse(TEXT.format(by="2.0", z="sum[k] y[i, k] * w[j, k]", out="z").replace("dim k = 5", "dim k = 5")),
    ],
    ids=["three", "large", "result", "both", "read", "operand"],
)
def test_what_stays(p):
    assert powers_apart(p) == p
