"""Products of a few rows of float32 are kernels of ours, in segments, with what follows; others stay the library's."""

from __future__ import annotations

import pytest
import torch

from tilefold.block.ir import Loop, walk
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import fuse_for_gpu
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
    [
        (64, 4096, 1000, torch.float32),
        (8, 12544, 2048, torch.bfloat16),
        (8, 128, 2048, torch.float32),
        (8, 512, 128, torch.float32),
        (3, 262144, 128, torch.float32),
    ],
    ids=["many rows", "16 bits", "short", "four blocks", "long"],
)
def test_other_products_stay_the_librarys(rows, depth, columns, dtype):
    assert isinstance(steps(rows, depth, columns, dtype)[0], LibraryStep)


@pytest.mark.parametrize(("places", "own"), [((128, 128), True), ((8, 8), False)], ids=["long", "short"])
def test_few_rows_of_each_image_are_read_in_segments(places, own):
    """Gradients of weights of the three colours of each image: eight blocks of the library's read all of it."""
    torch._dynamo.reset()
    args = (torch.empty((8, n, *places), device="meta") for n in (3, 64))
    program = trace(lambda x, y: torch.einsum("brhw,blhw->brl", x, y), *args).program
    steps = compile_program(program, device="interpreter").steps
    assert all(isinstance(s, GpuStep) for s in steps) is own and len(steps) == 1 + own


def test_what_is_summed_over_axes_in_two_orders_stays_the_librarys():
    """An image with channels behind its places, as a row, times a weight: no one axis to read in segments."""
    torch._dynamo.reset()
    args = torch.empty((8, 7, 7, 256), device="meta"), torch.empty((256, 7, 7, 2048), device="meta")
    program = trace(lambda x, w: torch.einsum("nhwc,chwo->no", x, w), *args).program
    assert any(isinstance(s, LibraryStep) for s in compile_program(program, device="interpreter").steps)


def computed(x, w):
    """Of 8-bit weights: a product whose operand is computed is a kernel of ours."""
    return x @ w.to(x.dtype)


def both(x, w):
    return x.bfloat16() @ w.bfloat16()


def over_two(x, w):
    return torch.einsum("bij,ijn->bn", x, w.to(x.dtype))


B, I8 = torch.bfloat16, torch.int8


@pytest.mark.parametrize(
    ("fn", "x", "w", "want"),
    [
        (computed, ((8, 32768), B), ((32768, 1024), I8), 16),  # 264 blocks fill the H100; columns are 16 tiles of 64
        (computed, ((130, 32768), B), ((32768, 1000), I8), 4),  # and rows are 3: 5 segments would have ragged ends
        (computed, ((4, 8, 32768), B), ((4, 32768, 256), I8), 16),  # and batches are 4
        (computed, ((8, 2048), B), ((2048, 256), I8), 8),  # 256 elements a segment at least
        (computed, ((8, 2880), B), ((2880, 256), I8), 9),  # of 45 tiles
        (over_two, ((8, 14, 500), B), ((14, 500, 256), I8), 25),  # of the 28 that all axes give, even ones of the last
        (computed, ((8, 512), B), ((512, 256), I8), 2),  # saves 2.5 us, more than the second kernel takes
        (both, ((8, 512), I8), ((512, 256), I8), 1),  # reads less: saves 1.6 us, less than that
        (both, ((8, 1024), I8), ((1024, 256), I8), 4),  # 4.9 us
        (computed, ((8, 32768), B), ((32768, 12800), I8), 1),  # 200 tiles of columns leave no room for two
        (computed, ((8, 32768), B), ((32768, 32768), I8), 1),  # 512 are more than run at once
    ],
)
def test_segments_of_computed_operands_fill_the_machine_and_save_their_second_kernel(fn, x, w, want):
    torch._dynamo.reset()
    program = trace(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in (x, w))).program
    block = fuse_for_gpu(program).kernels[0].block
    found = [n.dim for n in walk(block.body) if isinstance(n, Loop) and n.single]
    assert [int(block.sizes[d].value) for d in found] == ([want] if want > 1 else [])
