"""What a backward reads, from fewer bytes, in a joint graph.

    relu(x) <= 0  iff  x <= 0                      NaN: neither
    places of an axis or of a window's maximum     fit the narrowest integer that holds the number of places

The gradient of a rectified linear unit reads where its result was 0. A forward saves that result for a library call
that reads it (the next convolution's weight gradient), so it is read by maps, too, where x is a map of one tensor that
the same maps read anyway: after a batch norm, of what was normalised. They read x, and compute the map again.
Maxima over windows have their places in torch's 64 bits, of which an image needs 16.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch

from tilefold.frontend.operators.pool import MAXIMA, axes_of
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.regions.partition import extents, nbytes
from tilefold.frontend.training.prices import base, elements, is_map, is_view

aten = torch.ops.aten
Node = torch.fx.Node
#: What is this much smaller than a tensor (a number a channel) is read for nothing.
SMALL = 16
#: Integers that places are saved in, narrowest first.
_PLACES = (torch.int16, torch.int32)


def signs_of_sources(graph: torch.fx.Graph, late: Iterable[Node]) -> int:
    """Have gradients of rectified values compare what was rectified, in place, where that takes no more bytes; how many
    do. late: nodes that depend on gradients."""
    after, found = frozenset(late), 0
    for n in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        given = n.args[1]
        if n.args[2] != 0 or n not in after or not isinstance(given, Node):
            continue
        y = base(given)
        x = y.args[0] if y.target is aten.relu.default else None
        if not isinstance(x, Node) or x.meta["val"].shape != given.meta["val"].shape:
            continue
        source = _source(x)
        if source is not None and nbytes(source) <= nbytes(y) and _read_by(source, after, y):
            n.update_arg(1, x)
            found += 1
    return found


def _source(x: Node) -> Node | None:
    """The one tensor of its size that a map follows from, with small ones; None: it is no such map."""
    todo, seen, found = [x], {x}, set[Node]()
    while todo:
        n = todo.pop()
        if not (is_map(n) or is_view(n)):
            if elements(n) * SMALL > elements(x):
                found.add(n)
            continue
        fresh = [a for a in n.all_input_nodes if a not in seen and isinstance(a.meta.get("val"), torch.Tensor)]
        seen.update(fresh)
        todo += fresh
    one = found.pop() if len(found) == 1 else None
    return one if one is not None and one is not x and elements(one) == elements(x) else None


def _read_by(source: Node, late: Collection[Node], but: Node) -> bool:
    """Whether late maps read a tensor, or maps of it, other than by way of `but`."""
    todo, seen = [source], {but}
    while todo:
        for user in todo.pop().users:
            if user in late:
                if is_map(user):
                    return True
            elif user not in seen and (is_map(user) or is_view(user)):
                seen.add(user)
                todo.append(user)
    return False


def narrow_places(graph: torch.fx.Graph, late: Iterable[Node]) -> int:
    """Have places of maxima wait for the backward in a narrow type, in place; how many do. late: as above."""
    after, found = frozenset(late), 0
    for n in list(graph.nodes):
        if n.op != "call_function" or n.target is not operator.getitem or n.args[1] != 1:
            continue
        fold = n.args[0]
        readers = [u for u in n.users if u in after]
        if not isinstance(fold, Node) or fold.target not in MAXIMA or not readers:
            continue
        pooled = fold.args[0]
        assert isinstance(pooled, Node)
        sizes = extents(pooled.meta["val"])
        places = torch.Size(sizes[-axes_of(fold) :]).numel()
        kind = next((k for k in _PLACES if places <= torch.iinfo(k).max), None)
        if kind is None or any(isinstance(s, torch.SymInt) for s in pooled.meta["val"].shape):
            continue
        write = Writer(n.next, like=n)
        narrow = write(torch.ops.prims.convert_element_type.default, n, kind)
        wide = write(torch.ops.prims.convert_element_type.default, narrow, n.meta["val"].dtype)
        for u in readers:
            u.replace_input_with(n, wide)
        found += 1
    return found
