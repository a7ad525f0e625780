"""Regions in C++ on a device: results, memory, streams, threads, errors, aliases; nothing waits for the device."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.gpu.blocks import close, made, x
from tilefold.backends.triton import launcher
from tilefold.backends.triton.driver import Handle
from tilefold.runtime.tape import Op

pytestmark = pytest.mark.gpu


def test_regions(cuda, in_cpp):
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
    assert in_cpp.regions and all(not r.refused and r._module.count(r._region) == 1 for r in in_cpp.regions)
    ops = {i.op for t in in_cpp.tapes for i in t.code}
    assert Op.START in ops and Op.LAUNCH not in ops and ops & {Op.MM, Op.ADDMM}


def test_planned_calls(cuda, in_cpp):
    """Kernels alone, launched dependently."""

    def several(x):
        t = torch.softmax(x, -1)
        return t, t.T @ t, x[1:]

    run = torch.compile(several, backend="tilefold")
    with torch.no_grad():
        for seed in range(4):
            given = x(cuda, seed=seed)
            for got, want in zip(run(given), several(given), strict=True):
                close(got, want)
                assert got.stride() == want.stride()
            assert run(given)[2].data_ptr() == given[1:].data_ptr()


def test_two_streams_and_threads(cuda, in_cpp):
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


def test_a_thousand_calls_with_changing_lengths(cuda, in_cpp):
    m = made(cuda).eval()
    run = torch.compile(m, backend="tilefold", dynamic=True)
    lengths, sizes = [16 + 7 * n for n in range(40)], []
    with torch.no_grad():
        want = {n: m(x(cuda, n, seed=n)) for n in lengths}
        for call in range(1000):
            n = lengths[call * 17 % len(lengths)]
            y = run(x(cuda, n, seed=n))
            if call % 10 == 0 or call < 100:
                close(y, want[n])
            if call in (500, 999):
                del y
                torch.cuda.synchronize()
                sizes.append(torch.cuda.memory_allocated())
    assert sizes[0] == sizes[1]
    (region,) = [r for r in in_cpp.regions if len(r.program.steps) > 2]
    assert region._module.count(region._region) == len(lengths)


def test_arguments_that_alias(cuda, in_cpp):
    def several(a, b):
        return torch.softmax(a + b, -1) @ b.T, a.flatten(), b[1:]

    run = torch.compile(several, backend="tilefold")
    with torch.no_grad():
        for seed in range(4):
            given = x(cuda, 65, seed=seed)
            for a, b in ((given[1:], given[:-1]), (given[1:], given[1:]), (given[1:], x(cuda, seed=seed + 9))):
                got, want = run(a, b), several(a, b)
                for y, z in zip(got, want, strict=True):
                    close(y, z)
                assert got[1].data_ptr() == a.data_ptr() and got[2].data_ptr() == b[1:].data_ptr()


def test_a_kernel_that_the_device_refuses_raises(cuda, in_cpp, monkeypatch):
    """More shared memory than a block can have: of the launches that the driver makes, not of the first call's."""
    usual = launcher.handle_of

    def huge(*given):
        h = usual(*given)
        return Handle(h.function, h.threads, 1 << 20, h.dependent, h.cooperative)

    def scaled(x):  # no running sum: along the last axis these are Inductor's, with what is around them
        return torch.softmax(x.float(), -1) * 0.123

    monkeypatch.setattr(launcher, "handle_of", huge)
    run = torch.compile(scaled, backend="tilefold")
    run(x(cuda))  # torch watches a graph's first call, which is not recorded
    run(x(cuda))  # the call that is recorded launches as the first one does
    assert [i.op for t in in_cpp.tapes for i in t.code] == [Op.START]
    with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
        run(x(cuda))
    monkeypatch.setattr(launcher, "handle_of", usual)
    close(torch.softmax(x(cuda), -1).sum(-1), torch.ones(64, device=cuda, dtype=torch.float16))  # the device is sound


def test_two_devices(cuda, in_cpp):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    m = {d: made(f"cuda:{d}").eval() for d in range(2)}
    run = {d: torch.compile(m[d], backend="tilefold") for d in range(2)}
    with torch.no_grad():
        for seed in range(4):
            for d in (1, 0):
                close(run[d](x(f"cuda:{d}", seed=seed)), m[d](x(f"cuda:{d}", seed=seed)))
