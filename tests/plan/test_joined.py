"""Maps that are written where they are summed, if that is forecast to take less than reading them again."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.targets.gpu import GpuTarget


def gradient(a, r, x):
    """Of an activation, which goes on to a layer, and of the bias in front of it."""
    g = torch.where(r <= 0, 0.0, a) * x
    return g, g.sum(0)


def kernels(predict, calls=()):
    """What the kernels of the program compute."""
    p = trace(gradient, *(torch.empty(8192, 1024, device="meta") for _ in range(3))).program
    made = fuse_for_gpu(p, GpuTarget(predict=predict), calls=calls).kernels
    return {frozenset(m.removesuffix("_out") for m in k.plan.group.members) for k in made}


def forecast(both):
    """A map takes 10 us and a sum, in segments, twice that; each kernel of both this."""
    return lambda k: Predicted(both if len(k.plan.group.members) > 1 else 1e-5, 1e-5)


@pytest.mark.parametrize(("both", "one"), [(1.2e-5, True), (1.5e-5, False), (5e-5, False)])
def test_forecasts_decide(both, one):
    found = kernels(forecast(both))
    assert (frozenset({"mul", "sum_1"}) in found) == one
    assert (frozenset({"mul"}) in found) != one


def test_where_nothing_is_forecast_they_stay_apart():
    assert frozenset({"mul"}) in kernels(None)


def test_what_has_no_forecast_is_not_joined():
    assert frozenset({"mul"}) in kernels(lambda k: None if len(k.plan.group.members) > 1 else Predicted(1e-5, 1e-5))


def test_a_call_of_the_library_stays_one():
    """A weight's gradient is a sum as well; whose kernel it would be is no kernel of ours."""
    found = kernels(forecast(1e-6), calls=[("sum_1_out",)])
    assert frozenset({"mul"}) in found and frozenset({"sum_1"}) in found


def step(grad, average, param):
    """A step that is scaled by a mean of what it reads; the average of gradients reads the same."""
    update = torch.sign(average * 0.9 + grad * 0.1)
    share = (update * grad > 0).float().mean().clamp(min=1e-3)
    return param - update / share, average * 0.99 + grad * 0.01


def kernels_of_step(predict):
    p = trace(step, *(torch.empty(2048, 2752, device="meta") for _ in range(3))).program
    return len(fuse_for_gpu(p, GpuTarget(predict=predict)).kernels)


def by_bytes(k):
    """A microsecond a MB of what is read and written, and one for the launch."""
    sizes = {d: int(e.value) for d, e in k.block.sizes.items()}
    read = sum(i.dtype.nbytes * math.prod(int(e.value) for e in i.shape) for i in k.block.inputs)
    written = sum(r.dtype.nbytes * math.prod(sizes[d] for d in r.dims) for r in k.block.results)
    seconds = 1e-6 + (read + written) * 1e-12
    return Predicted(seconds, seconds)


def test_a_map_of_what_another_kernel_reads_is_made_there():
    assert kernels_of_step(by_bytes) == 3  # the sum in segments with the average, its end, and the step


def test_but_not_where_both_together_would_take_as_long():
    assert kernels_of_step(lambda k: Predicted(*(2 * [1e-5 + 1e-4 * (len(k.block.results) > 1)]))) == 4
