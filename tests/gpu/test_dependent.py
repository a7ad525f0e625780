"""Programmatic dependent launch: the same bits as plain launches, however closely calls follow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tilefold import fuse
from tilefold.runtime import gpu_program
from tilefold.runtime.steps import GpuStep
from tilefold.suites.gpu import operators as o

pytestmark = pytest.mark.gpu

H, F = torch.float16, torch.float32
#: Different arguments that calls take in turn, and calls.
SETS, CALLS = 5, 300
#: Cycles that the device is kept busy for while calls queue up, so that they run back to back.
BUSY = 200_000_000


def decode(device, seed):
    """Grouped decode over a short cache, so that launches are most of the time."""
    gen = torch.Generator(device).manual_seed(seed)
    shapes = ((2, 16, 1, 64), (2, 4, 2048, 64), (2, 4, 2048, 64))
    return tuple(torch.randn(s, generator=gen, device=device, dtype=H) for s in shapes)


def long_decode(device, seed):
    gen = torch.Generator(device).manual_seed(seed)
    shapes = ((1, 64, 1, 128), (1, 8, 16384, 128), (1, 8, 16384, 128))
    return tuple(torch.randn(s, generator=gen, device=device, dtype=H) for s in shapes)


def row(device, seed):
    """One row of inertia: a fold in segments, and their combination."""
    gen = torch.Generator(device).manual_seed(seed)
    masses = torch.rand(1, 32768, generator=gen, device=device, dtype=F) + 0.5
    return masses, torch.randn(1, 32768, 3, generator=gen, device=device, dtype=F)


def rows(device, seed):
    gen = torch.Generator(device).manual_seed(seed)
    return (torch.randn(2, 131_072, generator=gen, device=device, dtype=F),)


def features(device, seed):
    """Three kernels in a row."""
    gen = torch.Generator(device).manual_seed(seed)
    shapes = ((8, 1024, 64), (8, 1024, 64), (8, 1024, 64), (256, 64))
    return tuple(torch.randn(s, generator=gen, device=device, dtype=H) * 0.5 for s in shapes)


PROGRAMS: dict[str, tuple[Callable[..., object], Callable[[str, int], tuple[torch.Tensor, ...]]]] = {
    "decode": (o.gqa, decode),
    "decode over a long cache": (o.gqa, long_decode),
    "inertia": (o.inertia, row),
    "variance": (o.variance_by_hand, rows),
    "performer": (o.performer, features),
}


@pytest.fixture
def seen(cuda, monkeypatch):
    """Places of the kernels of each planned call."""
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a Hopper GPU or a later one")
    found, places = [], gpu_program.places
    monkeypatch.setattr(gpu_program, "places", lambda launched: found.append(places(launched)) or found[-1])
    monkeypatch.delenv("TILEFOLD_PDL", raising=False)
    return found


def compiled(fn, args: Sequence[tuple[torch.Tensor, ...]], seen, monkeypatch) -> tuple[object, list[torch.Tensor]]:
    """The function with dependent launches, planned, and what plain launches give, one call at a time."""
    torch._dynamo.reset()  # sizes that other tests had become dynamic, and a dynamic length is not cut everywhere
    monkeypatch.setenv("TILEFOLD_PDL", "0")
    plain, want = fuse(fn), []
    for a in args:
        want.append(plain(*a).clone())
        torch.cuda.synchronize()
    assert not seen
    monkeypatch.delenv("TILEFOLD_PDL")
    run = fuse(fn)
    run(*args[0])
    torch.cuda.synchronize()
    assert seen and [p.follows for p in seen[-1]] == [n > 0 for n in range(len(seen[-1]))] and len(seen[-1]) > 1
    return run, want


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_back_to_back_calls(name, cuda, seen, monkeypatch):
    """Calls share scratch memory, and every third result's memory goes to a later call."""
    fn, make = PROGRAMS[name]
    args = [make(cuda, seed) for seed in range(SETS)]
    run, want = compiled(fn, args, seen, monkeypatch)
    got = []
    torch.cuda._sleep(BUSY)
    for n in range(CALLS):
        y = run(*args[n % SETS])
        if n % 3:
            got.append((n % SETS, y))
        del y
    torch.cuda.synchronize()
    wrong = [n for n, (which, y) in enumerate(got) if not torch.equal(y, want[which])]
    assert not wrong, f"{len(wrong)} of {len(got)} differ, first {wrong[:5]}"


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_between_kernels_of_others(name, cuda, seen, monkeypatch):
    """Arguments are written just before a call, results are read and overwritten just after it."""
    fn, make = PROGRAMS[name]
    args = [make(cuda, seed) for seed in range(SETS)]
    run, want = compiled(fn, args, seen, monkeypatch)
    own = tuple(torch.empty_like(x) for x in args[0])
    got = []
    torch.cuda._sleep(BUSY)
    for n in range(CALLS):
        for mine, x in zip(own, args[n % SETS], strict=True):
            mine.copy_(x)
        y = run(*own)
        got.append(y.clone())
        y.fill_(float("nan"))
    torch.cuda.synchronize()
    wrong = [n for n, y in enumerate(got) if not torch.equal(y, want[n % SETS])]
    assert not wrong, f"{len(wrong)} of {len(got)} differ, first {wrong[:5]}"


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_in_a_cuda_graph(name, cuda, seen, monkeypatch):
    """Several calls in one graph, replayed back to back on new arguments."""
    fn, make = PROGRAMS[name]
    args = [make(cuda, seed) for seed in range(SETS)]
    run, want = compiled(fn, args, seen, monkeypatch)
    own = [tuple(x.clone() for x in a) for a in args]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*own[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(*a) for a in own]
    got = []
    for turn in range(CALLS // SETS):
        for n, mine in enumerate(own):
            for to, x in zip(mine, args[(n + turn) % SETS], strict=True):
                to.copy_(x)
        graph.replay()
        got.append([y.clone() for y in captured])
    torch.cuda._sleep(BUSY)
    for _ in range(CALLS // SETS):
        graph.replay()
    got.append([y.clone() for y in captured])  # as the last turn
    torch.cuda.synchronize()
    last = len(got) - 2
    wrong = [
        (turn, n)
        for turn, ys in enumerate(got)
        for n, y in enumerate(ys)
        if not torch.equal(y, want[(n + min(turn, last)) % SETS])
    ]
    assert not wrong, f"{len(wrong)} differ, first {wrong[:5]}"


@torch.no_grad()
def test_two_streams_at_once(cuda, seen, monkeypatch):
    args = [long_decode(cuda, seed) for seed in range(2)]
    run, want = compiled(o.gqa, args, seen, monkeypatch)
    streams = [torch.cuda.Stream() for _ in args]
    torch.cuda._sleep(BUSY)
    for s in streams:
        s.wait_stream(torch.cuda.current_stream())
    got = []
    for _ in range(CALLS):
        for n, s in enumerate(streams):
            with torch.cuda.stream(s):
                got.append((n, run(*args[n])))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[n]) for n, y in got)


