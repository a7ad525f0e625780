"""What a joint graph compares for equality, and so must not compute twice.

    d amax(x) / dx = where(x == amax(x), 1 / count(x == amax(x)), 0)

A sum in another order is another number: where the backward multiplied once more for x, in kernels of its own, no
element would be the maximum that the forward found, and the gradient would be divided by none of them. So the products
and folds that such an x follows from by maps stay the forward's. Maxima round nothing: of the same elements they are
the same, and what they are of is asked instead.
"""

from __future__ import annotations

import torch

from tilefold.frontend.training.prices import is_map, is_view

aten = torch.ops.aten
Node = torch.fx.Node
_EQUAL = (aten.eq.Tensor, aten.ne.Tensor)
_EXACT = (aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim)


def compared(graph: torch.fx.Graph) -> frozenset[Node]:
    """Operators that round in an order of their own, with results that floats compared for equality are made of by
    maps, views and maxima."""
    asked = [n for target in _EQUAL for n in graph.find_nodes(op="call_function", target=target)]
    todo = [a for n in asked if all(map(_is_float, n.all_input_nodes)) for a in n.all_input_nodes]
    seen, found = set(todo), set[Node]()
    while todo:
        n = todo.pop()
        if n.op != "call_function":
            continue
        if not (is_map(n) or is_view(n) or n.target in _EXACT):
            found.add(n)
            continue
        fresh = [a for a in n.all_input_nodes if a not in seen]
        seen.update(fresh)
        todo += fresh
    return frozenset(found)


def _is_float(n: Node) -> bool:
    val = n.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()
