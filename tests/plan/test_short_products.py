"""Products that contract little are one kernel with what follows them; longer ones, and biases alone, the library's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as f

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import GpuStep

BF16 = torch.bfloat16


def steps(fn, *shapes, dtype=BF16):
    torch._dynamo.reset()
    args = (torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    return compile_program(trace(fn, *args).program, device="interpreter").steps


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