class Block(torch.nn.Module):
    """Products of the library, and between them kernels in a row: statistics down columns in segments, a map."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256, bias=False)

    def forward(self, x):
        z = self.up(x)
        z = (z - z.mean(0)) * torch.rsqrt(z.var(0) + 1e-5)
        return x + self.down(torch.nn.functional.silu(z))


@pytest.mark.parametrize("graphs", [False, True])
def test_kernels_between_calls_of_the_library(graphs, cuda, seen, monkeypatch):
    """A program with both, forward and backward, on a stream that is busy: the same bits as plain launches."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(), Block()).to(cuda)
    xs = [torch.randn(4096, 256, device=cuda) for _ in range(SETS)]
    options = {"cudagraphs": True} if graphs else {}

    def results(run):
        found = []
        torch.cuda._sleep(BUSY)
        for n in range(4 * SETS):
            torch.compiler.cudagraph_mark_step_begin()
            y = run(xs[n % SETS])
            y.square().sum().backward()
            found += [y.detach().clone(), *(p.grad.clone() for p in net.parameters())]
            net.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return found

    monkeypatch.setenv("TILEFOLD_PDL", "0")
    torch._dynamo.reset()
    want = results(torch.compile(net, backend="tilefold", dynamic=False, options=options))
    monkeypatch.delenv("TILEFOLD_PDL")
    torch._dynamo.reset()
    asked = []
    place = GpuStep._place
    monkeypatch.setattr(GpuStep, "_place", lambda s, xs: asked.append(place(s, xs)) or asked[-1])
    got = results(torch.compile(net, backend="tilefold", dynamic=False, options=options))
    assert any(p.follows for p in asked)
    wrong = [n for n, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"{len(wrong)} of {len(got)} differ, first {wrong[:5]}"
