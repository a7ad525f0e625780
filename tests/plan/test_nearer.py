"""Kernels that are forecast to be far from their floor are cut where that is forecast to take less time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.block.ir import Loop, walk
from tilefold.frontend.fuse import trace
from tilefold.plan import nearer
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.hardware import H100
from tilefold.plan.nearer import BEYOND, FAR
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.steps import predictor


def two_norms(x, w):
    """Three kernels' work in one: a norm of rows, and the root of its mean square."""
    y = x - x.mean(-1, keepdim=True)
    z = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * w
    return z, z.square().mean(-1).sqrt()


def program():
    return trace(two_norms, torch.zeros(64, 4096), torch.zeros(4096)).program


def members(fused):
    return [k.plan.group.members for k in fused.kernels]


def test_parts_that_are_faster_take_its_place():
    def predict(k):
        return Predicted(1e-5 * len(k.plan.group.members) ** 3, 1e-5)

    whole, cut = (fuse_for_gpu(program(), GpuTarget(predict=p)) for p in (None, predict))
    assert len(whole.kernels) == 1 < len(cut.kernels)
    assert all(len(x) <= 2 for x in members(cut))
    assert sorted(m for x in members(cut) for m in x) == sorted(members(whole)[0])


def chain(x):
    """Ten kernels' work: every mean needs the last one."""
    for n in range(10):
        x = torch.tanh(x - x.mean(-1, keepdim=True)) * (n + 2)
    return x


def test_parts_that_many_cuts_leave_are_looked_at_once(monkeypatch):
    seen = []
    own = nearer.cuts
    monkeypatch.setattr(nearer, "cuts", lambda g, members: seen.append(members) or own(g, members))
    predict = lambda k: Predicted(1e-4 * len(k.plan.group.members), 1e-7)  # noqa: E731 (no cut is enough)
    fuse_for_gpu(trace(chain, torch.zeros(64, 4096)).program, GpuTarget(predict=predict))
    assert 4 < len(seen) == len(set(seen)) <= nearer.MOST_PARTS


def test_where_arithmetic_is_most_of_the_time_nothing_is_cut():
    """Of functions of an element, however far its memory's time is: their parts are not looked at."""

    def asked(fn):
        seen = set()
        predict = lambda k: seen.add(k.plan.group.members) or Predicted(3.5e-4, 3e-5)  # noqa: E731
        fuse_for_gpu(trace(fn, torch.zeros(4096, 4096)).program, GpuTarget(predict=predict))
        return len(seen)

    def parts(x):
        return torch.lgamma(x), torch.lgamma(x + 0.5), torch.lgamma(x + 2.5)

    assert asked(lambda x: sum(parts(x)).softmax(-1)) == 1
    assert asked(lambda x: (x + 1.0).abs().softmax(-1)) > 1


