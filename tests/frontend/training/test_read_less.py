"""What a backward reads, from fewer bytes: the same gradients, and where nothing is gained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.training.test_saving import passes, right, saved
from tilefold.frontend.training.prices import widens
from tilefold.frontend.training.read_less import narrow_places, signs_of_sources

aten = torch.ops.aten


def later(graph):
    """Operators that depend on the last argument, and it."""
    found = {graph.find_nodes(op="placeholder")[-1]}
    for n in graph.nodes:
        if n.op != "output" and any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def signs(fn, *args):
    """How many gradients compare what was rectified; the graph before and after gives the same."""
    gm = make_fx(fn, tracing_mode="fake")(*args)
    want = gm(*args)
    count = signs_of_sources(gm.graph, later(gm.graph))
    gm.recompile()
    for a, b in zip(gm(*args), want, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return count


def normed(x, w, g):
    y = torch.relu(x * w + 1)
    d = aten.threshold_backward(g, y.detach(), 0)
    return y @ y.mT, d, (d * x).sum(0)


def read_elsewhere_only_by_the_mask(x, w, g):
    y = torch.relu(x * w + 1)
    return y @ y.mT, aten.threshold_backward(g, y, 0)


def of_two(x, w, g):
    y = torch.relu(x * w + x.flip(0))
    z = torch.relu(x @ x.mT @ x + x)
    d = aten.threshold_backward(g, z, 0)
    return y, d, (d * x).sum(0)


def of_a_product(x, w, g):
    z = x @ w.expand(x.shape[-1], -1)
    y = torch.relu(z)
    d = aten.threshold_backward(g, y, 0)
    return y @ y.mT, d, (d * x).sum(0)


def wider(x, w, g):
    y = torch.relu((x.double() * w).to(x.dtype))
    d = aten.threshold_backward(g, y, 0)
    return y @ y.mT, d, (d * x.double()).sum(0)


def at_a_half(x, w, g):
    y = torch.relu(x * w + 1)
    d = aten.threshold_backward(g, y, 0.5)
    return y @ y.mT, d, (d * x).sum(0)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        *((normed, 1), (wider, 1)),
        *((read_elsewhere_only_by_the_mask, 0), (of_two, 0), (of_a_product, 0), (at_a_half, 0)),
    ],
)
def test_signs_are_those_of_what_was_rectified(fn, count):
    gen = torch.Generator().manual_seed(0)
    x, w, g = torch.randn(40, 32, generator=gen), torch.randn(32, generator=gen), torch.randn(40, 32, generator=gen)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[1], w[5] = -1 / w, 0.0
    assert signs(fn, x, w, g) == count


def test_a_source_of_more_bytes_is_not_read_instead():
    def fn(x, w, g):
        y = torch.relu((x * w).to(torch.bfloat16))
        d = aten.threshold_backward(g, y, 0)
        return y @ y.mT, d, (d * x).sum(0)

    x, w, g = torch.randn(40, 32, dtype=torch.float64), torch.randn(32), torch.randn(40, 32, dtype=torch.bfloat16)
    assert signs(fn, x, w, g) == 0
    assert signs(lambda x, w, g: fn(x.to(torch.bfloat16), w, g), x.to(torch.bfloat16), w, g) == 1


def test_behind_a_batch_norm_the_saved_result_is_for_the_library_alone():
    def step(x, w, v):
        y = F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, training=True))
        return F.conv2d(y, v).square()

    gen = torch.Generator().manual_seed(2)
    args = [torch.randn(*s, generator=gen) for s in ((2, 3, 16, 16), (32, 3, 3, 3), (4, 32, 3, 3))]
    _, gradients, graphs = passes(step, *args)
    (mask,) = graphs["backward"].graph.find_nodes(op="call_function", target=aten.threshold_backward.default)
    assert mask.args[1].op != "placeholder"
    (relu,) = (n for n in graphs["backward"].graph.find_nodes(op="placeholder") if "relu" in n.name)
    assert {u.target for u in relu.users} == {aten.convolution_backward.default}
    right(step, args, gradients)


@pytest.mark.parametrize(("side", "kind"), [(12, torch.int16), (182, torch.int32)])
def test_places_of_maxima_wait_in_the_narrowest_type_that_holds_them(side, kind):
    def pooled(x):
        return F.max_pool2d(x, 3, 2, 1).square()

    gen = torch.Generator().manual_seed(4)
    x = torch.randn(1, 2, side, side, generator=gen)
    x[0, 1, -3:, -3:] = 9.0  # the last places, and ties
    _, gradients, graphs = passes(pooled, x)
    assert [d for _, d in saved(graphs) if not d.is_floating_point] == [kind]
    right(pooled, [x], gradients)


def test_places_that_no_backward_reads_stay():
    gm = make_fx(lambda x, g: (*F.max_pool2d(x, 2, return_indices=True), g), tracing_mode="fake")(
        torch.randn(1, 2, 8, 8), torch.randn(3)
    )
    assert narrow_places(gm.graph, later(gm.graph)) == 0


def test_wider_integers_hold_narrow_ones_and_floats_do_not():
    def fn(x):
        n = x.to(torch.int32)
        return n.to(torch.int64), n.to(torch.float32), n.to(torch.int16), n.to(torch.bool)

    gm = make_fx(fn, tracing_mode="fake")(torch.ones(4, dtype=torch.int16))
    found = [widens(n) for n in gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)]
    assert found == [True, True, False, False, False]
