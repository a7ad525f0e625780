"""A group of a partitioned graph as a module of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from tilefold.frontend.operators.fx_to_tensor import free_symbols, is_scalar
from tilefold.frontend.regions.partition import Group

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Extracted:
    """A group as a graph module of its own; `inputs` and `results` are nodes of the original graph."""

    module: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]


def extract(gm: torch.fx.GraphModule, group: Group) -> Extracted:
    """The group as a module."""
    results = [n for n in group.results if not isinstance(n.meta.get("val"), tuple | list)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    inputs = _outside(group)
    for n in inputs + [s for s in _symbol_sources(gm, group) if s not in inputs]:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for n in group.nodes:
        for a in n.all_input_nodes:
            if a.op == "get_attr" and a not in copies:
                copies[a] = graph.node_copy(a)
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in results))
    given = tuple(n for n in copies if copies[n].op == "placeholder")
    with _use_lazy_graph_module(True):  # its code is made when it is called, which is where a region fails
        return Extracted(_make_graph_module(gm, graph), given, tuple(results))


def _outside(group: Group) -> list[Node]:
    """Nodes that the group reads."""
    inside = set(group.nodes)
    read = (a for n in group.nodes for a in n.all_input_nodes)
    return list(dict.fromkeys(a for a in read if a not in inside and a.op != "get_attr"))


def _symbol_sources(gm: torch.fx.GraphModule, group: Group) -> list[Node]:
    """Arguments of the graph that give the symbols in the group's sizes, and in numbers that it reads (what a norm of a
    batch divides by); for another compiler, in the sizes of what it reads as well."""
    sized = (*group.nodes, *(n for n in _outside(group) if is_scalar(n) or not group.covered))
    needed = {str(s) for n in sized for s in free_symbols(n)}
    found: list[Node] = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for n in placeholders:
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol and str(val.node.expr) in needed:
            needed.discard(str(val.node.expr))
            found.append(n)
    for n in placeholders:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor):
            extents: list[int | torch.SymInt] = list(val.shape)
            own = {str(s.node.expr) for s in extents if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol}
            if own & needed:
                needed -= own
                found.append(n)
    return found
