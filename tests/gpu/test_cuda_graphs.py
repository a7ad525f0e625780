"""Models in CUDA graphs, and regions in C++, on a device: results, gradients, memory, streams, errors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tilefold.frontend.regions.replay import Replayed
from tilefold.runtime.native.load import native

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """Library calls and kernels of ours."""

    def __init__(self, d=256):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d)

    def forward(self, x):
        return self.n(x + self.b(nn.functional.gelu(self.a(x))))


def made(cuda, dtype=torch.float16):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(Block(), Block()).to(cuda, dtype)


def x(cuda, rows=64, seed=0):
    gen = torch.Generator(cuda).manual_seed(seed)
    return torch.randn(rows, 256, generator=gen, device=cuda, dtype=torch.float16)


def close(got, want):
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)


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


@pytest.fixture
def in_cpp(monkeypatch):
    """Regions of GPUs run in C++; what ran there."""
    monkeypatch.setenv("TILEFOLD_RUNNER", "all")
    assert native().wait() is not None, native().reason
    found = []
    usual = Replayed.__init__

    def init(self, *given):
        usual(self, *given)
        found.append(self)

    monkeypatch.setattr(Replayed, "__init__", init)
    return found


def test_regions_in_cpp(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold")
    with torch.no_grad():
        for seed in range(4):
            close(run(x(cuda, seed=seed)), m(x(cuda, seed=seed)))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(x(cuda))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert in_cpp and all(not r.refused and r._module.count(r._region) == 1 for r in in_cpp)
    assert any(len(r.program.steps) > 2 for r in in_cpp)


def test_regions_in_cpp_on_two_streams_and_threads(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold")
    given = [x(cuda, seed=n) for n in range(2)]
    with torch.no_grad():
        want = [m(g) for g in given]
        run(given[0]), run(given[0])
        torch.cuda.synchronize()
        wrong = []

        def call(n):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    y = run(given[n])
                    torch.cuda.current_stream().synchronize()
                    if not torch.allclose(y, want[n], atol=5e-3, rtol=5e-3):
                        wrong.append(n)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


def test_memory_of_regions_in_cpp_stays_flat(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", dynamic=True)
    with torch.no_grad():
        sizes = []
        for call in range(300):
            run(x(cuda, 16 + call % 50))
            if call in (150, 299):
                torch.cuda.synchronize()
                sizes.append(torch.cuda.memory_allocated())
    assert sizes[0] == sizes[1]


def test_graphs_of_regions_in_cpp(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            close(run(x(cuda, seed=seed)), m(x(cuda, seed=seed)))
