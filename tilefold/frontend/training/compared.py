"""What a joint graph compares for equality, and so must not compute twice, or must keep as it was stored.

    d amax(x) / dx = where(x == amax(x), 1 / count(x == amax(x)), 0)

A sum in another order is another number: where the backward multiplied once more for x, in kernels of its own, no
element would be the maximum that the forward found, and the gradient would be divided by none of them. So the products
and folds that such an x follows from by maps stay the forward's. Maxima round nothing: of the same elements they are
the same (a Fold that takes a factor out of one leaves it alone where it is returned, `tensor.extremes`), and what they
are of is asked instead.

In 16 bits a map is enough: maxima are rounded where they are saved, and what a kernel computes once more beside has all
its digits (`tensor.as_stored`): (x * y).amax(1) had no finite gradient. So of such an x the first value of 16 bits is
saved itself; rounding is monotone, so the forward's maximum is one of those as they were stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilefold.frontend.training.prices import is_map, is_view

aten = torch.ops.aten
Node = torch.fx.Node
_SHORT = (torch.float16, torch.bfloat16)
_EQUAL = (aten.eq.Tensor, aten.ne.Tensor)
_EXACT = (aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim)


@dataclass(frozen=True, slots=True)
class Compared:
    """What floats that are compared for equality are made of by maps, views and maxima. once: operators that round in
    an order of their own, and those in `stored`: values of 16 bits, the last ones on the way."""

    once: frozenset[Node]
    stored: frozenset[Node]


def compared(graph: torch.fx.Graph) -> Compared:
    """Of a joint graph."""
    asked = [n for target in _EQUAL for n in graph.find_nodes(op="call_function", target=target)]
    todo = [a for n in asked if all(map(_is_float, n.all_input_nodes)) for a in n.all_input_nodes]
    seen, once, stored = set(todo), set[Node](), set[Node]()
    while todo:
        n = todo.pop()
        if n.op != "call_function" or isinstance(n.meta["val"], torch.SymInt):  # a number: an argument of a view
            continue
        if not (is_view(n) or n.target in _EXACT):
            short = n.meta["val"].dtype in _SHORT
            if short:
                stored.add(n)
            if short or not is_map(n):
                once.add(n)
                continue
        fresh = [a for a in n.all_input_nodes if a not in seen]
        seen.update(fresh)
        todo += fresh
    return Compared(frozenset(once), frozenset(stored))


def _is_float(n: Node) -> bool:
    val = n.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()
