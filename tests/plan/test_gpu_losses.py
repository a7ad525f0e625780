"""Losses over many rows on a GPU: rows keep thread blocks of their own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as f

from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu


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


@pytest.mark.parametrize("heads", [1, 8])
def test_scores_are_not_kept_apart_from_what_reduces_them(heads):
    torch._dynamo.reset()
    q, k = like(1, heads, 1, 64), like(1, heads, 4096, 64)
    p = trace(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, q, k, k).program
    assert len({k.plan.group.members for k in fuse_for_gpu(p).kernels}) == 1
