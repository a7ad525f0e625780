"""Writes at indices of which every place can tell by comparing whether it is the one.

    x[arange(n), at] = v    is    where(j = at[i], v[i], x[i, j])          one element a row, written or added
    x[.., at, ..] = v       is    where(j = at[0], v[..], x[.., j, ..])    one place of each axis, written or added
    x[.., at, ..] = 0.5     is    where(j is in at, 0.5, x[.., j, ..])     one number, wherever it is written

Labels of rows, margins at labels, gradients of elements that were picked so, diagonals; a key of a cache; what was
picked and is not to be picked again. Written at indices, all of x is copied and what reads it waits; the comparison is
a map, which its readers take in (as `operators.scatter`).
"""

from __future__ import annotations

from math import prod

import torch

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.regions.added_rows import counts

aten = torch.ops.aten
Node = torch.fx.Node
_PLACES = (torch.int64, torch.int32)


def one_a_row(gm: torch.fx.GraphModule) -> int:
    """Have such elements compared; gives how many writes there were."""
    found = 0
    for n in list(gm.graph.nodes):
        if n.target is aten.index_put.default and (made := _compared(n)) is not None:
            n.replace_all_uses_with(made)
            gm.graph.erase_node(n)
            found += 1
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return found


def _compared(n: Node) -> Node | None:
    """The map in the place of a write at indices; None where not every place can tell."""
    own, val = attrs(n), n.meta["val"]
    x, given, values = own["self"], own["indices"], own["values"]
    if not isinstance(given, list | tuple) or not isinstance(x, Node) or not isinstance(values, Node):
        return None
    at = {axis: g for axis, g in enumerate(given) if isinstance(g, Node)}
    tensors, v = [g.meta["val"] for g in at.values()], values.meta["val"]
    sizes = (*val.shape, *(k for t in (*tensors, v) for k in t.shape))
    if not at or not all(isinstance(k, int) for k in sizes) or any(t.dtype not in _PLACES for t in tensors):
        return None
    if any(t.device != val.device for t in (*tensors, *((v,) if v.dim() else ()))):
        return None
    accumulate = bool(own["accumulate"])
    for form in (_one_a_row, _one_place, _one_value):
        if (made := form(Writer(n), x, at, values, accumulate)) is not None:
            return made
    return None


def _one_a_row(write: Writer, x: Node, at: dict[int, Node], values: Node, accumulate: bool) -> Node | None:
    """Two indices, of the first axes, of which one counts the rows."""
    val, v = x.meta["val"], values.meta["val"]
    rows = next((axis for axis, g in at.items() if _is_each(g, val.shape[axis])), None)
    if rows is None or [*at] != [0, 1] or v.dim() >= val.dim():
        return None
    other = 1 - rows
    if tuple(at[other].meta["val"].shape) != (val.shape[rows],):
        return None
    hit = _hit(write, val, other, at[other])
    hit = write(aten.permute.default, hit, [1, 0]) if rows else hit
    hit = write(aten.reshape.default, hit, [*val.shape[:2], *(1,) * (val.dim() - 2)])
    made = values
    if v.dim():
        made = write(aten.expand.default, values, [val.shape[rows], *val.shape[2:]])
        made = write(aten.unsqueeze.default, made, other)
    return _chosen(write, hit, made, x, accumulate)


def _one_place(write: Writer, x: Node, at: dict[int, Node], values: Node, accumulate: bool) -> Node | None:
    """Indices of neighbouring axes, with an element each."""
    val, axes = x.meta["val"], [*at]
    shape = torch.broadcast_shapes(*(g.meta["val"].shape for g in at.values()))
    if prod(shape) != 1 or axes != [*range(axes[0], axes[-1] + 1)]:
        return None
    hit: Node | None = None
    for axis, g in at.items():
        one = _hit(write, val, axis, g)
        one = write(aten.reshape.default, one, [val.shape[axis], *(1,) * (val.dim() - axis - 1)])
        hit = one if hit is None else write(aten.logical_and.default, hit, one)
    before, behind = val.shape[: axes[0]], val.shape[axes[-1] + 1 :]
    made = values
    if values.meta["val"].dim():
        made = write(aten.expand.default, values, [*before, *shape, *behind])
        made = write(aten.reshape.default, made, [*before, *(1,) * len(axes), *behind])
    assert hit is not None
    return _chosen(write, hit, made, x, accumulate)


def _one_value(write: Writer, x: Node, at: dict[int, Node], values: Node, accumulate: bool) -> Node | None:
    """One number, at places of one axis: no more comparisons than x has elements."""
    val, (axis, places) = x.meta["val"], next(iter(at.items()))
    count = places.meta["val"].numel()
    while values.target is aten.expand.default:
        values = values.all_input_nodes[0]
    if accumulate or len(at) > 1 or values.meta["val"].dim() or count * val.shape[axis] > val.numel():
        return None
    hit = write(aten.any.dim, _hit(write, val, axis, places), 0)
    hit = write(aten.reshape.default, hit, [val.shape[axis], *(1,) * (val.dim() - axis - 1)])
    return _chosen(write, hit, values, x, accumulate)


def _hit(write: Writer, val: torch.Tensor, axis: int, places: Node) -> Node:
    """Of each index, whether it names each place of an axis of a tensor: [indices, places]."""
    each = write(aten.arange.default, val.shape[axis], dtype=torch.int64, device=val.device)
    index = write(aten.index.Tensor, each, [places])  # counts from the end, an error where there is none
    return write(aten.eq.Tensor, write(aten.reshape.default, index, [-1, 1]), each)


def _chosen(write: Writer, hit: Node, made: Node, x: Node, accumulate: bool) -> Node:
    """What is made (or x and that) where it hits, x elsewhere."""
    made = write(aten.add.Tensor, x, made) if accumulate else made
    return write(aten.where.self, hit, made, x)


def _is_each(at: Node, extent: int) -> bool:
    """Whether an index is 0, 1, 2 ... up to the end of its axis."""
    return tuple(at.meta["val"].shape) == (extent,) and counts(at)
