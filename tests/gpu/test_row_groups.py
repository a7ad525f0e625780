"""Folds whose rows groups of warps own, on a Hopper GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.gradients import GRADIENTS, with_heads
from tests.backends.triton.rows import FOLDS, TILES, by_rows
from tests.gpu.test_groups import filled
from tilefold import fuse
from tilefold.backends.triton import launch
from tilefold.frontend.verify import verify
from tilefold.runtime import gpu_configs
from tilefold.suites.gpu import operators as o

pytestmark = pytest.mark.gpu


@pytest.fixture
def rendered(cuda, monkeypatch) -> list[str]:
    """Names of the kernels that were rendered so; they are, whatever their sizes."""
    if not launch.is_hopper(torch.device(cuda)):
        pytest.skip("groups of warps need a GPU of compute capability 9.0")
    torch._dynamo.reset()  # it makes numbers dynamic that it saw change
    names: list[str] = []
    render = launch.render_rows

    def watched(kernel, *args, **how):
        done = render(kernel, *args, **how)
        names.append(kernel.name)
        return done

    monkeypatch.setattr(launch, "render_rows", watched)
    monkeypatch.setattr(launch, "default_config", by_rows())
    monkeypatch.setattr(gpu_configs, "_choose", lambda block, sizes: None)
    return names


@pytest.mark.parametrize("name", FOLDS)
def test_right(name, rendered, device, monkeypatch):
    fn, shapes = FOLDS[name]
    monkeypatch.setattr(launch, "default_config", by_rows(tile=TILES.get(name, 128)))
    args = filled(shapes, device)
    run = fuse(fn)
    report = verify(fn, *args, compiled=run, hostile=False)
    assert report.ok, str(report)
    assert rendered
    first = run(*args)
    for _ in range(20):
        again = run(*args)
        pairs = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
        assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in pairs)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, draws, rendered, device, monkeypatch):
    """Each configuration in a program of its own: `draws` has heads twice."""
    fn, shapes = GRADIENTS[name]
    monkeypatch.setattr(launch, "default_config", by_rows(tile=64, draws=draws))
    args = filled(with_heads(shapes, 4 if draws else 2), device)
    run = fuse(fn)
    report = verify(fn, *args, compiled=run, hostile=False)
    assert report.ok and rendered, str(report)
    first = run(*args)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*args), strict=True))


@pytest.mark.parametrize("groups, tile, stages", [(3, 64, 3), (2, 64, 4), (3, 64, 2)])
def test_other_configurations(groups, tile, stages, rendered, device, monkeypatch):
    monkeypatch.setattr(launch, "default_config", by_rows(groups, tile, stages))
    q, k, v = (torch.randn(2, 8, n, 64, device=device, dtype=torch.bfloat16) for n in (1000, 1500, 1500))
    report = verify(o.causal, q, k, v, compiled=fuse(o.causal), hostile=False)
    assert report.ok and rendered, str(report)


@pytest.mark.parametrize("scale, length", [(1e4, 331), (0.0, 332)])
def test_hostile_scores(scale, length, rendered, device):
    """Of lengths of their own, for programs of a process share kernels."""
    q, k, v = (torch.randn(1, 4, length, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    report = verify(o.causal, q * scale, k, v, compiled=fuse(o.causal), hostile=False)
    assert report.ok and rendered, str(report)


def test_one_compilation_serves_all_lengths(rendered, device):
    run = fuse(o.causal)
    for n in (333, 65, 1000, 64, 129, 2000):
        q, k, v = (torch.randn(1, 4, n, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)
        report = verify(o.causal, q, k, v, compiled=run, hostile=False)
        assert report.ok, f"{n}: {report}"
    assert len(run.graphs) == 1 and rendered
