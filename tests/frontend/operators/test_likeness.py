"""Operators that are lowered alike are asked once whether they can be; what differs in anything else is asked again."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.operators import fx_to_tensor
from tilefold.frontend.operators.fx_to_tensor import supports
from tilefold.frontend.operators.likeness import likeness

aten = torch.ops.aten


def nodes(f, *xs, mode: str = "fake"):
    graph = make_fx(f, tracing_mode=mode)(*xs).graph
    graph.eliminate_dead_code()  # results that nothing reads
    return [n for n in graph.nodes if n.op == "call_function"]


def test_layers_are_alike():
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    a, relu, b, other = nodes(lambda x, w: torch.relu(torch.relu(x @ w) @ w), x, w)
    assert likeness(a) == likeness(b) is not None
    assert likeness(relu) == likeness(other) != likeness(a)


@pytest.mark.parametrize(
    ("f", "g"),
    [
        (lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.sum.dim_IntList(x, [1])),
        (lambda x: aten.add.Tensor(x, 1), lambda x: aten.add.Tensor(x, True)),
        (lambda x: aten.mul.Tensor(x, x), lambda x: aten.mul.Tensor(x, aten.neg.default(x))),
        (lambda x: aten.neg.default(x), lambda x: aten.neg.default(x.t())),
        (lambda x: aten.neg.default(x), lambda x: aten.neg.default(x.double())),
        (lambda x: aten.max.dim(x, 1)[0], lambda x: aten.max.dim(x, 1)[1]),
    ],
    ids=["arguments", "types of numbers", "which operands are one", "strides", "dtypes", "results that are read"],
)
def test_what_a_rule_may_look_at_is_told_apart(f, g):
    x = torch.randn(4, 4)
    found = [next(n for n in reversed(nodes(h, x)) if n.target is not operator.getitem) for h in (f, g)]
    assert found[0].target is found[1].target
    assert likeness(found[0]) != likeness(found[1])


def test_what_was_converted_counts():
    """Floats that were whole numbers have a histogram (`counts`), others have none."""
    whole, other = torch.arange(8), torch.arange(8, dtype=torch.float64)
    found = [nodes(lambda x: torch.histc(x.float(), 8, 0, 7), x)[-1] for x in (whole, other)]
    assert likeness(found[0]) != likeness(found[1])
    assert supports(found[0]) is None
    assert supports(found[1]) is not None


def test_symbolic_sizes_are_asked_each_for_itself():
    (n,) = (n for n in nodes(torch.relu, torch.randn(3, 4), mode="symbolic") if n.target is aten.relu.default)
    assert likeness(n) is None
    assert supports(n) is None


def test_one_of_a_kind_is_lowered_and_reasons_are_each_node_s_own(monkeypatch):
    asked, own = [], fx_to_tensor._reason
    monkeypatch.setattr(fx_to_tensor, "_supported", set())
    monkeypatch.setattr(fx_to_tensor, "_reason", lambda n: asked.append(n) or own(n))
    x = torch.randn(3, 4)
    found = nodes(lambda x: torch.relu(torch.relu(x)), x)
    assert [supports(n) for n in found] == [None, None]
    assert asked == found[:1]
    refused = nodes(lambda x: (torch.linalg.inv(x[:, :3]), torch.linalg.inv(x[:, :3])), x)
    inverses = [n for n in refused if "inv" in str(n.target)]
    assert len(inverses) == 2
    assert all(supports(n) for n in inverses)
    assert asked[-2:] == inverses
