"""Windows: how much of a streamed axis a thread block looks at, and into how many segments the axis is cut then."""

from __future__ import annotations

import math

import pytest
import torch

from tests.plan.test_gpu_folds import segments
from tilefold.block.fuse import build_kernels, with_unit
from tilefold.block.group import ANY
from tilefold.block.stages import plan_stages
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu_forms import gpu_loops
from tilefold.plan.greedy import group
from tilefold.plan.hardware import H100
from tilefold.plan.windowed import window
from tilefold.tensor.analysis import Graph

B = torch.bfloat16


def attention(seen):
    """Of rows that see places by their distance from the last row's."""

    def fn(q, k, v):
        i = torch.arange(q.shape[-2], device=q.device) + (k.shape[-2] - q.shape[-2])
        ok = seen(i[:, None] - torch.arange(k.shape[-2], device=q.device))
        s = torch.where(ok, (q @ k.mT).float(), -math.inf)
        return torch.softmax(s, -1).to(v.dtype) @ v

    return fn


def causal(distance):
    return distance >= 0


def windowed(distance):
    return (distance >= 0) & (distance < 384)


def heads(count, rows, places):
    shapes = (count, rows, 128), (count, places, 128), (count, places, 128)
    return [torch.empty(s, dtype=B, device="meta") for s in shapes]


@pytest.mark.parametrize(("seen", "found"), [(windowed, 383 + 64), (causal, 1024)])
def test_a_window_is_what_a_tile_of_rows_looks_at(seen, found):
    torch._dynamo.reset()
    g = Graph.of(trace(attention(seen), *heads(16, 1024, 1024)).program)
    (whole,) = group(g.program, frozenset(), ANY).groups
    plan = plan_stages(g, with_unit(whole))
    kernels = build_kernels(g, plan, gpu_loops(g, plan, H100), None)
    (axis,) = plan.stages[0].axes
    assert window(kernels, axis, 64) == found


def test_a_window_of_two_tiles_of_places_is_not_cut():
    """Of 64 tiles of rows, on 132 multiprocessors."""
    assert segments(attention(windowed), *heads(4, 1024, 1024)) == 1
    assert segments(attention(causal), *heads(4, 1024, 1024)) > 1


def test_rows_of_heads_that_share_keys_are_counted_together():
    """4 times 1,024 rows of each of 4 keys are 256 tiles."""
    q, *kv = heads(4, 1024, 1024)
    shared = [q[:, None].expand(4, 4, 1024, 128), *(x[:, None].expand(4, 1, 1024, 128)[:, 0] for x in kv)]

    def fn(q, k, v):
        s = torch.einsum("bgld,bmd->bglm", q, k).float()
        return torch.einsum("bglm,bmd->bgld", torch.softmax(s, -1).to(v.dtype), v)

    assert segments(fn, *shared) == 1


def test_a_window_that_is_cut_has_the_segments_of_what_is_seen():
    """One row, a window of 8,192 of 65,536."""

    def wide(distance):
        return (distance >= 0) & (distance < 8192)

    assert segments(attention(wide), *heads(8, 1, 65_536)) == 8 * segments(attention(wide), *heads(8, 1, 8192))
