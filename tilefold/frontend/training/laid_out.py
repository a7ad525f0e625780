"""Gradients in the memory order of what they are gradients of.

Autograd keeps a parameter's gradient as it comes where it lies in memory as the parameter, and copies it otherwise: one
that the traced graph returns as a view (turned, every third number of what was stacked, columns of what was
concatenated) is written by the backward and again by that copy, which knows no tiles. Its strides matter to nobody
else, so the graph ends in a copy of its own, and the kernel that computes the gradient stores that instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilefold.frontend.operators.writer import Writer

aten = torch.ops.aten
Node = torch.fx.Node


def as_arguments_lie(joint: torch.fx.GraphModule, results: int, inputs: object) -> None:
    """Have a joint graph return the gradients of its arguments in the memory order of these, in place. results: outputs
    of the forward, behind which come the gradients of arguments in order. inputs: the arguments."""
    output = joint.graph.output_node()
    returned, spec = tree_flatten(output.args[0])
    made: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for k, x in zip(range(results, len(returned)), tree_leaves(inputs), strict=False):
        g = returned[k]
        order = _wanted(g, x)
        if order is not None:
            if (g, order) not in made:
                made[g, order] = _copied(g, order, output)
            returned[k] = made[g, order]
    output.args = (tree_unflatten(returned, spec),)
    joint.recompile()


def _wanted(g: object, x: object) -> tuple[int, ...] | None:
    """The order of dims, outermost first, that an argument's gradient has in memory if autograd is to keep it; None
    where it lies so, or nothing is known."""
    v = g.meta.get("val") if isinstance(g, Node) else None
    if not isinstance(v, torch.Tensor) or not isinstance(x, torch.Tensor) or v.shape != x.shape:
        return None
    if not all(t.layout is torch.strided and all(isinstance(n, int) for n in (*t.shape, *t.stride())) for t in (v, x)):
        return None
    order = _outermost_first(x)
    return None if _lies(v, order) else order


def _outermost_first(x: torch.Tensor) -> tuple[int, ...]:
    """Dims of a dense tensor by their strides; of any other as they are numbered, as autograd has it."""
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: -strides[d]))
    return order if _lies(x, order) else tuple(range(x.dim()))


def _lies(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense, its dims in this order from the outermost in."""
    return x.permute(tuple(order)).is_contiguous()


def _copied(g: Node, order: tuple[int, ...], before: Node) -> Node:
    """A copy whose dims have this order in memory."""
    write = Writer(before, like=g)
    if order == tuple(range(len(order))):
        return write(aten.clone.default, g, memory_format=torch.contiguous_format)
    copy = write(aten.clone.default, write(aten.permute.default, g, order), memory_format=torch.contiguous_format)
    return write(aten.permute.default, copy, tuple(order.index(d) for d in range(len(order))))
