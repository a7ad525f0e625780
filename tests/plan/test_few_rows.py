"""Products of a few rows of float32 are kernels of ours, in segments, with what follows; others stay the library's."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import GpuStep


def steps(rows, depth, columns, dtype=torch.float32):
    torch._dynamo.reset()
    args = (torch.empty(s, dtype=dtype, device="meta") for s in ((rows, depth), (columns, depth), (columns,)))
    fn = lambda x, w, b: torch.relu(torch.nn.functional.linear(x, w, b))  # noqa: E731
    return compile_program(trace(fn, *args).program, device="interpreter").steps


@pytest.mark.parametrize("rows", [4, 8, 10])
def test_few_rows_are_read_in_segments(rows):
    first, last = steps(rows, 12544, 2048)
    assert isinstance(first, GpuStep) and isinstance(last, GpuStep)  # partial sums; their sum, the bias and ReLU
    assert any(d.endswith("_seg") for d in first.fused.block.sizes) or first.results[0][2]({})[-1] > 1


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [(64, 4096, 1000, torch.float32), (8, 12544, 2048, torch.bfloat16), (8, 128, 2048, torch.float32)],
    ids=["many rows", "16 bits", "short"],
)
def test_other_products_stay_the_librarys(rows, depth, columns, dtype):
    assert isinstance(steps(rows, depth, columns, dtype)[0], LibraryStep)
