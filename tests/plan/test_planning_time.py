"""Programs that do the same over and over: nothing is asked as often as there are paths, and no forecast in vain."""

from __future__ import annotations

import torch

from tests.block.test_long_chains import seconds
from tests.plan.test_nearer import program
from tilefold.block.canonical import canonical
from tilefold.frontend.fuse import trace
from tilefold.plan import gpu
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.hardware import H100
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime import steps


def unrolled(x, f):
    """x: steps x rows x columns. Each state is read four times by the next: 4^20 paths lead to the last."""
    c, states = torch.zeros_like(x[0]), []
    for z in x:
        t = torch.sigmoid(z + f * c)
        c = t * c + (1 - t) * z
        states.append(torch.tanh(c) * (t * c))
    return torch.stack(states), c


def test_a_recurrence_takes_no_time_that_doubles_with_each_step():
    p = trace(unrolled, torch.zeros(20, 96, 512), torch.zeros(512)).program
    with seconds(20):
        assert fuse_for_gpu(p).kernels


def test_a_cut_is_forecast_no_further_than_it_can_win():
    """Of a part that takes as long as all: neither what is beside it, nor any part that has all of it."""
    asked = []

    def predict(k):
        asked.append(frozenset(k.plan.group.members))
        return Predicted(1e-3, 1e-6)

    (kernel,) = fuse_for_gpu(program(), GpuTarget(predict=predict)).kernels
    assert len(asked) < len(kernel.plan.group.members)  # cuts are as many, but one, of two parts each
    assert not any(x < y for n, x in enumerate(asked) for y in asked[n + 1 :])


def test_equal_kernels_are_forecast_once(monkeypatch):
    found, own = [], steps.forecast
    monkeypatch.setattr(steps, "forecast", lambda *a: found.append(a) or own(*a))
    predict = steps.predictor(H100)
    (kernel,) = fuse_for_gpu(program()).kernels
    assert canonical(kernel.block).block and predict(kernel) == predict(kernel)
    assert len(found) == 1


def test_what_does_not_fit_is_found_half_by_half(monkeypatch):
    """A kernel may not have two members that stand next to each other: not every cut that leaves both is built."""
    p = trace(unrolled, torch.zeros(6, 96, 512), torch.zeros(512)).program
    (whole,) = [k for k in fuse_for_gpu(p).kernels if len(k.plan.group.members) > gpu.MANY]
    both, asked = {*whole.plan.group.members[9:11]}, []

    def refuse(k):
        asked.append(k)
        return "it has both" if both <= {*k.plan.group.members} else None

    fused = fuse_for_gpu(p, GpuTarget(refuse=refuse))
    assert not any(both <= {*k.plan.group.members} for k in fused.kernels)
    halved, asked[:] = len(asked), []
    monkeypatch.setattr(gpu, "MANY", 1000)
    fuse_for_gpu(p, GpuTarget(refuse=refuse))
    assert halved < len(asked)
