"""Products that contract little are one kernel with what follows them; longer ones, and biases alone, the library's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as f

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program, gpu_kernels
from tilefold.plan.gpu_library import lone_product
from tilefold.plan.hardware import H100
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import GpuStep
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

BF16 = torch.bfloat16


def steps(fn, *shapes, dtype=BF16, device="interpreter"):
    torch._dynamo.reset()
    args = (torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    return compile_program(trace(fn, *args).program, device=device).steps


def layer(x, w, b):
    return torch.relu(f.linear(x, w, b))


@pytest.mark.parametrize(
    ("rows", "depth", "dtype", "ours"),
    [
        (1 << 20, 3, BF16, True),
        (1 << 20, 3, torch.float32, True),
        (1 << 17, 64, BF16, True),
        (1 << 17, 64, torch.float32, False),  # no matrix unit: arithmetic bounds it
        (1 << 17, 512, BF16, False),
        (1 << 10, 3, BF16, False),  # nothing to save
    ],
)
def test_memory_bounds_short_products(rows, depth, dtype, ours):
    found = steps(layer, (rows, depth), (64, depth), (64,), dtype=dtype)
    assert isinstance(found[0], GpuStep if ours else LibraryStep) and len(found) == 2 - ours


def test_one_that_a_cut_leaves_alone_is_the_librarys():
    """So is its price: the maps that it has a kernel of ours for are elsewhere."""
    args = (torch.empty(s, dtype=BF16, device="meta") for s in ((1 << 17, 64), (64, 64), (64,)))
    torch._dynamo.reset()
    g = Graph.of(trace(layer, *args).program)
    product, behind = g.by_name
    assert lone_product(g, (product,), H100) == product
    assert lone_product(g, (product, behind), H100) is None


def test_a_bias_alone_is_the_librarys():
    (found,) = steps(f.linear, (1 << 20, 32), (64, 32), (64,))
    assert isinstance(found, LibraryStep)


def test_what_is_needed_in_memory_is_written_once():
    def saved(x, w):
        y = x @ w
        return y, torch.sigmoid(y)

    (found,) = steps(saved, (1 << 20, 32), (32, 64))
    assert isinstance(found, GpuStep) and len(found.results) == 2


def test_layers_that_memory_bounds_are_one_kernel():
    def perceptron(x, a, b):
        return x + f.gelu(x @ a) @ b

    (found,) = steps(perceptron, (1 << 17, 96), (96, 384), (384, 96))
    assert isinstance(found, GpuStep)


BLOCK = """
program block()
  input x: bf16[32, 56, 56, 64]
  input w: bf16[256, 64]
  input m: f32[256]
  input g: f32[256]
  input r: bf16[32, 56, 56, 256]
  dim n = 32
  dim i = 56
  dim j = 56
  dim o = 256
  dim c = 64
  y[n, i, j, o]: bf16 = sum[c] x[n, i, j, c] * w[o, c]
  z[n, i, j, o]: bf16 = {act}(bf16((y[n, i, j, o] - m[o]) * g[o]) + r[n, i, j, o]{rest})
  return z
"""


@pytest.mark.parametrize(("act", "rest", "ours"), [("maximum", ", 0", False), ("tanh", "", True)])
def test_what_the_librarys_call_of_a_convolution_does_saves_nothing(act, rest, ours):
    """Statistics, residual and ReLU are in the call, which memory bounds as it bounds a kernel."""
    p = parse(BLOCK.format(act=act, rest=rest))
    p = replace(p, body=tuple(replace(c, origin="aten.convolution.default") for c in p.body))
    calls = gpu_kernels(p, GpuTarget()).calls
    assert not calls if ours else list(calls) == [("y", "z")]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_matrices_of_a_few_channels_are_multiplied_in_what_they_are_read_for(dtype):
    def colours(m, x):
        return torch.einsum("kc,bchw->bkhw", m, torch.sigmoid(x))

    (found,) = steps(colours, (3, 3), (16, 3, 256, 256), dtype=dtype)
    assert isinstance(found, GpuStep)
    alone = steps(lambda m, x: m @ x, (3, 3), (3, 1 << 16), dtype=dtype)
    assert len(alone) == 1 and isinstance(alone[0], GpuStep)
    assert isinstance(steps(lambda m, x: m @ x, (3, 64), (64, 1 << 16), dtype=dtype)[0], LibraryStep)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_sums_products_of_a_few_channels_is_in_segments(dtype, read):
    """As they are read, or made: one thread block took 1.2 ms for a loss."""

    def loss(m, x):
        y = torch.einsum("kc,bchw->bkhw", m, x)
        return (y.square().mean(), y) if read else y.square().mean()

    found = steps(loss, (3, 3), (16, 3, 256, 256), dtype=dtype, device="cuda")
    assert len(found) == 2 + read and all(isinstance(s, GpuStep) for s in found)


@pytest.mark.parametrize(("after", "ours"), [(torch.sin, False), (torch.relu, True)])
def test_sines_behind_short_products_are_kernels_of_their_own(after, ours):
    found = steps(lambda x, w: after(x @ w), (1 << 16, 256), (256, 256))
    assert isinstance(found[0], GpuStep if ours else LibraryStep)


def correlations(e, t):
    return (e[:, :, None] * t[:, None]).sum(-1)


@pytest.mark.parametrize(("few", "long", "ours"), [(2, 32000, True), (64, 32000, False), (2, 64, False)])
def test_a_few_sums_of_long_rows_are_ours(few, long, ours):
    found = steps(correlations, (8, few, long), (8, few, long), dtype=torch.float32)
    assert any(isinstance(x, LibraryStep) for x in found) != ours
