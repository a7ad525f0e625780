"""Several results of an operator, arguments and gradients are called what they are, in forward and backward graphs."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch import nn

from tilefold.explanation.report import explain, explain_graphs
from tilefold.frontend.capture.result_names import name_results, result_name
from tilefold.frontend.regions.assemble import compilations

aten = torch.ops.aten
#: Names that torch makes, and Python's.
UNREADABLE = re.compile(r"getitem|built-in|\barg\d+_1|primals_|tangents_|<function|object at 0x")


@pytest.mark.parametrize(
    ("target", "k", "want"),
    [
        (aten.topk.default, 1, "indices"),
        (aten._linalg_svd.default, 2, "Vh"),
        (aten.var_mean.correction, 1, "mean"),
        (aten.native_layer_norm.default, 0, "out"),
        (aten.split.Tensor, 1, "part1"),
        (aten.topk.default, 7, "part7"),
        (operator.add, 0, "part0"),
    ],
)
def test_a_result_is_called_as_the_schema_or_the_table_has_it(target, k, want):
    assert result_name(target, k) == want


def test_nodes_are_renamed_once_and_apart():
    graph = torch.fx.Graph()
    x = graph.placeholder("topk_indices")  # taken
    whole = graph.call_function(aten.topk.default, (x, 2))
    whole._rename("topk")
    picks = [graph.call_function(operator.getitem, (whole, k)) for k in (0, 1)]
    first = graph.call_function(operator.getitem, (x, 0))  # of an argument: nothing is known
    name_results(graph)
    names = [n.name for n in picks]
    assert names == ["topk_values", "topk_indices_1"] and first.name.startswith("getitem")
    name_results(graph)
    assert [n.name for n in picks] == names


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    best, at = torch.topk(torch.softmax(x, -1), 4, -1)
    order, places = torch.sort(x, -1)  # left to PyTorch
    a, b = torch.split(order, [10, 30], -1)
    return best / best.sum(-1, keepdim=True), at, a.exp().sum(-1), b * 2, places + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explain_names_results_after_their_operators(device, tmp_path):
    x = explain(several, torch.randn(6, 40), device=device)
    x.to_html(tmp_path / "page.html")
    shown = x.text(code=True) + (tmp_path / "page.html").read_text()
    assert not UNREADABLE.search(shown)
    assert "topk_indices" in shown and "sort_values" in shown and "sort_indices" in shown


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, at = torch.topk(self.norm(self.lin(x)), 3, -1)
        return best * best, at


def test_a_backward_has_the_names_of_the_arguments_and_of_what_is_saved():
    torch._dynamo.reset()
    compilations.clear()
    run = torch.compile(Model(), backend="tilefold", options={"leftover": "eager"})
    run(torch.randn(8, 16, requires_grad=True))[0].sum().backward()
    graphs = [g for g in compilations if g.regions]
    assert len(graphs) == 2
    assert not UNREADABLE.search(explain_graphs(graphs, "step").text(code=True))
    names = {i.name for r in graphs[1].regions for i in r.lowered.program.inputs}
    assert {"x", "grad_1", "topk_indices"} <= names and any(n.endswith("norm_weight") for n in names)
