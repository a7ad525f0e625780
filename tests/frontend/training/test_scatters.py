"""Scatters at places that differ, as gathers: the same values, and which scatters stay."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.training.scatters import as_gathers

aten = torch.ops.aten
N, WIDTH, SHARE, EXPERTS = 12, 5, 3, 4


def order(keys):
    """The order of sorted keys, and its inverse."""
    p = torch.sort(keys).indices
    return p, torch.empty_like(p).index_put((p,), torch.arange(N))


def added(at, g, rows=N):
    return aten.index_put(g.new_zeros(rows, *g.shape[1:]), [at], g, True)


def by_order(keys, g):
    p, q = order(keys)
    return added(p, g), added(q, g)


def shared(keys, g):
    p, q = order(keys)
    return added(torch.div(p, SHARE, rounding_mode="floor"), g, N // SHARE), q


def picked(keys, g):
    at = g[:, :EXPERTS].topk(2, dim=-1).indices
    return (aten.scatter.src(g.new_zeros(N, EXPERTS), -1, at, g[:, 1:3]),)


def only_order(keys, g):
    return (added(torch.sort(keys).indices, g),)  # without its inverse


def any_places(keys, g):
    return added(keys, g), order(keys)[1]


def part_of_order(keys, g):
    p, q = order(keys)
    return added(torch.div(p, 5, rounding_mode="floor"), g, N // 5 + 1), q  # 5 does not divide N


def places_of_others(keys, g):
    return (aten.scatter.src(g.new_zeros(N, EXPERTS), -1, keys.view(N, 1) % EXPERTS, g[:, :1]),)


def into_ones(keys, g):
    at = g[:, :EXPERTS].topk(2, dim=-1).indices
    return (aten.scatter.src(g.new_ones(N, EXPERTS), -1, at, g[:, 1:3]),)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        *((by_order, 2), (shared, 1), (picked, 1)),
        *((only_order, 0), (any_places, 0), (part_of_order, 0), (places_of_others, 0), (into_ones, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_stay(fn, count, dtype):
    gen = torch.Generator().manual_seed(0)
    keys, g = torch.randint(EXPERTS, (N,), generator=gen), torch.randn(N, WIDTH, generator=gen).to(dtype)
    want, exact = fn(keys, g), fn(keys, g.double())
    gm = make_fx(fn, tracing_mode="fake")(keys, g)
    before = len(gm.graph.find_nodes(op="call_function", target=aten.index_put.default))
    assert as_gathers(gm.graph) == count
    gm.recompile()
    left = len(gm.graph.find_nodes(op="call_function", target=aten.index_put.default))
    assert left == before - (0 if fn is picked else count)
    for a, b, e in zip(gm(keys, g), want, exact, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        assert (a.double() - e).norm() <= (b.double() - e).norm() + 1e-12


def test_rows_that_are_not_picked_get_nothing_whatever_the_others_are():
    keys, g = torch.arange(N), torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
    gm = make_fx(picked, tracing_mode="fake")(keys, g)
    as_gathers(gm.graph)
    gm.recompile()
    g[:, 2] = torch.inf
    (a,), (b,) = gm(keys, g), picked(keys, g)
    assert torch.equal(a, b)


def test_the_only_element_is_picked():
    def fn(g):
        return aten.scatter.src(g.new_zeros(()), 0, g.topk(1, 0).indices, g)

    gm = make_fx(fn, tracing_mode="fake")(torch.tensor(2.0))
    assert as_gathers(gm.graph) == 0 and gm(torch.tensor(3.0)) == 3
