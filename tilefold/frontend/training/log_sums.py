"""The lifts that a backward computes again of a softmax over what streams, from one state instead of two.

    exp(x - m) / l  =  exp(x - (m + log l))        m: what a row is shifted by, l: the sum of its exponentials

The left side, which a forward's fold is derived from, has a division an element, and a backward that reads a maximum
and a sum of each row; the right side has neither (Dao et al., "FlashAttention", 2022, algorithm 4). l is positive: at
least one of the exponentials is 1, and a row of which nothing is left has the sum 1. Scores that may be masked by a
finite number (`torch.finfo(dtype).min`, -1e9) keep the left side: where a whole row is masked, m + log l is m, and all
weights would be 1. Such a number stands in the graph, or in a float argument that is added and has no gradient: a mask.

m + log l is rounded, by 1e-6 at 24, so a row's weights have the sum 1 + d. Where they are multiplied and summed once
more along the row, as the gradient g of a softmax is (p (g - sum p g)), d times that sum comes back beside differences
that may be far smaller. So such weights of float32 products keep two numbers, m and 1 / l, still without a division an
element: a soft codebook's gradient was off by 9e-6, eager's by 3e-6, now 2e-6. Attention has the sum from its result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.training.prices import elements, is_map, is_view, product

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node
#: Scores are smaller, and log-sum-exps of smaller ones are rounded by 2^-11 at most: a last place of float16.
FAR = 2.0**14
#: Bytes of a number that products of float32 do not have.
SHORT = 2


def from_log_sums(graph: torch.fx.Graph, late: Iterable[Node], fixed: Collection[Node] = ()) -> int:
    """Have what only a backward reads of such a softmax computed so, in place; how many there were. late: nodes that
    depend on gradients. fixed: arguments without one."""
    after = set(late)
    found = 0
    for p in list(graph.nodes):
        if p.op == "call_function" and p.target is aten.div.Tensor and p not in after:
            products = _streamed(p, fixed)
            found += _replaced(p, after, rounded=all(map(_rounded, products))) if products else 0
    return found


def _streamed(p: Node, fixed: Collection[Node]) -> list[Node]:
    """The products that make a softmax's scores where they are read; none where a quotient is no softmax of such."""
    e, total = p.args
    if not isinstance(e, Node) or not isinstance(total, Node) or e.target is not aten.exp.default:
        return []
    x = e.args[0]
    if not isinstance(x, Node) or x.target is not aten.sub.Tensor or not _sums(total, e):
        return []
    todo, seen, products = [x.args[0]], set[Node](), list[Node]()
    while todo:
        n = todo.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        seen.add(n)
        if _far(n) or ((n in fixed or n.op == "get_attr") and n.meta["val"].is_floating_point()):
            return []
        sizes = product(n)
        if sizes is not None and sizes.streamed == 2 and elements(n) == elements(p):
            products.append(n)
        else:
            todo += n.all_input_nodes if is_map(n) else ()
    return products


def _rounded(n: Node) -> bool:
    """Whether a product is of 16-bit numbers: its scores, and gradients of them, have no more digits."""
    sizes = product(n)
    assert sizes is not None
    return any(_narrowest(x) <= SHORT for x in sizes.operands)


def _narrowest(n: Node) -> int:
    """The fewest bytes that an element of a tensor had on its way through views and casts."""
    least = n.meta["val"].dtype.itemsize
    while (is_view(n) or n.target is prims.convert_element_type.default) and isinstance(n.args[0], Node):
        n = n.args[0]
        if isinstance(val := n.meta.get("val"), torch.Tensor):
            least = min(least, val.dtype.itemsize)
    return least


def _summed_again(p: Iterable[Node], late: Collection[Node], total: Node) -> bool:
    """Whether a backward sums what it makes of these weights along the row that `total` is a sum of."""
    while total.target is aten.where.self:
        total = total.args[2]  # type: ignore[assignment]
    todo, seen = [u for n in p for u in n.users], set[Node]()
    while todo:
        n = todo.pop()
        if n in seen or n not in late:
            continue
        seen.add(n)
        if n.target is aten.sum.dim_IntList and n.users and n.args[1] == total.args[1]:
            return True
        todo += n.users if is_map(n) else ()
    return False


def _far(n: Node) -> bool:
    """Whether a node brings in a number so large that adding the logarithm of a sum does not change it."""
    return any(isinstance(a, float) and FAR < abs(a) < math.inf for a in n.args)


def _sums(total: Node, e: Node) -> bool:
    """Whether a divisor is the sum of the exponentials, or 1 where that is 0."""
    if total.target is aten.where.self:
        return isinstance(total.args[2], Node) and _sums(total.args[2], e)
    return total.target is aten.sum.dim_IntList and total.args[0] is e


def _replaced(p: Node, late: Collection[Node], *, rounded: bool) -> int:
    """Give the late readers of p, and of maps of it, maps of the other formula; 0 where there are none. rounded: the
    scores have 16 bits."""
    needed = _read_later(p, late)
    if p not in needed:
        return 0
    e, total = p.args
    assert isinstance(total, Node)
    x, shift = e.args[0].args  # type: ignore[union-attr]
    write = Writer(p)
    if not rounded and _summed_again(needed, late, total):
        inverse = write(aten.reciprocal.default, total)
        made = {p: write(aten.mul.Tensor, write(aten.exp.default, write(aten.sub.Tensor, x, shift)), inverse)}
    else:
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
