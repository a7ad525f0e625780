"""Dropout of what a batch of products multiplies (attention's probabilities) by numbers of 16 bits.

A kernel that streams scores draws a number for each, and has little else to do for it: two eighths of a counter of
seven rounds (`algebra.philox.random16`) cost a third of a quarter of one of ten. Steps of 2^-16 are as good where they
are small beside the probability and its complement. Forward and backward are one graph here, and so agree.
"""

from __future__ import annotations

import torch

from tilefold.frontend.operators.random import FEW_LIMIT, LIMIT, random16_op, random_op, seed_op

aten = torch.ops.aten
#: Most that a probability, or its complement, may be off, of itself.
OFF = 2.0**-8
#: What leads from a mask to the product: all elementwise, or another view.
_ON_THE_WAY = frozenset(
    (
        *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.where.self, aten._to_copy.default),
        *(aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.clone.default),
    )
)
_PRODUCTS = frozenset((aten.bmm.default, aten.baddbmm.default))


def few_bits(graph: torch.fx.Graph) -> int:
    """Replace the numbers of such masks, in place, where this graph draws their seeds. How many there are."""
    found = 0
    for drawn in graph.find_nodes(op="call_function", target=random_op):
        seed, size = drawn.args
        masks = list(drawn.users)
        plain = isinstance(seed, torch.fx.Node) and seed.target == seed_op and len(size) > 2  # type: ignore[arg-type]
        if not plain or not all(m.target == aten.lt.Scalar for m in masks):
            continue
        below = [_below(m.args[1]) for m in masks]
        if None in below or not any(_multiplied(m) for m in masks):
            continue
        with graph.inserting_before(drawn):
            few = graph.call_function(random16_op, (seed, size))
        few.meta = dict(drawn.meta)
        drawn.replace_all_uses_with(few)
        for mask, n in zip(masks, below, strict=True):
            mask.args = (few, n)
        graph.erase_node(drawn)
        found += 1
    return found


def _below(limit: object) -> int | None:
    """The limit among numbers of 16 bits; None: they are too coarse."""
    if not isinstance(limit, int):
        return None
    few = round(limit * FEW_LIMIT / LIMIT)
    off = abs(few * LIMIT // FEW_LIMIT - limit)
    return few if off <= OFF * min(limit, LIMIT - limit) else None


def _multiplied(mask: torch.fx.Node) -> bool:
    """Whether what a mask is laid over becomes an operand of a batch of products."""
    todo, seen = [mask], {mask}
    while todo:
        for user in todo.pop().users:
            if user.target in _PRODUCTS:
                return True
            if user.target in _ON_THE_WAY and user not in seen:
                seen.add(user)
                todo.append(user)
    return False
