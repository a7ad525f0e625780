"""Losses over many rows on a GPU: rows keep thread blocks of their own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as f

from tilefold.block.text import parse as parse_block
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import USUAL, fuse_for_gpu
from tilefold.plan.gpu_forms import packed, read_at_once, too_few
from tilefold.tensor.text import parse


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def divergence(x, y):
    return f.kl_div(f.log_softmax(x.float(), -1), f.softmax(y.float(), -1), reduction="batchmean")


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, t: f.cross_entropy(x.float(), t), (like(8192, 32000), like(8192, dtype=torch.int64))),
        (divergence, (like(4096, 32000), like(4096, 32000))),
    ],
    ids=["cross-entropy", "divergence"],
)
def test_one_kernel_reads_the_rows_and_is_parallel_over_them(fn, args):
    torch._dynamo.reset()
    p = trace(fn, *args).program
    fused = fuse_for_gpu(p)
    rows = [k for k in fused.kernels if k.plan.stages and "i" in k.plan.group.parallel]
    (kernel,) = rows
    assert {i.name for i in p.inputs if len(i.shape) == 2} <= {i.name for i in kernel.block.inputs}


@pytest.mark.parametrize("shape", [(8, 21, 65536), (524288, 21)], ids=["of one axis", "of rows"])
def test_the_mean_over_many_short_rows_is_cut_into_segments_that_fill_the_machine(shape):
    torch._dynamo.reset()
    target = like(shape[0], *shape[2:], dtype=torch.int64)
    p = trace(f.cross_entropy, like(*shape, dtype=torch.float32), target).program
    first, last = fuse_for_gpu(p).kernels
    n = max(int(e.value) for d, e in first.block.sizes.items() if d.endswith("_seg"))
    assert 2 * USUAL.machine.cores <= n and first.plan.group.members == last.plan.group.members


def test_a_loop_whose_steps_do_not_fit_is_cut():
    """Pixels of 8 images: a loop over one axis would have 8 x 256 x 21 elements at a step, and short tiles of places
    would each be reduced."""
    torch._dynamo.reset()
    x, t = like(8, 21, 256, 256, dtype=torch.float32), like(8, 256, 256, dtype=torch.int64)
    fused = fuse_for_gpu(trace(f.cross_entropy, x, t).program)
    assert len({k.plan.group.members for k in fused.kernels}) == 2
    assert all(read_at_once(k.block) <= USUAL.machine.read_at_once for k in fused.kernels)
    assert any("a step of a loop" in r.reason for r in fused.grouping.refusals)


@pytest.mark.parametrize(
    ("fn", "args", "single"),
    [
        (lambda x: torch.var_mean(x, (1, 2, 3)), (like(24, 96, 224, 224, dtype=torch.float32),), False),
        # a row a segment, and neighbours streamed: a few of each row at a step
        (lambda x: torch.var_mean(x, (0, 2, 3, 4)), (like(8, 32, 24, 96, 96, dtype=torch.float32),), True),
    ],
    ids=["of images", "of volumes"],
)
def test_a_step_has_a_tile_of_axes_that_launches_join(fn, args, single):
    torch._dynamo.reset()
    fused = fuse_for_gpu(trace(fn, *args).program)
    assert len({k.plan.group.members for k in fused.kernels}) == 1
    first = fused.kernels[0].block
    assert read_at_once(packed(first)) <= USUAL.machine.read_at_once
    assert (read_at_once(first) <= USUAL.machine.read_at_once) == single


@pytest.mark.parametrize("heads", [1, 8])
def test_scores_are_not_kept_apart_from_what_reduces_them(heads):
    torch._dynamo.reset()
    q, k = like(1, heads, 1, 64), like(1, heads, 4096, 64)
    p = trace(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, q, k, k).program
    assert len({k.plan.group.members for k in fuse_for_gpu(p).kernels}) == 1


def clipped(x, y):
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x), torch.linalg.vector_norm(y)]))
    scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    return x * scale, y * scale


def test_the_norms_of_gradients_are_cut_although_one_of_them_all_is_made_of_them():
    torch._dynamo.reset()
    shapes = (1024, 2048), (512, 4096)
    fused = fuse_for_gpu(trace(clipped, *(like(*s, dtype=torch.float32) for s in shapes)).program)
    sums = [k for k in fused.kernels if k.plan.stages and {i.name for i in k.block.inputs} & {"x", "y"}]
    assert len(sums) == 2 and all(any(d.endswith("_seg") for d in k.block.sizes) for k in sums)


def test_terms_of_a_loss_whose_elements_are_kept_are_each_cut_into_segments():
    """Means of two poolings whose elements a backward pass reads: in one kernel of both, one thread block would read
    and write all of it."""

    def fn(x, y):
        a, b = f.avg_pool2d(x, 2), f.avg_pool1d(y, 4, 2)
        return a.square().mean() + b.square().mean(), a * 2.0, b * 2.0

    torch._dynamo.reset()
    args = (like(16, 32, 56, 56, dtype=torch.float32), like(16, 64, 4096, dtype=torch.float32))
    fused = fuse_for_gpu(trace(fn, *args).program)
    writes = {r.name: k for k in fused.kernels for r in k.block.results if r.name in fused.program.outputs}
    assert len({k.block.name for k in writes.values()}) == len(writes) == 3
    for k in fused.kernels:
        if k.plan.stages and any(len(r.dims) > 2 for r in k.block.results):
            assert any(d.endswith("_seg") for d in k.block.sizes), k.block.name


PARTS = """program parts()
  input t: f32[16]
  input s: f32[16, 1024, 32]
  input u: f32[16, 32, 1024]
  dim i = 16
  dim n = 64
  dim p = 1024
  m[i]: f32 = t[i] * 0.5
  total[]: f32 = sum[i] m[i]
  cat[i, n, p]: f32 = where(n < 32, m[i] / s[i, p, n], u[i, n - 32, p])
  last[i, p, n]: f32 = cat[i, n, p]
  bias[n]: f32 = sum[i, p] cat[i, n, p]
  return total, last, bias
