"""Regions are as large as the uncovered operators allow, run in order, and say why the rest is not theirs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.frontend.check import randn
from tilefold.frontend.capture.random import gather_seeds
from tilefold.frontend.operators.table import VIEWS
from tilefold.frontend.regions.extract import extract
from tilefold.frontend.regions.partition import Partition, _units, halves, is_trivial, partition
from tilefold.frontend.torch_compile import aot


def graph_of(fn, *args, dynamic=False) -> torch.fx.GraphModule:
    """The ATen graph that the backend would get."""
    found = []

    def inference(gm, titles):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=lambda gm, ex: aot(gm, ex, inference), fullgraph=True, dynamic=dynamic)(*args)
    return found[0]


def shape_of(p: Partition) -> list[tuple[bool, int]]:
    return [(g.covered, len(g.nodes)) for g in p.groups]


def test_a_covered_graph_is_one_region():
    p = partition(graph_of(lambda x: torch.softmax(x * 2, -1).sum(0), randn(3, 4)))
    assert [g.covered for g in p.groups] == [True] and not p.fallbacks


def test_a_copy_that_moves_elements_is_compiled_and_one_that_does_not_is_none():
    def compiled(fn, *args):
        return [not is_trivial(g) for g in partition(graph_of(fn, *args)).groups]

    x = randn(3, 4)
    for moves in (lambda x: x.t().contiguous(), lambda x: x.flip(0), lambda x: x.roll(1, 1), lambda x: x.repeat(2, 1)):
        assert compiled(moves, x) == [True]
    for lies in (lambda x: x.clone(), lambda x: x.t().clone(), lambda x: x[:1].t().contiguous()):
        assert compiled(lies, x) in ([], [False])
    assert compiled(lambda x: torch.sort(x.flip(0))[0], x) == [True]  # the sort, which takes the copy along


@pytest.mark.parametrize(
    "device, k, extent, ours",
    [("cuda", 50, 50257, False), ("cuda", 1, 50257, True), ("cuda", 8, 128, True), ("cpu", 50, 50257, True)],
)
def test_many_of_many_elements_are_picked_by_the_library_on_a_gpu(device, k, extent, ours):
    def picked(x):
        values, at = torch.topk(x * 2, k)
        return torch.softmax(values, -1), at

    with FakeTensorMode():
        found = partition(make_fx(picked)(torch.empty(8, extent, device=device)))
    assert [g.covered for g in found.groups] == ([True] if ours else [True, False, True])
    assert all(f.meant for f in found.fallbacks) and len(found.fallbacks) == (not ours)


def sorted_copy(device: str, *, viewed: bool) -> torch.fx.GraphModule:
    """A sort of a copy that lies otherwise than what it is of, or of a view of the copy."""
    with FakeTensorMode():
        x = torch.empty(8, 64, device=device)
        graph = torch.fx.Graph()
        given = graph.placeholder("x")
        turned = graph.call_function(torch.ops.aten.t.default, (given,))
        copy = graph.call_function(torch.ops.aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        values = (x, x.t(), torch.empty(64, 8, device=device))
    for n, value in zip((given, turned, copy), values, strict=True):
        n.meta["val"] = value
    last = values[-1]
    if viewed:
        copy = graph.call_function(torch.ops.aten.view.default, (copy, [32, 16]))
        last = copy.meta["val"] = torch.ops.aten.view.default(last, [32, 16])
    done = graph.call_function(torch.ops.aten.sort.default, (copy,))
    done.meta["val"] = (last, last)
    out = graph.call_function(operator.getitem, (done, 0))
    out.meta["val"] = last
    graph.output((out,))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_copy_that_moves_elements_for_an_operator_of_others_is_a_region_on_a_gpu(viewed):
    groups = {d: partition(sorted_copy(d, viewed=viewed)).groups for d in ("cuda", "cpu")}
    assert [(g.covered, is_trivial(g)) for g in groups["cuda"]] == [(True, False), (False, False)]
    assert [g.covered for g in groups["cpu"]] == [False]


def test_an_uncovered_operator_in_the_middle_gives_two_regions_and_a_reason():
    def f(x):
        return torch.sort((x * 2).relu(), 0)[0].exp().sum(1)

    p = partition(graph_of(f, randn(3, 4)))
    assert [g.covered for g in p.groups] == [True, False, True]
    assert [g.level for g in p.groups] == [0, 1, 2]
    (why,) = p.fallbacks
    assert "sort" in why.reason and why.loc is not None and "sort" in why.loc.text


def test_a_scan_takes_what_is_elementwise_around_it_along():
    def f(x):
        return torch.cumsum((x.softmax(1) * 2).relu(), 0).exp().sum(1)

    p = partition(graph_of(f, randn(3, 4)))
    assert [g.covered for g in p.groups] == [True, False, True] and len(p.fallbacks) == 1
    names = [{str(n.target).split(".")[1] for n in g.nodes} for g in p.groups]
    assert names[1] == {"mul", "relu", "cumsum", "exp"} and names[2] == {"sum"}


def test_independent_work_is_no_region_of_its_own():
    def f(x, y):
        a = torch.sort(x.softmax(0), 0)[0].exp()
        b = (y @ y.t()).softmax(-1)
        return a, b

    p = partition(graph_of(f, randn(3, 4), randn(5, 5)))
    assert [g.covered for g in p.groups] == [True, False, True]
    assert [sum("softmax" in str(n.target) for n in g.nodes) for g in p.groups] == [1, 0, 1]


def test_what_only_a_later_region_needs_is_computed_there():
    """A mask of 40 x 40 is made of two vectors of 40, which cross in its place."""

    def f(x, a, b):
        mask = (a.exp()[:, None] < b.exp()) & (a[:, None] > 0)
        return torch.where(mask, torch.sort(x * 2)[0], 0.0)

    p = partition(graph_of(f, randn(40, 40), randn(40), randn(40)))
    assert [str(n.target) for n in p.groups[0].results] == ["aten.mul.Tensor"]
    assert not any("exp" in str(n.target) for n in p.groups[0].nodes)


def test_what_shrinks_is_computed_before_it_crosses():
    def f(x, y):
        s = (y @ y).sum(1)  # 40 numbers of 1,600, which the sort has to wait for anyway
        return torch.sort(y @ y)[0] * s

    p = partition(graph_of(f, randn(40, 40), randn(40, 40)))
    assert [g.covered for g in p.groups] == [True, False, True]
    assert any(str(n.target) == "aten.sum.dim_IntList" for n in p.groups[0].nodes)


def test_views_and_constants_go_with_their_readers():
    def f(x, w):
        zero = torch.zeros(4, 4)
        t = w.t()
        y = torch.sort(x @ t)[0]
        return y @ t + zero, torch.sort(y + zero)[0] @ t

    p = partition(graph_of(f, randn(4, 4), randn(4, 4)))
    assert not any(n.target in VIEWS or not n.all_input_nodes for g in p.groups for n in g.results)
    made = [str(n.target) for g in p.groups for n in g.nodes]
    assert made.count("aten.t.default") > 1  # once a region that reads it


def test_a_small_part_of_a_tensor_crosses_instead_of_it():
    p = partition(graph_of(lambda x: torch.sort((x * 2).exp()[:, :2].t())[0], randn(40, 40)))
    (region,) = [g for g in p.groups if g.covered]
    assert all(n.meta["val"].numel() == 80 for n in region.results)


def test_results_are_what_others_read():
    gm = graph_of(lambda x: ((y := torch.sort(x * 2)[0]).exp(), y[0], y.shape[0], x.t()), randn(3, 4))
    p = partition(gm)
    for g in p.groups:
        part = extract(gm, g)
        for n in part.results:
            assert any(u not in g.nodes or u.op == "output" for u in n.users)
        assert not set(part.results) & set(p.aliases)


def test_what_waits_for_no_region_comes_before_the_first_and_cuts_nothing():
    def f(x, i):
        order = torch.sort(i)[1]
        y = (x.softmax(-1) * torch.randperm(4)).sum(0)
        return y[order] + torch.nn.functional.dropout(y, 0.5)

    gm = graph_of(f, randn(3, 4), torch.arange(4))
    assert gather_seeds(gm.graph) == 1
    p = partition(gm)
    assert [(g.level, g.covered) for g in p.groups] == [(-3, False), (-1, False), (0, True)]
    names = {str(n.target).split(".")[1] for n in p.groups[0].nodes if n.target is not operator.getitem}
    assert names == {"randperm", "randint", "unbind"}


def test_sizes_read_off_early_results_come_after_them():
    def f(x, i):
        n = torch.sort(i)[0][0].item()
        return x.softmax(0) * n

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        p = partition(graph_of(f, randn(3), torch.arange(4)))
    level = {n: g.level for g in p.groups for n in g.nodes}
    assert p.scalars and all(level.get(a, -1) <= at for at, n in p.scalars for a in n.all_input_nodes)
    assert all(at >= 0 for at, n in p.scalars if any(a in level for a in n.all_input_nodes))


def test_no_edge_leaves_a_region_and_returns():
    def f(x):
        a = x + 1
        b = torch.cumsum(a, 0)
        return a * b + torch.cumprod(a * 2, 1)

    p = partition(graph_of(f, randn(3, 4)))
    level = {n: g.level for g in p.groups for n in g.nodes}
    for n in level:
        assert all(level[a] <= level[n] for a in n.all_input_nodes if a in level)
    assert len({g.level for g in p.groups}) == len(p.groups)


def test_results_of_an_uncovered_operator_with_several_stay_with_it():
    p = partition(graph_of(lambda x: torch.sort(x)[0] * 2, randn(5)))
    (uncovered,) = [g for g in p.groups if not g.covered]
    assert any(n.target is operator.getitem for n in uncovered.nodes)


def test_returned_views_of_arguments_are_made_outside():
    gm = graph_of(lambda x: (x * 2, x.t()), randn(3, 4))
    p = partition(gm)
    part = extract(gm, p.groups[0])
    assert [n.target for n in p.aliases] and all(r not in p.aliases for r in part.results)


def test_covers_is_asked_for_every_operator():
    gm = graph_of(lambda x: (x * 2).exp(), randn(3))
    p = partition(gm, covers=lambda n: "no" if "exp" in str(n.target) else None)
    assert [g.covered for g in p.groups] == [True, False] and [f.reason for f in p.fallbacks] == ["no"]


def test_halves_end_at_single_operators():
    gm = graph_of(lambda x, w: torch.softmax(x @ w.t() + 1, -1).sum(0), randn(4, 4), randn(4, 4))
    sizes, todo = [], [gm]
    while todo:
        gm = todo.pop()
        parts = halves(gm)
        if parts is None:
            sizes.append(sum(n.op == "call_function" and n.target not in VIEWS for n in gm.graph.nodes))
        else:
            todo += [extract(gm, g).module for g in parts.groups]
    assert len(sizes) == 4 and set(sizes) == {1}


def test_views_of_what_another_runs_are_no_copies():
    """A result that is a view of an early operator's (a gradient that a loop over rows made, turned) is that view."""

    def fn(i, g):
        w = torch.ops.aten.embedding_dense_backward(g, i, 9, -1, False)
        return w.t(), g.exp()

    parts = partition(graph_of(fn, torch.arange(6), randn(6, 4)))
    (eager,) = [g for g in parts.groups if not g.covered]
    assert [str(n.target) for n in eager.nodes] == ["aten.embedding_dense_backward.default", "aten.t.default"]
    assert not any("aten.t.default" in str(n.target) for g in parts.groups if g.covered for n in g.nodes)


def test_what_operators_read_is_in_the_order_of_their_operands():
    gm = graph_of(lambda *xs: torch.cat([x for n in xs for x in (n, n.sin())]), *(randn(3) for _ in range(12)))
    (stacked,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.cat.default]
    units, _ = _units(gm, (), [n for n in gm.graph.nodes if n.target in VIEWS], ())
    (found,) = [u for u in units if u.node is stacked]
    assert found.reads == tuple(n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default)
    assert found.arguments == tuple(gm.graph.find_nodes(op="placeholder"))
