"""The pipeline: library products next to fused kernels, canonical names, and what is compiled once."""

from __future__ import annotations

import pytest
import torch

from tilefold.pipeline import compile_program
from tilefold.plan.library import library_call
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import KernelStep
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

SLICED = """
program sliced()
  input a: f32[9, 5, 8]
  input b: f32[9, 8, 7]
  dim n = 3
  dim i = 5
  dim j = 7
  dim k = 6
  c[n, i, j]: f32 = sum[k] a[n, i, k] * b[n, k, j]
  return c
"""


@pytest.mark.parametrize("batched", [True, False])
def test_a_library_product_reads_parts_of_its_operands(batched: bool) -> None:
    text = SLICED if batched else SLICED.replace("n, ", "").replace("9, ", "").replace("  dim n = 3\n", "")
    p = parse(text)
    x = {"a": torch.randn(9, 5, 8), "b": torch.randn(9, 8, 7)}
    want = x["a"][:3, :, :6] @ x["b"][:3, :6]
    if not batched:
        x, want = {n: t[0] for n, t in x.items()}, want[0]
    call = library_call(Graph.of(p), p.body[0], frozenset())
    assert call is not None
    LibraryStep(call, p).run(x, {})
    torch.testing.assert_close(x["c"], want)


LAYERS = """
program layers(n)
  input x: f32[n, 33]
  dim i = n
  dim j = 33
  dim r = n
  dim s = 33
  m_3[i]: f32 = max[j] x[i, j]
  y_3[i, j]: f32 = exp(x[i, j] - m_3[i])
  m_17[r]: f32 = max[s] y_3[r, s]
  y_17[r, s]: f32 = exp(y_3[r, s] - m_17[r])
  return y_3, y_17
"""


def test_layers_of_a_model_share_their_kernels() -> None:
    compiled = compile_program(parse(LAYERS))
    x = torch.randn(9, 33)
    got = compiled({"x": x}, {"n": 9})
    y = torch.exp(x - x.amax(1, keepdim=True))
    torch.testing.assert_close(got["y_3"], y)
    torch.testing.assert_close(got["y_17"], torch.exp(y - y.amax(1, keepdim=True)))
    other = LAYERS.replace("_3", "_208").replace("_17", "_44").replace("n)", "s9)").replace("= n", "= s9")
    again = compile_program(parse(other.replace("[n,", "[s9,")), load=False)
    kernels = [[s.kernel() for s in c.steps if isinstance(s, KernelStep)] for c in (compiled, again)]
    assert kernels[0] == kernels[1]


def test_unit_axes_get_kernels_of_their_own() -> None:
    compiled = compile_program(parse(LAYERS))
    x = torch.randn(33, 9).T
    got = compiled({"x": x}, {"n": 9})
    torch.testing.assert_close(got["y_3"], torch.exp(x - x.amax(1, keepdim=True)))


def test_wrong_shapes_are_refused() -> None:
    compiled = compile_program(parse(LAYERS))
    with pytest.raises(ValueError, match="shape"):
        compiled({"x": torch.randn(9, 32)}, {"n": 9})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dims", ["", "n"])
def test_dot_products_that_end_up_alone_are_no_library_calls(device: str, dims: str) -> None:
    """They would be matrix products with one row and one column, whose long sums are far less right."""
    text = f"""program f()
  input a: f32[3, 50]
  input b: f32[3, 50]
  dim n = 3
  dim k = 50
  c[{dims}]: f32 = sum[{"k" if dims else "n, k"}] a[n, k] * b[n, k]
  return c
"""
    made = compile_program(parse(text), goal="greedy", device=device, load=False)
    assert not any(isinstance(s, LibraryStep) for s in made.steps)
    whole = compile_program(parse(SLICED), goal="greedy", device=device, load=False)
    assert any(isinstance(s, LibraryStep) for s in whole.steps)
