"""Values of 16 bits that leave a kernel beside sums of them."""

from __future__ import annotations

import pytest
import torch

from tilefold.block import interp
from tilefold.block.text import show
from tilefold.block.twins import Twins
from tilefold.plan.greedy import fuse
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

PRODUCT = """
program norm()
  input x: {kind}[16, 96]
  input w: {kind}[96, 32]
  dim i = 16
  dim j = 96
  dim e = 32
  y[i, e]: {kind} = sum[j] x[i, j] * w[j, e]
  s[i]: {sum} = sum[e] y[i, e] * y[i, e]
  return {out}
"""

#: A row of a residual, written as it is added, and its variance.
RESIDUAL = """
program residual()
  input x: {kind}[16, {n}]
  input y: {kind}[16, {n}]
  dim i = 16
  dim e = {n}
  z[i, e]: {kind} = x[i, e] + y[i, e]
  m[i]: f32 = sum[e] f32(z[i, e]) / f32(size(e))
  s[i]: f32 = sum[e] (z[i, e] - m[i]) * (z[i, e] - m[i])
  return z, m, s
"""


def drawn(text: str) -> dict[str, torch.Tensor]:
    """The results of one kernel on random arguments, by name."""
    p = parse(text)
    (kernel,) = fuse(p).kernels
    torch.manual_seed(0)
    x = {i.name: torch.randn(*[int(n.value) for n in i.shape]).to(i.dtype.torch_dtype) for i in p.inputs}
    return interp.run(kernel.block, x, {}, block_sizes={"e": 256})


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_mean_square_is_of_the_products_that_are_stored(kind):
    found = drawn(PRODUCT.format(kind=kind, sum="f32", out="y, s"))
    assert found["y"].dtype is not torch.float32
    torch.testing.assert_close(found["s"], found["y"].float().square().sum(1), rtol=5e-7, atol=0)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("n", [96, 1000])
def test_a_variance_is_of_the_row_that_is_stored(kind, n):
    found = drawn(RESIDUAL.format(kind=kind, n=n))
    z = found["z"].float()
    torch.testing.assert_close(found["m"], z.mean(1), rtol=1e-6, atol=2e-7)
    torch.testing.assert_close(found["s"], z.var(1, correction=0) * n, rtol=2e-6, atol=0)


def test_a_group_whose_result_another_sums_in_float32_has_no_twin_that_is_summed_in_16_bits():
    text = "program f()\n  input x: bf16[64]\n  dim i = 64\n"
    for n in range(2):
        text += f"  {'yz'[n]}[i]: bf16 = x[i] * 2.0\n"
        text += f"  {'uv'[n]}[i]: f32 = exp({'yz'[n]}[i])\n"
    text += "  s[]: f32 = sum[i] y[i] * y[i]\n  t[]: bf16 = sum[i] z[i]\n  return y, z, u, v, s, t\n"
    g = Graph.of(parse(text))
    twins = Twins(g)
    assert twins.named(("y", "u")).key != twins.named(("z", "v")).key


def test_what_does_not_leave_or_is_summed_in_16_bits_keeps_its_digits():
    alone = drawn(PRODUCT.format(kind="bf16", sum="f32", out="s"))
    beside = drawn(PRODUCT.format(kind="bf16", sum="f32", out="y, s"))
    assert not torch.equal(alone["s"], beside["s"])
    (kernel,) = fuse(parse(PRODUCT.format(kind="bf16", sum="bf16", out="y, s"))).kernels
    assert "bf16(" not in show(kernel.block)
