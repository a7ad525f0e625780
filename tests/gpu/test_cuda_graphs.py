"""Models in CUDA graphs on a device: results, gradients, several lengths, and regions that run in C++ within."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional

from tests.gpu.blocks import close, made, x
from tilefold.backends.triton.counters import counters_of

pytestmark = pytest.mark.gpu


def graphs_launched(run):
    with torch.profiler.profile(activities=list(torch.profiler.ProfilerActivity.__members__.values())[:2]) as found:
        run()
        torch.cuda.synchronize()
    return sum("cudaGraphLaunch" in e.name for e in found.events())


def test_inference_in_graphs(cuda):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            close(run(x(cuda, seed=seed)), m(x(cuda, seed=seed)))
        assert graphs_launched(lambda: run(x(cuda))) == 1


def test_kernels_that_draw_their_tiles_in_graphs(cuda, caplog):
    def attention(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()

    q, k, v = torch.randn(3, 2, 16, 2048, 128, device=cuda, dtype=torch.bfloat16)
    torch._dynamo.reset()
    counters_of.cache_clear()  # as in a new process, where the call before a capture is the first
    run = torch.compile(attention, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tilefold"):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(run(q, k, v), attention(q, k, v), atol=2e-2, rtol=2e-2)
        assert graphs_launched(lambda: run(q, k, v)) == 1
    assert "without CUDA graphs" not in caplog.text


def test_training_in_graphs(cuda):
    m = made(cuda, torch.float32)
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        given = x(cuda, seed=seed).float()
        run(given).square().sum().backward()
        got = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        m(given).square().sum().backward()
        for a, p in zip(got, m.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, atol=2e-2, rtol=2e-2)
        m.zero_grad()


def test_several_lengths_in_graphs(cuda):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for rows in (64, 96, 64, 33, 96, 64, 33):
            torch.compiler.cudagraph_mark_step_begin()
            close(run(x(cuda, rows)), m(x(cuda, rows)))


def test_graphs_of_in_cpp(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            close(run(x(cuda, seed=seed)), m(x(cuda, seed=seed)))
        assert graphs_launched(lambda: run(x(cuda))) == 1
    assert in_cpp.regions and not any(r.refused for r in in_cpp.regions)
