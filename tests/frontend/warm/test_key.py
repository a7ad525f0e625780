"""The key of a graph: what changes the result changes it, what does not say all about itself has none."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch

from tilefold.frontend.capture.options import read_options
from tilefold.frontend.warm.key import key, refused, settings

RUN = SimpleNamespace(num_params_buffers=0, keep_inference_input_mutations=True, aot_autograd_arg_pos_to_source=None)


def graph(target=torch.relu, op="call_function", dim=1, line=""):
    g = torch.fx.Graph()
    x, y = g.placeholder("x"), g.placeholder("y")
    made = g.create_node(op, target, (x,))
    made.meta["stack_trace"] = line
    g.output((g.call_function(torch.sum, (made, dim)), y))
    return torch.fx.GraphModule(torch.nn.Module(), g)


def tensors(**how):
    x = torch.zeros(4, 6, **how)
    return x, torch.zeros(6)


def test_equal_graphs_have_equal_keys():
    assert key(graph(), tensors(), RUN, "s") == key(graph(), tensors(), RUN, "s")


BASE = torch.zeros(8, 6)
OTHERS = {
    "operator": lambda: (graph(torch.sin), tensors(), RUN, "s"),
    "number": lambda: (graph(dim=0), tensors(), RUN, "s"),
    "number's type": lambda: (graph(dim=True), tensors(), RUN, "s"),
    "line": lambda: (graph(line="line 7"), tensors(), RUN, "s"),
    "type": lambda: (graph(), tensors(dtype=torch.float64), RUN, "s"),
    "gradient": lambda: (graph(), tensors(requires_grad=True), RUN, "s"),
    "strides": lambda: (graph(), (torch.zeros(6, 4).t(), torch.zeros(6)), RUN, "s"),
    "extents": lambda: (graph(), (torch.zeros(6, 4), torch.zeros(6)), RUN, "s"),
    "memory": lambda: (graph(), (BASE[:4], BASE[4]), RUN, "s"),
    "parameter": lambda: (graph(), (torch.nn.Parameter(torch.zeros(4, 6), False), torch.zeros(6)), RUN, "s"),
    "run": lambda: (graph(), tensors(), SimpleNamespace(num_params_buffers=1), "s"),
    "settings": lambda: (graph(), tensors(), RUN, "t"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_changes_the_result_changes_the_key(what):
    assert key(*OTHERS[what]()) != key(graph(), tensors(), RUN, "s")


def test_modes_of_torch_change_the_key():
    usual = key(graph(), tensors(), RUN, "s")
    found = [usual]
    with torch.no_grad():
        found.append(key(graph(), tensors(), RUN, "s"))
    with torch.autocast("cpu"):
        found.append(key(graph(), tensors(), RUN, "s"))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        found.append(key(graph(), tensors(), RUN, "s"))
    torch.use_deterministic_algorithms(True)
    try:
        found.append(key(graph(), tensors(), RUN, "s"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(set(found)) == 5
    assert key(graph(), tensors(), RUN, "s") == usual


def test_options_and_a_tuned_table_change_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    found = [settings(read_options(None, o)) for o in (None, {"partition": "min_cut"}, {"leftover": "eager"})]
    monkeypatch.setenv("TILEFOLD_INDEX_CHECKS", "0")
    found.append(settings(read_options(None, None)))
    (tmp_path / "tuned.json").write_text("{}")
    found.append(settings(read_options(None, None)))
    assert len(set(found)) == 5


def custom(x):
    return x


@pytest.mark.parametrize(
    ("gm", "args", "why"),
    [
        (graph(custom), tensors(), "custom"),
        (graph(operator.neg), tensors(), ""),
        (graph("exp", "call_method"), tensors(), ""),
        (graph(torch.ops.aten.relu.default), tensors(), ""),
        (graph(torch.ops.higher_order.cond), tensors(), "cond"),
        (graph(dim=frozenset({1})), tensors(), "sum"),
        (graph(), (*tensors(), 7), "int"),
        (graph(), (torch.zeros(3).to_sparse(), torch.zeros(3)), "Tensor"),
    ],
)
def test_a_graph_that_does_not_say_all_about_itself_is_refused(gm, args, why):
    found = refused(gm, args)
    assert (why in found) if why else found == ""


def test_graphs_with_tensors_or_parts_of_their_own_are_refused():
    g = torch.fx.Graph()
    g.output(g.get_attr("c"))
    root = torch.nn.Module()
    root.register_buffer("c", torch.zeros(3))
    assert refused(torch.fx.GraphModule(root, g), ())
    parts = graph()
    parts.add_module("part", torch.nn.Linear(2, 2))
    assert refused(parts, tensors())
