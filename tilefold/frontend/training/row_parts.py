"""Parts of a joint graph that run over rows.

Each value of such a part is of a row, computed from values of that row and of none (weights), or is a sum over all rows
that the part itself does not read: it may run for some rows after the others. A part is found around a product whose
result is wide (logits): all that has an element for each row and column, and what is on a way between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tilefold.frontend.operators import bits, create, elementwise
from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.table import VIEWS
from tilefold.frontend.regions.rows import leading
from tilefold.frontend.training.prices import elements

aten = torch.ops.aten
Node = torch.fx.Node

NLL = aten.nll_loss_forward.default
PRODUCTS = (aten.mm.default, aten.addmm.default)
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
#: Reductions along the axes behind the rows.
ALONG = (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.logsumexp.default, aten.mean.dim)
SUMS = (aten.sum.default, aten.sum.dim_IntList)
_OTHERS = (aten.nll_loss_backward.default, aten._log_softmax_backward_data.default, aten.gather.default)


@dataclass(frozen=True, slots=True)
class Part:
    """What runs over rows. members: in graph order; inputs: what they read; results: those that others read; sliced:
    inputs of which a row's values are its own, the others are the same for all rows."""

    rows: int
    members: tuple[Node, ...]
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]
    sliced: frozenset[Node]


def shape_of(n: Any) -> tuple[int, ...]:
    """The extents of a node's tensor."""
    return tuple(n.meta["val"].shape)


def part_around(graph: torch.fx.Graph, seed: Node) -> Part | None:
    """The part around a product whose result is wide; None where a value has no rows, or leaves although it is wide."""
    rows, least = int(seed.meta["val"].shape[0]), elements(seed) // 2
    place = {n: k for k, n in enumerate(graph.nodes)}
    members: set[Node] = {seed}
    todo = [seed]
    while todo:
        n = todo.pop()
        if n.op == "output" or not _runs(n, rows, members):
            return None
        near = set(n.users) if n.target is NLL or _wide(n, rows, least) else set()
        near |= {a for a in n.all_input_nodes if a.op == "call_function" and _made_inside(n, a, rows, least)}
        near |= _between(members | near, place)
        todo += sorted(near - members, key=place.__getitem__)
        members |= near
    order = tuple(sorted(members, key=place.__getitem__))
    inputs = tuple(dict.fromkeys(a for n in order for a in n.all_input_nodes if a not in members))
    results = tuple(n for n in order if n.target is not NLL and any(u not in members for u in n.users))
    if any(u in members for n in order if is_total(n, rows, members) for u in n.users):
        return None
    if any(_wide(n, rows, least) and not is_total(n, rows, members) for n in results):
        return None
    roles: dict[Node, set[bool]] = {a: set() for a in inputs}
    for n in order:
        for k, a in enumerate(n.args):
            if isinstance(a, Node) and a in roles:
                roles[a].add(_of_rows(n, k, a, rows, members))
    if not all(len(found) == 1 for found in roles.values()):
        return None
    return Part(rows, order, inputs, results, frozenset(a for a, found in roles.items() if True in found))


def _of_rows(n: Node, k: int, a: Node, rows: int, members: set[Node]) -> bool:
    """Whether operand number k of a member has the rows (True), or is the same for all of them."""
    if n.target in PRODUCTS:
        return k == len(n.args) - 2 or (k == len(n.args) - 1 and is_total(n, rows, members))
    shape, own = n.meta["val"], a.meta["val"].shape
    if n.target is NLL:
        return k < 2
    if n.target is aten.nll_loss_backward.default:
        return k in (1, 2) or (k == 0 and len(own) > 0)
    if is_total(n, rows, members) or n.target in ALONG or n.target in VIEWS:
        return leading(own, rows) is not None
    lead = leading(shape.shape, rows)
    return lead is not None and len(own) == shape.dim() and tuple(own[:lead]) == tuple(shape.shape[:lead])


def _wide(n: Node, rows: int, least: int) -> bool:
    """Whether a node has a value for each row and column."""
    val = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.numel() < least:
        return False
    return leading(val.shape, rows) is not None or turned(n, rows)


def _made_inside(n: Node, a: Node, rows: int, least: int) -> bool:
    """Whether what a member reads is made in the part as well: masks and one-hots as wide as the logits, and what a
    result is picked from."""
    return n.target is operator.getitem or (
        _wide(a, rows, least) and a.target not in PRODUCTS and a.target not in TURNS and n.target not in PRODUCTS
    )


def _between(members: set[Node], place: dict[Node, int]) -> set[Node]:
    """What is on a way from a member to a member."""
    after = _closure(members, lambda n: n.users)
    return (_closure(members, lambda n: n.all_input_nodes) & after) - members


def _closure(start: set[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found: set[Node] = set()
    todo = list(start)
    while todo:
        near = [n for n in step(todo.pop()) if n not in found]
        found.update(near)
        todo += near
    return found


def _runs(n: Node, rows: int, members: set[Node]) -> bool:
    """Whether a node's values are of rows, or sums over all of them, by rules that `_Body` has."""
    a, val = n.args, n.meta.get("val")
    if n.op != "call_function":
        return False
    if n.target is NLL:
        return attrs(n)["weight"] is None and attrs(n)["reduction"] != 1
    if n.target is operator.getitem:
        return bool(isinstance(a[0], Node) and a[0].target is NLL and a[1] == 0)
    if not isinstance(val, torch.Tensor) or not all(isinstance(k, int) for k in val.shape):
        return False
    if n.target in TURNS:
        return turned(n, rows)
    if is_total(n, rows, members):
        return True
    k = leading(val.shape, rows)
    if k is None:
        return False
    if n.target in PRODUCTS:
        return a[-2] not in members or not turned(a[-2], rows)
    if n.target in ALONG:
        own = leading(shape_of(a[0]), rows)
        axes = axes_of(n)
        return own is not None and axes is not None and min(axes) >= own
    tables = (elementwise.TABLE, bits.TABLE, create.TABLE, VIEWS, _OTHERS)
    return any(n.target in t for t in tables)


def axes_of(n: Node) -> list[int] | None:
    dims = attrs(n).get("dim")
    rank = len(shape_of(n.args[0]))
    dims = [dims] if isinstance(dims, int) else dims
    return [int(d) % rank for d in dims] if isinstance(dims, list | tuple) and dims else None


def turned(n: object, rows: int) -> bool:
    """Whether a node is a matrix of rows with its axes exchanged."""
    if not isinstance(n, Node) or n.target not in TURNS or n.meta["val"].dim() != 2:
        return False
    source = n.args[0]
    return isinstance(source, Node) and shape_of(source)[0] == rows and n.meta["val"].shape[1] == rows


def is_total(n: Node, rows: int, members: Collection[Node]) -> bool:
    """Whether a node sums over all rows."""
    source = n.args[0] if n.args else None
    if not isinstance(source, Node):
        return False
    if n.target is operator.getitem:
        return source.target is NLL and attrs(source)["reduction"] != 0
    if n.target is aten.mm.default:
        return source in members and turned(source, rows)
    if n.target not in SUMS:
        return False
    own = leading(shape_of(source), rows)
    axes = axes_of(n) if n.target is aten.sum.dim_IntList else None
    return own is not None and (axes is None or set(range(own)) <= set(axes))
