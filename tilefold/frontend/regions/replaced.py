"""Arguments that a graph writes back whole (`capture.written_back`), written by the kernels that make their values.

    new = f(old, ..); copy old <- new        2 passes over memory for the copy
    old <- f(old, ..)                        none

A step of an optimiser is such a graph: a parameter, its moments, averages of it.

Side conditions, on the graph: one region alone reads the old value, which is no result of the graph, nor is a view of
it; the new value is written back once, is no other result, and only that region computes with it, so that nothing else
is a view of it. On the region: both are one row-major tensor, whose extents are numbers, and nothing else is what the
new value's memory shows. On the program: `runtime.reuse.replaceable`, and what `CompiledProgram.replacing` adds.
Whatever is not replaced is copied as before: a region that ran elsewhere has made a tensor of its own. Arguments that
share memory are one argument by then, for AOTAutograd hands over what they are views of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.fx_to_tensor import is_scalar
from tilefold.frontend.regions.execute import Runner
from tilefold.frontend.regions.extract import Extracted
from tilefold.frontend.regions.partition import Partition
from tilefold.runtime.program import CompiledProgram

Node = torch.fx.Node
#: What holds the positions of written arguments in a graph's `meta`: the graph's last results are their new values.
PLACES = "tilefold_written_back"


def replaced(gm: torch.fx.GraphModule, parts: Partition) -> dict[Node, Node]:
    """New values, and the arguments whose place they may take as far as the graph is concerned."""
    places: tuple[int, ...] = gm.meta.get(PLACES, ())
    given, results = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node().args[0]
    if not places or not isinstance(results, list | tuple):
        return {}
    owners = {n: g for g in parts.groups if g.covered for n in g.results}
    counts = Counter(r for r in results if isinstance(r, Node))
    readers: dict[Node, set[int]] = {}
    for at, nodes in enumerate([*(g.nodes for g in parts.groups), parts.aliases]):
        for a in (a for n in nodes for a in n.all_input_nodes):
            readers.setdefault(a, set()).add(at)
    inside = {id(g): set(g.nodes) for g in owners.values()}
    found: dict[Node, Node] = {}
    for new, place in zip(results[-len(places) :], places, strict=True):
        old, group = given[place], owners.get(new)
        if group is None or counts[new] != 1 or counts[old]:
            continue
        here = inside[id(group)]
        read_here = all(u in here or u.op == "output" for u in new.users)
        old_here = all(u in here or is_scalar(u) for u in old.users) and len(readers.get(old, ())) == 1
        if read_here and old_here and _alike(old, new):
            found[new] = old
    return found


def replace(extracted: Extracted, lowered: Lowered, runner: Runner, wanted: Mapping[Node, Node]) -> dict[str, int]:
    """Have a region's program write over arguments; results of the program, and the positions of these."""
    if not isinstance(runner, CompiledProgram) or wanted.keys().isdisjoint(extracted.results):
        return {}
    names = {b.position: b.name for b in lowered.inputs if b.position is not None}
    counts = Counter(o.name for o in lowered.outputs)
    positions = {n: k for k, n in enumerate(extracted.inputs)}
    returned = {o.position for o in lowered.outputs}
    at: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    for new, o in zip(extracted.results, lowered.outputs, strict=True):
        old = wanted.get(new)
        if old is None or old not in positions or o.name is None or counts[o.name] != 1:
            continue
        if o.gaps or o.offset is not None:
            continue
        position = positions[old]
        if position in names and position not in returned:
            at[o.name] = position
            pairs.add((o.name, names[position]))
    found = runner.replacing(pairs)
    runner.replace(found)
    return {new: at[new] for new in found}


def _alike(old: Node, new: Node) -> bool:
    x, y = old.meta.get("val"), new.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    if any(v.layout is not torch.strided or not all(isinstance(n, int) for n in v.shape) for v in (x, y)):
        return False
    same = x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype and x.device == y.device
    return same and x.is_contiguous() and type(x) is type(y)
