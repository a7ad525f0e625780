"""A region's kernels are asked for while it is compiled, for the tensors that it will be called with."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.backends.triton import launch, written
from tilefold.backends.triton.build import Job
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.views import Like
from tilefold.frontend.fuse import trace
from tilefold.frontend.operators import prefix
from tilefold.frontend.regions.direct import executable, start_building
from tilefold.frontend.regions.early import build_kernels_of
from tilefold.pipeline import compile_program
from tilefold.runtime import gpu_program
from tilefold.runtime.program import CompiledProgram

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")


def asked(monkeypatch, fn, *args: torch.Tensor) -> list[list[Like]]:
    found: list[list[Like]] = []
    monkeypatch.setattr(TritonKernel, "start_building", lambda self, xs, syms, place=None: found.append(list(xs)))
    torch._dynamo.reset()
    lowered = trace(fn, *args)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(Like, "of", staticmethod(lambda x: Like(tuple(x.shape), x.stride(), x.dtype, device)))
    monkeypatch.setattr(gpu_program, "enabled", lambda device: True)
    run = executable(lowered, compile_program(lowered.program, device="cuda"))
    start_building(run, args)
    return found


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


def test_kernels_alone(monkeypatch):
    (xs,) = asked(monkeypatch, lambda x: torch.softmax(x, -1), meta(64, 300).mT.contiguous().mT)
    assert [x.strides for x in xs] == [(1, 64), (300, 1)]
    assert {x.device.type for x in xs} == {"cuda"}


def test_kernels_beside_library_calls(monkeypatch):
    found = asked(monkeypatch, lambda x, w: torch.relu(x @ w).square() + 1, meta(512, 512), meta(512, 512))
    assert found
    assert all(x.shape == (512, 512) for xs in found for x in xs)


def test_nothing_where_sizes_are_not_known(monkeypatch):
    x = meta(64, 300)
    torch._dynamo.mark_dynamic(x, 0)
    assert asked(monkeypatch, lambda x: torch.softmax(x, -1), x) == []


def test_kernels_are_rendered_although_a_trace_makes_all_tensors_fake(monkeypatch):
    """As AOTAutograd calls a compiler; a sum of columns has lanes, whose identities are read off real tensors."""
    found: list[object] = []
    monkeypatch.setattr(launch, "start_building", found.append)
    monkeypatch.setattr(gpu_program, "enabled", lambda device: True)
    monkeypatch.setattr(launch, "is_hopper", lambda device: False)
    torch._dynamo.reset()
    lowered = trace(lambda x: x.float().square().sum(0).sqrt(), meta(8192, 4096))
    run = executable(lowered, compile_program(lowered.program, device="cuda"))
    with FakeTensorMode() as mode:
        start_building(run, [mode.from_tensor(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"))])
    assert found == []  # a tensor of no GPU
    with FakeTensorMode():
        start_building(run, [torch.empty(8192, 4096, dtype=torch.bfloat16, device="cuda")])
    assert found


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_region_is_not_given_up_for_a_kernel_that_is_not_compiled_ahead(strict, monkeypatch):
    def fails(*args, **how):
        raise KeyError("a bug")

    monkeypatch.setenv("TILEFOLD_STRICT", strict)
    monkeypatch.setattr(CompiledProgram, "start_building", fails)
    torch._dynamo.reset()
    lowered = trace(lambda x: torch.softmax(x, -1), meta(64, 300))
    run = executable(lowered, compile_program(lowered.program, device="cuda"))
    if strict == "1":
        with pytest.raises(KeyError, match="a bug"):
            start_building(run, [meta(64, 300)])
    else:
        start_building(run, [meta(64, 300)])


def sums(dy, at, table):
    rows = torch.ops.tilefold.rows_of_sums(at, dy, [50, 6], -1)
    return torch.ops.tilefold.added_rows(table, at, dy, -1), rows, torch.ops.tilefold.prefixes(dy, 0, "sum", dy.dtype)


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cuda", 1)])
def test_kernels_that_are_written_by_hand(device, times, monkeypatch):
    found: list[Job] = []
    monkeypatch.setattr(written, "start_building", found.append)
    monkeypatch.setattr(prefix, "units", lambda x: 132)
    with FakeTensorMode():
        types = torch.float32, torch.int64, torch.float32
        args = [torch.empty(s, dtype=t, device=device) for s, t in zip(((15, 6), (15,), (50, 6)), types, strict=True)]
        graph = make_fx(sums)(*args).graph
    for n in graph.nodes:
        build_kernels_of(n)
    assert [job.name for job in found] == ["added", "added", "prefixes"] * times
