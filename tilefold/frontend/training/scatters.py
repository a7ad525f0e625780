"""Scatters whose places are known to differ, as gathers and sums of few: gradients of sorted and of picked rows.

What sorting says of its order is a permutation p, and what writes 0, 1, 2 ... at p is its inverse q. In a joint graph:

    zeros[p[k]]      += g[k]   is   g[q[i]]
    zeros[q[k]]      += g[k]   is   g[p[i]]
    zeros[p[k] // c] += g[k]   is   sum[j < c] g[q[c i + j]]
    scatter(zeros, -1, at, g)  is   sum[j] g[.., j] if at[.., j] = i else 0      at the places of the c largest

The right sides are maps and sums that others are fused with; the left ones cut a backward, and torch sorts for three of
them. The last holds for the places of `topk`, no two of which are equal in a row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch._guards import detect_fake_mode

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.writer import Writer

aten = torch.ops.aten
Node = torch.fx.Node
#: Picked elements of a row that are compared with each of its places.
FEW = 16
_SORTS = (aten.sort.default, aten.sort.stable)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_FLOORS = (aten.div.Tensor_mode, aten.floor_divide.default)


def as_gathers(graph: torch.fx.Graph) -> int:
    """Replace such scatters of a joint graph, in place; how many there were."""
    inverse, found, seen = _inverses(graph), 0, set[Node]()
    for n in list(graph.nodes):
        made = None
        seen.add(n)
        if n.target is aten.index_put.default:
            made = _of_rows(n, {p: q for p, q in inverse.items() if q in seen})
        elif n.target is aten.scatter.src:
            made = _of_picked(n)
        if made is not None:
            n.replace_all_uses_with(made)
            graph.erase_node(n)
            found += 1
    return found


def _inverses(graph: torch.fx.Graph) -> Mapping[Node, Node]:
    """Permutations and their inverses, both ways, where a graph computes both."""
    found: dict[Node, Node] = {}
    for n in graph.nodes:
        if n.target is aten.index_put.default and (p := _index(n)) is not None and not _accumulates(n):
            every = _permutes(p) and tuple(n.meta["val"].shape) == tuple(p.meta["val"].shape)
            if every and _counts(n.args[2], p.meta["val"].numel()):
                found[p], found[n] = n, p
    return found


def _index(n: Node) -> Node | None:
    """The only index of an `index_put`, of its first axis."""
    at = n.args[1]
    return at[0] if isinstance(at, list | tuple) and len(at) == 1 and isinstance(at[0], Node) else None


def _accumulates(n: Node) -> bool:
    return len(n.args) > 3 and n.args[3] is True


def _permutes(p: Node) -> bool:
    """Whether a tensor is the order of a vector that is sorted."""
    of = p.args[0] if p.target is operator.getitem and p.args[1] == 1 else None
    return isinstance(of, Node) and of.target in _SORTS and p.meta["val"].dim() == 1


def _counts(n: object, count: int) -> bool:
    return isinstance(n, Node) and n.target is aten.arange.default and bool(n.args[0] == count)


def _of_rows(n: Node, inverse: Mapping[Node, Node]) -> Node | None:
    """The same sum as rows picked, in as many parts as rows share a place; None where places are not known."""
    at, g, val = _index(n), n.args[2], n.meta["val"]
    zeros = isinstance(n.args[0], Node) and n.args[0].target in _ZEROS
    if at is None or not zeros or not _accumulates(n) or not isinstance(g, Node) or not val.is_floating_point():
        return None
    p, share = (at, 1) if at in inverse else _shared(at)
    rows, given = at.meta["val"].numel(), g.meta["val"]
    sizes = (*val.shape, *given.shape, rows)
    if p not in inverse or not all(isinstance(k, int) for k in sizes) or val.dtype is not given.dtype:
        return None
    if tuple(given.shape) != (rows, *val.shape[1:]) or rows != share * val.shape[0]:
        return None
    write = Writer(n)
    picked = write(aten.index.Tensor, g, [inverse[p]])
    if share == 1:
        return picked
    return write(aten.sum.dim_IntList, write(aten.view.default, picked, [val.shape[0], share, *val.shape[1:]]), [1])


def _shared(at: Node) -> tuple[Node, int]:
    """What is divided for an index, and by what; itself and 1 where nothing is."""
    if at.target not in _FLOORS or not isinstance(at.args[0], Node) or not isinstance(at.args[1], int):
        return at, 1
    floor = at.target is aten.floor_divide.default or at.kwargs.get("rounding_mode") == "floor"
    return (at.args[0], at.args[1]) if floor and at.args[1] > 0 else (at, 1)


def _of_picked(n: Node) -> Node | None:
    """The sum over what is picked; None where places may be equal, or are many."""
    own, val = attrs(n), n.meta["val"]
    into, at, g = own["self"], own["index"], own["src"]
    if not isinstance(into, Node) or not isinstance(at, Node) or not isinstance(g, Node) or into.target not in _ZEROS:
        return None
    of = at.args[0] if at.target is operator.getitem and at.args[1] == 1 else None
    if not isinstance(of, Node) or of.target is not aten.topk.default or at.meta["val"].shape != g.meta["val"].shape:
        return None
    axis, dim = val.dim() - 1, own["dim"]
    if axis < 1:
        return None
    along = attrs(of)["dim"]
    count, last = at.meta["val"].shape[-1], (axis, -1)
    if dim not in last or along not in last or not isinstance(count, int) or count > FEW:
        return None
    if at.meta["val"].shape[:-1] != val.shape[:-1] or g.meta["val"].dtype is not val.dtype:
        return None
    write = Writer(n)
    with detect_fake_mode([val]) or nullcontext():
        places = write(aten.arange.default, val.shape[-1], dtype=torch.int64, device=val.device)
        zero = write(aten.scalar_tensor.default, 0.0, dtype=val.dtype, device=val.device)
    here = write(aten.eq.Tensor, write(aten.unsqueeze.default, at, -1), places)
    each = write(aten.where.self, here, write(aten.unsqueeze.default, g, -1), zero)
    return write(aten.sum.dim_IntList, each, [-2])
