"""Folds that only read: which are cut into segments, and what is computed by kernels of its own after them."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.kernels import meta
from tilefold.block.ir import Loop, walk
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.tensor import interp

B = torch.bfloat16


def fused(fn, *args):
    torch._dynamo.reset()
    program = trace(fn, *args).program
    return program, fuse_for_gpu(program)


def segments(fn, *args) -> int:
    """Of the first kernel; 1: it is not cut."""
    block = fused(fn, *args)[1].kernels[0].block
    found = [n.dim for n in walk(block.body) if isinstance(n, Loop) and n.single]
    return int(block.sizes[found[0]].value) if found else 1


def down(x):
    return x.float().sum(0)


def across(x):
    return x.float().sum(1)


def stats(x):
    return torch.var_mean(x.float(), (0, 2, 3))


def everything(x):
    return x.float().sum()


@pytest.mark.parametrize(
    ("fn", "shape", "cut"),
    [
        (down, (8192, 4096), True),
        (down, (64, 65536), False),  # enough columns, and few rows
        (down, (256, 1024), False),  # less time than a second kernel takes
        (across, (8192, 4096), False),
        (stats, (64, 64, 56, 56), True),
        (stats, (4, 256, 7, 7), False),
        (everything, (8192, 8192), True),
        (everything, (64, 64), False),
    ],
)
def test_what_is_cut(fn, shape, cut):
    assert (segments(fn, meta(*shape, dtype=B)) > 1) == cut


def test_enough_thread_blocks_for_every_multiprocessor():
    assert segments(down, meta(1 << 20, 64, dtype=B)) >= 2 * 132
    assert segments(everything, meta(8192, 8192, dtype=B)) >= 2 * 132


def test_partial_states_of_columns_lie_in_rows():
    _, f = fused(down, meta(8192, 4096, dtype=B))
    part = f.kernels[0].block.results[0]
    assert [int(f.kernels[0].block.sizes[d].value) for d in part.dims][1:] == [4096]
    _, rows = fused(lambda x: x.var(1), meta(8, 1 << 20, dtype=B))
    sizes = rows.kernels[0].block.sizes
    assert int(sizes[rows.kernels[0].block.results[0].dims[0]].value) == 8


def softmax_down(x):
    return x.softmax(0)


def test_what_is_written_along_a_long_column_has_a_kernel_of_its_own():
    _, f = fused(softmax_down, meta(8192, 4096, dtype=B))
    assert [len(k.plan.stages) for k in f.kernels] == [1, 1, 0]  # partial states, the states, the results
    _, short = fused(softmax_down, meta(512, 65536, dtype=B))  # a thread block holds the columns
    assert len(short.kernels) == 1
    _, rows = fused(lambda x: x.softmax(1), meta(4096, 8192, dtype=B))
    assert len(rows.kernels) == 1


def test_separated_maps_are_the_same_maps():
    def normed(x, w):
        y = x.softmax(0)
        return y * w, (y * w).exp()

    _, f = fused(normed, meta(8192, 96, dtype=torch.float32), meta(96, dtype=torch.float32))
    assert len(f.kernels) > 1
    torch._dynamo.reset()
    x, w = torch.randn(50, 7), torch.randn(7)
    program, small = fused(normed, x, w)
    from_groups = interp.run(small.program, {i.name: v for i, v in zip(program.inputs, (x, w), strict=True)})
    for name, want in zip(program.outputs, normed(x, w), strict=True):
        torch.testing.assert_close(from_groups[name], want)


def test_maps_of_the_same_elements_are_one_kernel():
    _, f = fused(lambda x: (x + 1, x * 2, x.relu()), meta(1024, 1024))
    assert len(f.kernels) == 1 and len(f.kernels[0].block.results) == 3
    _, apart = fused(lambda x, y: (x + 1, y * 2), meta(1024, 1024), meta(1024, 1024))
    assert len(apart.kernels) == 2
    _, broadcast = fused(lambda x, y, b: (x + b, y * b), meta(1024, 1024), meta(1024, 1024), meta(1024))
    assert len(broadcast.kernels) == 2  # a bias is read from the cache anyway
