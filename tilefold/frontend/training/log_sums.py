"""The lifts that a backward computes again of a softmax over what streams, from one state instead of two.

    exp(x - m) / l  =  exp(x - (m + log l))        m: what a row is shifted by, l: the sum of its exponentials

The left side, which a forward's fold is derived from, has a division an element, and a backward that reads a maximum
and a sum of each row; the right side has neither (Dao et al., "FlashAttention", 2022, algorithm 4). l is positive: at
least one of the exponentials is 1, and a row of which nothing is left has the sum 1. Scores that may be masked by a
finite number (`torch.finfo(dtype).min`, -1e9) keep the left side: where a whole row is masked, m + log l is m, and all
weights would be 1. Such a number stands in the graph, or in a float argument that is added and has no gradient: a mask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.training.prices import elements, is_map, product

aten = torch.ops.aten
Node = torch.fx.Node
#: Scores are smaller, and log-sum-exps of smaller ones are rounded by 2^-11 at most: a last place of float16.
FAR = 2.0**14


def from_log_sums(graph: torch.fx.Graph, late: Iterable[Node], fixed: Collection[Node] = ()) -> int:
    """Have what only a backward reads of such a softmax computed so, in place; how many there were. late: nodes that
    depend on gradients. fixed: arguments without one."""
    after = set(late)
    found = 0
    for p in list(graph.nodes):
        if p.op == "call_function" and p.target is aten.div.Tensor and p not in after and _streams(p, fixed):
            found += _replaced(p, after)
    return found


def _streams(p: Node, fixed: Collection[Node]) -> bool:
    """Whether a quotient is a softmax's, of scores that a product makes where they are read."""
    e, total = p.args
    if not isinstance(e, Node) or not isinstance(total, Node) or e.target is not aten.exp.default:
        return False
    x = e.args[0]
    if not isinstance(x, Node) or x.target is not aten.sub.Tensor or not _sums(total, e):
        return False
    todo, seen, streams = [x.args[0]], set[Node](), False
    while todo:
        n = todo.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        seen.add(n)
        if _far(n) or ((n in fixed or n.op == "get_attr") and n.meta["val"].is_floating_point()):
            return False
        sizes = product(n)
        if sizes is not None and sizes.streamed == 2 and elements(n) == elements(p):
            streams = True
        else:
            todo += n.all_input_nodes if is_map(n) else ()
    return streams


def _far(n: Node) -> bool:
    """Whether a node brings in a number so large that adding the logarithm of a sum does not change it."""
    return any(isinstance(a, float) and FAR < abs(a) < math.inf for a in n.args)


def _sums(total: Node, e: Node) -> bool:
    """Whether a divisor is the sum of the exponentials, or 1 where that is 0."""
    if total.target is aten.where.self:
        return isinstance(total.args[2], Node) and _sums(total.args[2], e)
    return total.target is aten.sum.dim_IntList and total.args[0] is e


def _replaced(p: Node, late: Collection[Node]) -> int:
    """Give the late readers of p, and of maps of it, maps of the other formula; 0 where there are none."""
    needed = _read_later(p, late)
    if p not in needed:
        return 0
    e, total = p.args
    x, shift = e.args[0].args  # type: ignore[union-attr]
    write = Writer(p)
    log_sum = write(aten.add.Tensor, shift, write(aten.log.default, total))
    made = {p: write(aten.exp.default, write(aten.sub.Tensor, x, log_sum))}
    for n in needed[1:]:
        with p.graph.inserting_after(n):
            made[n] = p.graph.node_copy(n, lambda a: made.get(a, a))
    for n in needed:
        n.replace_all_uses_with(made[n], delete_user_cb=lambda user: user in late)
    return 1


def _read_later(p: Node, late: Collection[Node]) -> list[Node]:
    """p and the early maps of it that late nodes are made of, in graph order."""
    found, todo = {p}, [p]
    while todo:
        for user in todo.pop().users:
            if user not in found and user not in late and is_map(user):
                found.add(user)
                todo.append(user)
    needed: set[Node] = set()
    for n in reversed([n for n in p.graph.nodes if n in found]):
        if any(user in late or user in needed for user in n.users):
            needed.add(n)
    return [n for n in p.graph.nodes if n in needed]
