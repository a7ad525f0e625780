"""Elements that are written, or added, one a row: every place asks whether it is the one.

    x[arange(n), at] = v    is    where(j = at[i], v[i], x[i, j])

Labels of rows, margins at labels, gradients of elements that were picked so, diagonals. Written at indices, all of x is
copied and what reads it waits; the comparison is a map, which its readers take in (as `operators.scatter`).
"""

from __future__ import annotations

import torch

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.regions.added_rows import counts

aten = torch.ops.aten
Node = torch.fx.Node


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
    """The map in the place of a write at two indices, of which one counts the rows; None for any other."""
    own, val = attrs(n), n.meta["val"]
    x, given, values = own["self"], own["indices"], own["values"]
    if not isinstance(given, list | tuple) or len(given) != 2 or val.dim() < 2 or not isinstance(x, Node):
        return None
    tensors = [g.meta["val"] for g in (*given, values) if isinstance(g, Node)]
    sizes = (*val.shape, *(k for t in tensors for k in t.shape))
    if len(tensors) < 3 or not all(isinstance(k, int) for k in sizes) or any(t.device != val.device for t in tensors):
        return None
    rows = next((axis for axis, g in enumerate(given) if _is_each(g, val.shape[axis])), None)
    if rows is None:
        return None
    other = 1 - rows
    count, places, at = val.shape[rows], val.shape[other], tensors[other]
    if tuple(at.shape) != (count,) or at.dtype not in (torch.int64, torch.int32) or tensors[2].dim() >= val.dim():
        return None
    write, rest = Writer(n), (1,) * (val.dim() - 2)
    each = write(aten.arange.default, places, dtype=torch.int64, device=val.device)
    index = write(aten.index.Tensor, each, [given[other]])  # counts from the end, an error where there is none
    here = [
        write(aten.reshape.default, t, [-1 if axis == k else 1 for k in (0, 1)] + [*rest])
        for t, axis in ((index, rows), (each, other))
    ]
    v = write(aten.expand.default, values, [count, *val.shape[2:]])
    v = write(aten.unsqueeze.default, v, other)
    v = write(aten.add.Tensor, x, v) if own["accumulate"] else v
    return write(aten.where.self, write(aten.eq.Tensor, *here), v, x)


def _is_each(at: Node, extent: int) -> bool:
    """Whether an index is 0, 1, 2 ... up to the end of its axis."""
    return tuple(at.meta["val"].shape) == (extent,) and counts(at)
