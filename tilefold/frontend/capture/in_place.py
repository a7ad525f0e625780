"""Arguments of which a graph writes parts (caches of keys and values, queues) are written where they lie.

Functionalisation makes of `cache[:, at] = k` a new cache, which is copied over the old one at the end:

    new = index_put(cache, [None, at], k); .. new ..; copy_(cache, new)
    new = put(cache, k); .. new ..

Side conditions: nothing but these writes reads the old values, nothing reads what is between two writes, and the new
ones are no result of the graph, nor is a view of them. Nothing is added up: a call that fails may be run again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilefold.frontend.operators.put import put_op, scattered_op
from tilefold.frontend.operators.table import VIEWS

Node = torch.fx.Node
aten = torch.ops.aten
_COPY = aten.copy_.default
_WRITES = {aten.slice_scatter.default, aten.index_put.default, aten.scatter.src}
#: (dim, start, end, step) of a part of a tensor.
Cut = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Write:
    """An operator that writes values, into a part of a part: `cuts`. values: those of a part; None: see the operator.
    back: what puts parts back into what they are parts of."""

    node: Node
    cuts: tuple[Cut, ...] = ()
    values: Node | None = None
    back: tuple[Node, ...] = ()


def written_in_place(gm: torch.fx.GraphModule) -> int:
    """Have an ATen graph write parts of its arguments in place; gives how many arguments."""
    copies = gm.graph.find_nodes(op="call_function", target=_COPY)
    if not copies:
        return 0
    gm.graph.eliminate_dead_code()  # views of what is written
    done = 0
    for copy in copies:
        to, new = copy.args[:2]
        if not isinstance(to, Node) or not isinstance(new, Node) or to.op != "placeholder" or copy.users:
            continue
        writes = _writes(to, new)
        if not writes or not _alone(to, new, copy, writes):
            continue
        made = to
        with gm.graph.inserting_before(new):
            for w in writes:
                made = _put(gm.graph, made, w)
                made.meta = dict(new.meta)
        gm.graph.erase_node(copy)
        new.replace_all_uses_with(made)
        done += 1
    if done:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return done


def _writes(old: Node, new: Node) -> list[_Write] | None:
    """What makes `new` of `old`, first to last; None where that is something else than writes of parts."""
    if new is old:
        return []
    if new.target not in _WRITES or not _alike(old, new) or _adds(new):
        return None
    base, *given = new.args
    before = _writes(old, base) if isinstance(base, Node) else None
    if before is None:
        return None
    if new.target is not aten.slice_scatter.default:
        return [*before, _Write(new)]
    cut = _cut(given[1:])
    part = given[0]
    assert isinstance(part, Node)
    views = (u for u in base.users if u.target is aten.slice.Tensor and _cut(u.args[1:]) == cut)  # type: ignore[union-attr]
    inner = next((found for v in views if (found := _writes(v, part))), None)
    if inner is None or any(w.node.target is aten.scatter.src for w in inner):
        return [*before, _Write(new, (cut,), part)]
    return [*before, *(replace(w, cuts=(cut, *w.cuts), back=(*w.back, new)) for w in inner)]


def _alike(old: Node, new: Node) -> bool:
    a, b = old.meta["val"], new.meta["val"]
    return a.dtype is b.dtype and a.device == b.device


def _adds(new: Node) -> bool:
    return new.target is aten.index_put.default and len(new.args) > 3 and bool(new.args[3])


def _cut(given: Sequence[Any]) -> Cut:
    """(dim, start, end, step) of the arguments of a slice."""
    usual: list[Any] = [0, None, None, 1]
    dim, start, end, step = [*given, *usual[len(given) :]]
    return dim, 0 if start is None else start, sys.maxsize if end is None else end, step


def _alone(to: Node, new: Node, copy: Node, writes: list[_Write]) -> bool:
    """See the module's side conditions."""
    back = {n for w in writes for n in w.back}
    chain = back | {w.node for w in writes}
    old = [to, *(chain - {new})]
    while old:
        n = old.pop()
        for u in n.users:
            if u.target is aten.slice.Tensor:
                old.append(u)
            elif u is not copy and (u not in chain or (u not in back and n in _given(u))):
                return False
    return not any(u.op == "output" for n in _views(new) for u in n.users)


def _given(write: Node) -> set[Node]:
    """What a write reads but for the tensor that it writes to."""
    found: set[Node] = set()
    torch.fx.map_arg(write.args[1:], found.add)
    return found


def _views(n: Node) -> Iterator[Node]:
    yield n
    for u in n.users:
        if u.target in VIEWS or u.target is aten.alias.default:
            yield from _views(u)


def _put(graph: torch.fx.Graph, x: Node, w: _Write) -> Node:
    """The operator in place."""
    cuts = [c for cut in w.cuts for c in cut]
    _, *given = w.node.args
    match w.node.target:
        case aten.scatter.src:
            return graph.call_function(scattered_op, (x, *given))
        case aten.index_put.default:
            return graph.call_function(put_op, (x, cuts, given[0], given[1]))
    return graph.call_function(put_op, (x, cuts, [], w.values))
