"""Folds with a wide state whose columns several groups of warps share, on a Hopper GPU, against float64."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tests.backends.triton.groups import WIDE, shared_out
from tilefold import fuse
from tilefold.backends.triton import launch
from tilefold.frontend.verify import verify
from tilefold.runtime import gpu_configs
from tilefold.suites.gpu import operators as o

pytestmark = pytest.mark.gpu


@pytest.fixture
def grouped(cuda, monkeypatch) -> list[str]:
    """Names of the kernels that were rendered for groups, as all that can be are."""
    if not launch.is_hopper(torch.device(cuda)):
        pytest.skip("groups of warps need a GPU of compute capability 9.0")
    torch._dynamo.reset()
    gc.collect()  # kernels of other tests' programs, which this one's would share
    names: list[str] = []
    render = launch.render_groups

    def watched(kernel, *args, **how):
        done = render(kernel, *args, **how)
        names.append(kernel.name)
        return done

    monkeypatch.setattr(launch, "render_groups", watched)
    monkeypatch.setattr(launch, "default_config", shared_out)
    monkeypatch.setattr(gpu_configs, "_choose", lambda block, sizes: None)
    return names


def filled(shapes, device) -> list[torch.Tensor]:
    gen = torch.Generator(device).manual_seed(0)

    def one(shape, dtype):
        y = torch.randn(shape, generator=gen, device=device)
        return y > 0 if dtype is torch.bool else y.to(dtype)

    return [one(*s) for s in shapes]


@pytest.mark.parametrize("name", WIDE)
def test_right(name, grouped, device):
    fn, shapes = WIDE[name]
    args = filled(shapes, device)
    run = fuse(fn)
    report = verify(fn, *args, compiled=run, hostile=False)
    assert report.ok, str(report)
    assert grouped
    first = run(*args)
    assert all(torch.equal(first, run(*args)) for _ in range(50))


@pytest.mark.parametrize("scale, length", [(1e4, 331), (0.0, 332)])
def test_hostile_scores(scale, length, grouped, device):
    """Of lengths of their own, for programs of a process share kernels."""
    q, latent = (torch.randn(2, n, 576, device=device, dtype=torch.bfloat16) for n in (128, length))
    fn: Callable = o.mla(512)
    report = verify(fn, q * scale, latent, compiled=fuse(fn), hostile=False)
    assert report.ok and grouped, str(report)


def test_one_compilation_serves_all_lengths(grouped, device):
    fn = o.mla(512)
    run = fuse(fn)
    for n in (333, 65, 1000, 64, 129, 2000):
        q, latent = (torch.randn(3, k, 576, device=device, dtype=torch.bfloat16) for k in (128, n))
        torch._dynamo.mark_dynamic(latent, 1)
        report = verify(fn, q, latent, compiled=run, hostile=False)
        assert report.ok, f"{n}: {report}"
    assert len(run.graphs) == 1 and grouped