"""


def test_parts_of_an_image_are_put_together_in_blocks_of_their_own():
    """The sum of a vector that scales one of the parts has one thread block."""
    fused = fuse_for_gpu(parse(PARTS))
    (kernel,) = (k for k in fused.kernels if any(r.name == "last" for r in k.block.results))
    assert "total" not in kernel.plan.group.members and "n" in kernel.plan.group.parallel


ONCE = """block f()
  input x: f32[2000, 500]
  dim i = 2000
  dim l = 500
  dim unit = 1
  result o[i]: f32
  result s[]: f32
  forall unit
    init sum[]: f32 = 0.0
    let t[i]: f32 = max[l] x[i, l]
    for i
      accum sum = sum[i] t[i] * t[i]
      store o[i] over (i) = t[i] * 2.0
    store s[] over () = sum
  return o, s
"""


def test_a_reduction_in_front_of_a_loop_is_whole_and_one_of_its_passes():
    """Of all rows, kept for a sum over rows: one thread block, a value of 2048 x 512, 369 us predicted on an H100, and
    minutes to compile."""
    b = parse_block(ONCE)
    assert read_at_once(b) == 2048 * 512
    assert too_few(b, USUAL.machine) is not None


WEIGHTED = """block means()
  input x: f32[288, 48, 64, 64]
  dim b = 288
  dim i = 48
  dim j = 64
  dim k = 64
  result o[b]: f32
  forall b
    let columns[b, k]: f32 = sum[i, j] x[b, i, j, k]
    let mean[b]: f32 = sum[k] columns[b, k] * f32(k)
    store o[b] over (b) = mean[b]
  return o
"""


def test_sums_that_a_row_weights_are_no_product_of_matrices():
    """Means of positions in a volume: three of them, held whole as operands of matrix units are, took 757 us on an
    H100, of 113 that memory takes."""
    assert read_at_once(parse_block(WEIGHTED)) == 64 * 64 * 64 > USUAL.machine.read_at_once
