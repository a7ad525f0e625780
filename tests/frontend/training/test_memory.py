"""Attention in training holds no tensor of queries times keys, forward or backward: measured at the CPU's allocator."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

H, D = 2, 16


def alibi(q, k, v, slopes):
    """The bias has a gradient too."""
    i = torch.arange(q.shape[2])
    far = i - i[:, None]
    s = q @ k.mT * D**-0.5 + slopes[:, None, None] * far
    return torch.softmax(torch.where(far <= 0, s, -torch.inf), -1) @ v


def sinks(q, k, v, sink):
    i = torch.arange(q.shape[2])
    s = torch.where(i <= i[:, None], 20 * torch.tanh(q @ k.mT * D**-0.5 / 20), -torch.inf)
    top = torch.maximum(s.amax(-1, True), sink[:, None, None]).detach()
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - top))) @ v


def documents(q, k, v, document):
    i = torch.arange(q.shape[2])
    seen = (i <= i[:, None]) & (document == document[:, None])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def arguments(fn, s):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, s, D, generator=gen) for _ in range(3))
    last = {alibi: torch.tensor([0.5, 0.1]), sinks: torch.randn(H, generator=gen), documents: torch.arange(s) * 3 // s}
    return q, k, v, last[fn]


def step(fn, args, dtype=torch.float32):
    """The result and the gradients, for a fixed gradient of the result."""
    args = [a.to(dtype) if a.is_floating_point() else a for a in args]
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    made = fn(*leaves)
    made.backward(torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    return [made.detach(), *(a.grad for a in leaves if a.requires_grad)]


def allocations(fn, args, run=step):
    """(most bytes held at once, bytes of the largest allocation) of a step, as the CPU's allocator has them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(fn, args)
    held = most = largest = 0
    for e in found.profiler.kineto_results.events():
        if e.name() == "[memory]":
            held += e.nbytes()
            most, largest = max(most, held), max(largest, e.nbytes())
    return most, largest


@pytest.mark.parametrize("fn", [alibi, sinks, documents])
def test_memory_grows_with_the_length_and_gradients_are_right(fn):
    torch._dynamo.reset()
    fast = torch.compile(fn, backend="tilefold", dynamic=True)
    short, long = arguments(fn, 256), arguments(fn, 512)
    for args in (short, long):
        got, plain, exact = step(fast, args), step(fn, args), step(fn, args, torch.float64)
        for g, p, e in zip(got, plain, exact, strict=True):
            allowed = 2 * (p.double() - e).abs().max() + 16 * torch.finfo(g.dtype).eps * e.abs().max()
            assert (g.double() - e).abs().max() <= allowed
    (small, _), (large, largest) = allocations(fast, short), allocations(fast, long)
    assert large <= 2.1 * small
    assert largest <= 4 * H * 512 * D  # a tensor like the queries; one of queries times keys has 32 times as much
    assert allocations(fn, long)[1] >= 4 * 512 * 512  # eager has such: the measurement shows it


def column(q, k, v, sink):
    """A sink as a number behind each row of scores, which is cut off after the softmax."""
    i = torch.arange(q.shape[2])
    s = torch.where(i <= i[:, None], q @ k.mT * D**-0.5, -torch.inf)
    return torch.cat((s, sink[:, None, None].expand(*s.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("sink", [0.0, 30.0, -torch.inf])
def test_a_number_behind_a_row_of_scores_is_no_column_of_them(sink):
    torch._dynamo.reset()
    fast = torch.compile(column, backend="tilefold", dynamic=False)
    args = (*arguments(alibi, 512)[:3], torch.tensor([sink, 0.5]))
    for g, p, e in zip(step(fast, args), step(column, args), step(column, args, torch.float64), strict=True):
        allowed = 2 * (p.double() - e).abs().max() + 16 * torch.finfo(g.dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= allowed
    assert allocations(fast, args)[1] <= 4 * H * 512 * D
