"""Which programs are attention of plain form, as the library has it, and where its price is lower than a kernel's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as f

from tilefold.frontend.fuse import trace
from tilefold.pipeline import gpu_kernels
from tilefold.plan.attention import (
    Extents,
    attention_call,
    extents,
    library_attentions,
    library_seconds,
    library_wins,
    own_seconds,
)
from tilefold.plan.hardware import H200
from tilefold.plan.selected import priced
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.analysis import Graph

B = torch.bfloat16


def plain(q, k, v):
    return f.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return f.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    return torch.softmax((q @ k.mT) / 8.0, -1) @ v


def rounded(q, k, v):
    return torch.softmax((q @ k.mT).float() * 0.125, -1).to(q.dtype) @ v


def unscaled(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def biased(q, k, v):
    return f.scaled_dot_product_attention(q, k, v, attn_mask=q.new_ones(q.shape[-2], k.shape[-2]))


def capped(q, k, v):
    return torch.softmax(torch.tanh((q @ k.mT) / 8.0), -1) @ v


def window(q, k, v):
    n = torch.arange(q.shape[-2], device=q.device)
    return torch.softmax(torch.where(n <= n[:, None] - 1, (q @ k.mT).float(), -math.inf), -1).to(q.dtype) @ v


def returned(q, k, v):
    p = torch.softmax((q @ k.mT) / 8.0, -1)
    return p @ v, p


def unnormalised(q, k, v):
    s = (q @ k.mT) / 8.0
    return torch.exp(s - s.amax(-1, keepdim=True)) @ v


def mixed(q, k, v):
    """The sum is of other exponentials than those that weigh the values."""
    s = (q @ k.mT).float() / 8.0
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / torch.exp(s - 1.0 - s.amax(-1, keepdim=True)).sum(-1, keepdim=True)).to(q.dtype) @ v


def negative(q, k, v):
    return torch.softmax((q @ k.mT) * -0.125, -1) @ v


def calls(fn, shape=(2, 4, 256, 72), dtype=B, value=None):
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
    v = torch.empty((*shape[:-1], value or shape[-1]), dtype=dtype, device="meta")
    p = trace(fn, q, k, v).program
    g = Graph.of(p)
    return [x for c in p.body if (x := attention_call(g, c)) is not None], p


@pytest.mark.parametrize("fn", [plain, causal, by_hand, rounded, unscaled])
@pytest.mark.parametrize("batch", [(), (3,), (2, 4), (2, 2, 4)])
def test_attention_is_recognised_however_it_is_written(fn, batch):
    (x,), p = calls(fn, (*batch, 64, 72))
    assert x.causal == (fn is causal) and x.members[-1] == x.out and set(x.members) == {c.name for c in p.body}
    assert x.scale == pytest.approx({by_hand: 0.125, rounded: 0.125, unscaled: 1.0}.get(fn, 72**-0.5))
    assert [ld.tensor for ld in (x.q, x.k, x.v)] == ["q", "k", "v"]


@pytest.mark.parametrize("fn", [biased, capped, window, returned, unnormalised, mixed, negative])
def test_other_forms_are_not(fn):
    assert calls(fn)[0] == []


def test_neither_are_other_types_and_widths():
    assert calls(plain, dtype=torch.float64)[0] == [] and calls(plain, value=64)[0] == []
    assert len(calls(plain, dtype=torch.float16)[0]) == len(calls(plain, dtype=torch.float32)[0]) == 1


@pytest.mark.parametrize(
    ("x", "microseconds"),
    [
        (Extents(384, 256, 256, 64, False), 26.7),
        (Extents(384, 512, 512, 64, False), 72.0),
        (Extents(768, 197, 197, 64, False), 44.8),
        (Extents(128, 256, 256, 72, False), 14.2),
        (Extents(512, 256, 256, 80, False), 43.0),
        (Extents(128, 1024, 77, 64, False), 26.0),
        (Extents(32, 4096, 4096, 128, True), 268.8),
        (Extents(16, 4096, 4096, 64, False), 152.5),
        (Extents(64, 1024, 1024, 64, False), 46.7),
        (Extents(64, 1024, 1024, 80, False), 61.5),
        (Extents(64, 2048, 2048, 64, True), 102.9),
        (Extents(64, 2048, 2048, 128, True), 148.8),
        (Extents(128, 1024, 1024, 128, True), 87.3),
    ],
)
def test_the_law_is_near_what_cudnn_took_on_an_h200(x, microseconds):
    assert library_seconds(x, H200) == pytest.approx(microseconds * 1e-6, rel=0.08)


def test_few_blocks_leave_multiprocessors_idle():
    assert library_seconds(Extents(16, 64, 4096, 128, False), H200) == pytest.approx(54.3e-6, rel=0.2)


def test_prices_of_float32_are_near_what_was_measured_on_an_h200():
    x = Extents(48, 512, 512, 64, True, exact=True)
    assert library_seconds(x, H200) == pytest.approx(97.3e-6, rel=0.1)
    assert own_seconds(x, H200) == pytest.approx(146.4e-6, rel=0.15)  # two products, a softmax and three copies


@pytest.mark.parametrize(
    ("x", "microseconds"),
    [
        (Extents(384, 256, 256, 64, False), 29.5),
        (Extents(768, 197, 197, 64, False, even=False), 62.2),
        (Extents(128, 1024, 77, 64, False, even=False), 24.7),
        (Extents(64, 1024, 1024, 64, True), 34.1),  # in the usual form
        (Extents(64, 4096, 4096, 64, True), 333.0),  # groups of warps
        (Extents(64, 1024, 1024, 80, False), 59.7),
        (Extents(64, 2048, 2048, 128, True), 142.0),
        (Extents(128, 1024, 1024, 128, True), 83.3),
        (Extents(128, 4096, 4096, 128, True), 941.0),
    ],
)
def test_and_ours_near_what_a_kernel_took(x, microseconds):
    assert own_seconds(x, H200) == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(
    ("x", "wins"),
    [
        (Extents(768, 197, 197, 64, False, even=False), True),
        (Extents(128, 256, 256, 72, False), True),
        (Extents(384, 256, 256, 64, False), True),
        (Extents(64, 1024, 1024, 64, False), True),
        (Extents(64, 2048, 2048, 64, True), False),
        (Extents(64, 4096, 4096, 64, False), False),
        (Extents(64, 1024, 1024, 80, False), False),
        (Extents(32, 2048, 2048, 128, True), False),
        (Extents(128, 1, 333, 72, False, even=False), False),  # one row
        (Extents(16, 64, 4096, 128, False), False),  # too few blocks: ours are cut into segments
        (Extents(128, 256, 256, 136, False), False),  # too wide for the library
        (Extents(128, 256, 256, 36, False), False),  # rows of keys are no multiple of 16 bytes
        (Extents(48, 512, 512, 64, True, exact=True), True),  # products know of no causal mask
        (Extents(16, 1024, 1024, 64, False, exact=True), False),
    ],
)
def test_the_cheaper_form_is_taken(x, wins):
    assert library_wins(x, H200) is wins


def test_a_call_is_one_step_of_the_plan_with_its_price():
    q, k, v = (torch.empty(8, 16, 256, 72, dtype=B, device="meta") for _ in range(3))
    p = trace(lambda q, k, v: torch.relu(plain(q, k, v)), q, k, v).program
    (x,) = library_attentions(p, H200)
    target = GpuTarget(H200)
    made = gpu_kernels(p, target)
    assert x.members in made.calls and len(made.fused.kernels) == 2
    first, last = priced(made.fused, target, made.every_call)
    assert (first.how, last.how) == ("library", "maps")
    assert first.cost.seconds == library_seconds(extents(Graph.of(p), x), H200)
    fused = gpu_kernels(p, target, "fused")
    assert not fused.calls and len(fused.fused.kernels) == 1