def test_a_long_search_ends():
    """No cut is enough, and parts of parts are many: each is forecast, the longer its kernel the longer."""

    def asked(text):
        found = set()

        def predict(k):
            found.add(k.plan.group.members)
            return Predicted(1e-4 * len(k.plan.group.members), 1e-7, text)

        fuse_for_gpu(trace(chain, torch.zeros(64, 4096)).program, GpuTarget(predict=predict))
        return len(found)

    assert asked(nearer.MOST_FORECAST) < asked(nearer.MOST_FORECAST // 8) < asked(0)


def test_a_cut_passes_no_more_through_memory_than_speed_may_cost():
    predict = lambda k: Predicted(1e-5 * len(k.plan.group.members) ** 3, 1e-5)  # noqa: E731
    target = GpuTarget(replace(H100, passed=0.0), predict=predict)
    assert len(fuse_for_gpu(program(), target).kernels) == 1


class Small(GpuTarget):
    """Whose thread blocks hold kernels of a few operators."""

    def against(self, k):
        return "too large" if len(k.plan.group.members) > 4 else None


def test_parts_of_what_does_not_fit_are_looked_at_too():
    assert max(map(len, members(fuse_for_gpu(program(), Small())))) > 2
    predict = lambda k: Predicted(1e-3 if len(k.plan.group.members) > 2 else 1e-5, 1e-5)  # noqa: E731
    assert max(map(len, members(fuse_for_gpu(program(), Small(predict=predict))))) <= 2


@pytest.mark.parametrize(
    "predict",
    [
        lambda k: Predicted(1e-3, 1e-3 / FAR),  # it is near
        lambda k: Predicted(BEYOND, 0.0),  # too little can be won
        lambda k: Predicted(1e-3 / len(k.plan.group.members), 1e-6),  # parts take longer
        lambda k: Predicted(1e-3, 1e-6),  # each as long as all
        lambda k: None,  # nobody knows
        lambda k: Predicted(1e-3, 1e-6) if len(k.plan.group.members) > 2 else None,  # of the parts
    ],
)
def test_it_stays_whole(predict):
    assert len(fuse_for_gpu(program(), GpuTarget(predict=predict)).kernels) == 1


def scores_of_edges(x, a, b):
    """x: nodes; every pair has a score for each of four heads. One pass over keys would make each sum anew."""
    s = torch.nn.functional.leaky_relu((x * a).sum(-1)[:, :, None] + (x * b).sum(-1)[:, None, :])
    return torch.softmax(s.permute(0, 3, 1, 2), -1)


def test_forecasts_of_what_is_rendered_decide():
    x = torch.zeros(8, 300, 4, 64)
    p = trace(scores_of_edges, x, torch.zeros(4, 64), torch.zeros(4, 64)).program
    usual, cut = (fuse_for_gpu(p, GpuTarget(predict=predict)) for predict in (None, predictor(H100)))
    seconds = [sum(predictor(H100)(k).seconds for k in fused.kernels) for fused in (usual, cut)]
    assert seconds[1] <= seconds[0] and seconds[1] < 60e-6
    assert all(any(isinstance(n, Loop) for n in walk(k.block.body)) for k in cut.kernels)


def advantage(h, w, a):
    """A product of few columns over a long depth, and a softmax of rows of it and others."""
    return ((h.flatten(1) @ w)[:, None] + a).softmax(-1)


def test_a_product_that_is_apart_takes_what_a_call_of_it_takes():
    """256 x 19200 times 19200 x 24 fills eight thread blocks: 337 us measured on an H100, in a call and a kernel 11
    forecast."""
    half = torch.bfloat16
    h, w, a = (torch.zeros(*s, dtype=half) for s in ((256, 48, 20, 20), (19200, 24), (256, 18, 24)))
    p = trace(advantage, h.to(memory_format=torch.channels_last), w, a).program

    def predict(k):  # products are slow, whatever is with them
        return Predicted(1e-3, 1e-5) if "mm" in k.plan.group.members else Predicted(1e-5, 1e-5)

    cut = members(fuse_for_gpu(p, GpuTarget(predict=predict)))
    assert ("mm",) in cut
    alone = members(fuse_for_gpu(p, GpuTarget(predict=predict, library=False)))
    assert ("mm",) not in alone


def of_neighbours(q, k, idx, w):
    """Norms of differences from neighbours, and a layer of few columns of them."""
    h = torch.nn.functional.layer_norm(k[idx] - q[:, None], (64,))
    return torch.relu(torch.relu(h) @ w)


def test_rows_of_neighbours_may_pass_memory_between_a_norm_and_a_product():
    """They are many times what is read: 225 us on an H100 in one kernel, of a product that no matrix unit takes."""
    q, k = (torch.empty(20000, 64, device="meta") for _ in range(2))
    idx = torch.empty(20000, 16, dtype=torch.int64, device="meta")
    p = trace(of_neighbours, q, k, idx, torch.empty(64, 8, device="meta")).program
    assert ("mm",) in members(fuse_for_gpu(p, GpuTarget(predict=predictor(H100))))


def two_critics(s, a, *w):
    """Two networks of one concatenation."""

    def critic(x, u, v, o):
        for m in (u, v):
            x = torch.relu(torch.nn.functional.layer_norm(x @ m, (256,)))
        return x @ o

    x = torch.cat((s, a), 1)
    return torch.minimum(critic(x, *w[:3]), critic(x, *w[3:]))


def test_what_several_networks_read_is_written_first():
    """For its sake both are one kernel, which has the columns of both: 395 us measured on an H100, 141 by the library's
    products and 12 kernels. The cut in front of both passes more through memory than any other."""
    sizes = [(376,), (8,), *[(384, 256), (256, 256), (256, 1)] * 2]
    given = [torch.empty(*([16384, *n] if len(n) == 1 else n), dtype=torch.bfloat16, device="meta") for n in sizes]
    p = trace(two_critics, *given).program

    def predict(k):
        own = k.plan.group.members
        return Predicted(1e-3 if "cat" in own and len(own) > 1 else 1e-5, 1e-5)

    assert ("cat",) in members(fuse_for_gpu(p, GpuTarget(predict=predict)))


def pairs_both_ways(a, b):
    """Of every pair more arithmetic than is done again for each sum."""
    x, y = a[:, None], b[None]
    d = torch.exp(-((x[..., 0] - y[..., 0]) ** 2)) * torch.cos(x[..., 0] * y[..., 1]) * torch.sin(x[..., 1] * y[..., 0])
    return d.sum(1).abs().mean() + d.sum(0).abs().mean()


def test_of_pairs_summed_along_either_axis_no_thread_block_has_all():
    """One kernel reads next to nothing, so that no cut may pass much through memory: forecast 22 ms."""
    p = trace(pairs_both_ways, *(torch.empty(8192, 2, device="meta") for _ in range(2))).program
    found = fuse_for_gpu(p, GpuTarget(predict=predictor(H100)))
    assert sum(predictor(H100)(k).seconds for k in found.kernels) < 1e-3
