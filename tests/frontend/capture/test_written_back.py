"""What a graph writes into its arguments is returned by it, and copied beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilefold.frontend.capture import written_back
from tilefold.frontend.capture.written_back import WrittenBack
from tilefold.frontend.regions.assemble import compilations

aten = torch.ops.aten


def graph(*writes: str) -> torch.fx.GraphModule:
    """A graph of two arguments: y = a + b, and the writes."""
    g = torch.fx.Graph()
    a, b = g.placeholder("a"), g.placeholder("b")
    names = {"a": a, "b": b, "y": g.call_function(aten.add.Tensor, (a, b))}
    for w in writes:
        to, new = w.split("=")
        names[w] = g.call_function(aten.copy_.default, (names[to], names[new]))
    if writes:
        names["z"] = g.call_function(aten.neg.default, (names["y"],))
    g.output((names["z" if writes else "y"], names["a"]))
    return torch.fx.GraphModule(torch.nn.Module(), g)


def test_writes_become_results():
    gm = graph("b=y")
    found = WrittenBack.taken_out(gm)
    a, b = torch.ones(3), torch.full((3,), 2.0)
    kept = b.clone()
    run = found.around(lambda args: gm(*args))
    assert found.places == (1,) and len(gm(a, b)) == 3 and torch.equal(b, kept)  # the graph itself changes nothing
    z, same = run([a, b])
    assert same is a and z.tolist() == [-3.0] * 3 and b.tolist() == [3.0] * 3


@pytest.mark.parametrize("writes", [(), ("a=y", "a=b")])
def test_a_graph_that_writes_nothing_or_twice_stays_as_it_is(writes):
    gm = graph(*writes)
    before = str(gm.graph)
    assert not WrittenBack.taken_out(gm).places and str(gm.graph) == before


def test_what_is_computed_with_after_the_write_stays_in_the_graph():
    gm = graph("a=y")
    (write,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    (neg,) = gm.graph.find_nodes(op="call_function", target=aten.neg.default)
    neg.args = (write,)
    assert not WrittenBack.taken_out(gm).places


def test_the_statistics_of_all_norms_are_one_call(monkeypatch):
    calls: list[int] = []
    own = written_back._copied
    monkeypatch.setattr(written_back, "_copied", lambda to, new: calls.append(len(to)) or own(to, new))
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    exact = copy.deepcopy(module).double()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="tilefold")
    for _ in range(2):
        x = torch.randn(8, 6)
        compiled(x).square().sum().backward()
        exact(x.double()).square().sum().backward()
    assert calls == [4, 4] and compilations[-1].left == 0
    for got, want in (
        (module.buffers(), exact.buffers()),
        ((p.grad for p in module.parameters()), (p.grad for p in exact.parameters())),
    ):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w.double(), rtol=1e-3, atol=1e-4)


def test_a_cache_is_written_and_may_be_returned():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 8))

        def forward(self, x, k):
            self.kept[k] = x * 2
            self.kept.mul_(1.5)
            return self.kept.sum(), self.kept

    ours, eager = Cache(), Cache()
    torch._dynamo.reset()
    run = torch.compile(ours, backend="tilefold")
    for k in range(2):
        x = torch.randn(8)
        (total, kept), (want, _) = run(x, k), eager(x, k)
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(ours.kept, eager.kept)
        assert kept.data_ptr() == ours.kept.data_ptr()
