"""ATen graphs as text: read again, they are what was written; what has no form is refused."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.errors import ParseError, UnsupportedError
from tilefold.frontend.regions.outer import item
from tilefold.frontend.warm.text import outer, read, read_outer, written

aten = torch.ops.aten


def traced(fn, *args):
    gm = make_fx(fn, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    return gm


ARGS = torch.randn(4, 4), torch.tensor([0, 2]), torch.randn(8, 5)


def fn(x, i, w):
    y = torch.cat([x[1:], x[1:].clone()], 1).to(torch.bfloat16)
    values, at = torch.topk(y.float() @ w, 2, dim=-1)
    return values * 1e-30 + torch.tensor([0.5, -2.0]), at, x.index_put([i], x.new_ones(()), True), x.sum() / 3


def test_a_graph_that_is_read_again_computes_the_same_and_has_the_same_values():
    gm = traced(fn, *ARGS)
    again = read(written(gm))
    assert str(again.graph) == str(gm.graph)
    for a, b in zip(gm.graph.nodes, again.graph.nodes, strict=True):
        assert (a.op, a.target) == (b.op, b.target)
        assert [type(x) for x in a.args] == [type(x) for x in b.args], a
        x, y = a.meta.get("val"), b.meta.get("val")
        if isinstance(x, torch.Tensor):
            assert isinstance(y, FakeTensor)
            facts = [(t.dtype, t.device, t.shape, t.stride(), t.storage_offset()) for t in (x, y)]
            assert facts[0] == facts[1], a
    for wanted, found in zip(gm(*ARGS), again(*ARGS), strict=True):
        assert torch.equal(wanted, found)


def test_metadata_that_compilation_reads_is_there_again():
    gm = traced(lambda x: x.exp() * 2, torch.ones(3))
    (n,) = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    n.meta |= {"stack_trace": 'File "f.py", line 3', "recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE}
    (again,) = read(written(gm)).graph.find_nodes(op="call_function", target=aten.exp.default)
    assert all(again.meta[k] == n.meta[k] for k in ("stack_trace", "recompute"))


@pytest.mark.parametrize("what", ["symbols", "large", "function", "method", "negated"])
def test_what_has_no_form_is_refused(what):
    gm = traced(lambda x: x + torch.zeros(()), torch.ones(3))
    n = gm.graph.find_nodes(op="placeholder")[0]
    match what:
        case "symbols":
            gm = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3))
        case "large":
            gm.register_buffer("c", torch.zeros(5000))
            with gm.graph.inserting_before(n):
                gm.graph.get_attr("c").meta["val"] = n.meta["val"]
        case "function":
            with gm.graph.inserting_after(n):
                gm.graph.call_function(lambda x: x, (n,)).meta["val"] = n.meta["val"]
        case "method":
            with gm.graph.inserting_after(n):
                gm.graph.call_method("exp", (n,)).meta["val"] = n.meta["val"]
        case "negated":
            n.meta["val"] = torch._neg_view(torch.ones(3))
    with pytest.raises(UnsupportedError):
        written(gm)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.ops.aten.exp.default", "os:system"),
        ("torch.ops.aten.exp.default", "tilefold.frontend.fuse:nothing"),
        ("torch.ops.aten.exp.default", "torch.ops.aten.no_such_thing.default"),
        ('"Graph"', '"Path"'),
        ("torch.float32", "torch.load"),
    ],
)
def test_a_text_that_was_changed_runs_nothing(old, new):
    text = written(traced(lambda x: x.exp(), torch.ones(3)))
    assert old in text
    with pytest.raises(ParseError):
        read(text.replace(old, new))


def test_a_graph_of_parts():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_module("part_0", (x, y))
    first = graph.call_function(item, (call, 1))
    graph.output([first, None, graph.call_function(operator.add, (first, y)), x])
    again = read_outer(outer(graph))
    assert str(again) == str(graph)

    class Part(torch.nn.Module):
        def forward(self, x, y):
            return x, x * y

    root = torch.nn.Module()
    root.part_0 = Part()
    x, y = torch.tensor(3.0), torch.tensor(5.0)
    assert torch.fx.GraphModule(root, again)(x, y) == [15.0, None, 20.0, 3.0]
