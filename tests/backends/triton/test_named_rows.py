"""A few rows of a table, which others name, are summed as that many values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.tile.interp import run_kernel
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import named_rows, singles


def bags(ids, table):
    return torch.nn.functional.embedding(ids, table).float().mean(2)


def pooled(ids, table, mask):
    """Means of the rows that are there."""
    total = (table[ids] * mask.unsqueeze(-1).to(table.dtype)).sum(2)
    return total / mask.sum(2).clamp(min=1).unsqueeze(-1).to(table.dtype)


def test_rows_of_a_bag_are_summed_without_lanes_of_their_own():
    """Over lanes and warps that met, 85 us on an H100 for what Inductor takes 15; of eight rows, masked, 64 and 34."""
    table = meta(130_000, 64, dtype=torch.bfloat16)
    (k,) = made(bags, meta(4096, 26, 4, dtype=torch.int64), table)
    source = variant(k).rendered.source
    assert "tl.sum(" not in source and "tl.reduce(" not in source
    (k,) = made(pooled, meta(1024, 26, 8, dtype=torch.int64), table, meta(1024, 26, 8, dtype=torch.bool))
    source = variant(k).rendered.source
    assert "tl.sum(" not in source
    (k,) = made(bags, meta(4096, 26, 32, dtype=torch.int64), table)
    assert "tl.sum(" in variant(k).rendered.source
    (plain,) = made(lambda x: x.float().mean(2), meta(4096, 26, 4, 64, dtype=torch.bfloat16))
    assert "tl.sum(" in variant(plain).rendered.source


def test_rows_one_by_one_are_the_same_rows():
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids, table = torch.randint(0, 50, (6, 5, 4)), torch.randn(50, 8)
    program = trace(bags, ids, table).program
    (k,) = fuse_for_gpu(program).kernels
    kernel = lower(k.block, LowerOptions(tiles={}, arranged=False))
    assert named_rows(kernel)
    values = {"ids": ids, "table": table, program.outputs[0]: torch.zeros(6, 5, 8)}
    run_kernel(singles(kernel), values, {})
    torch.testing.assert_close(values[program.outputs[0]], bags(ids, table), rtol=1e-6, atol=1e-6)
