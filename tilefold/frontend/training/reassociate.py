"""Sums of a product's elements, taken from another product that is there already.

    sum[k] r_i x_ik (sum[e] A_ie C_ke)  =  r_i sum[e] A_ie (sum[k] x_ik C_ke)

Both sums are finite, so they may be swapped, and r_i does not depend on k. The left side needs an element of the large
product for each i and k; the right side two tensors of the size of A, one of which the forward has computed:
O = x C. It is taken where both are smaller together than what is summed.

Of a softmax whose first places alone are read (sinks behind a row of scores), dp is 0 in the others, where p is finite
or, as all of its row, no number: the sum is that over the first places.

Softmax's gradient is such: p (dp - sum[k] dp p) with dp = dO V^T, and O = P V (Dao et al., "FlashAttention", 2022,
appendix B.4, eq. 4); so are gradients of sinks and of what else divides a whole row. Dropout multiplies both sides by
the same mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true as known

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.training.prices import elements

aten = torch.ops.aten
Node = torch.fx.Node

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_RENAMES = (*_RESHAPES, *_SAME, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
#: What reads its operands from memory.
_STORES = (*_PRODUCTS, aten.addmm.default)


@dataclass(frozen=True, slots=True)
class Factors:
    """A tensor as a product: powers of tensors, times a number."""

    powers: Mapping[Node, int]
    number: float


def reassociate(graph: torch.fx.Graph) -> None:
    """Rewrite the sums over the last axis that the law above holds for, in place."""
    made: dict[Node, list[Node]] = {}
    for n in graph.nodes:
        if n.op == "call_function" and n.target in _PRODUCTS:
            made.setdefault(n.args[1], []).append(n)
    place = {n: k for k, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.sum.dim_IntList and _over_last(node):
            _rewritten(node, made, place)


def _over_last(node: Node) -> bool:
    a = attrs(node)
    x = node.args[0]
    axes = a["dim"] if isinstance(a["dim"], list | tuple) else []
    return isinstance(x, Node) and x.meta["val"].dim() >= 2 and list(axes) in ([-1], [x.meta["val"].dim() - 1])


def _rewritten(node: Node, made: Mapping[Node, list[Node]], place: Mapping[Node, int]) -> None:
    summed = node.args[0]
    assert isinstance(summed, Node)
    whole = factors(summed)
    if (part := _of_first(summed)) is not None:
        whole, summed = part
    write = Writer(node)
    for large, power in whole.powers.items():
        source = _transposed(large.args[1]) if power == 1 and large.target in _PRODUCTS else None
        for o in made.get(source, ()) if source is not None else ():
            left, x = large.args[0], o.args[0]
            if place[o] > place[node] or o is large or not isinstance(left, Node) or not isinstance(x, Node):
                continue
            if 2 * elements(o) > elements(large) or o.meta["val"].shape != left.meta["val"].shape:
                continue
            if large.meta["val"].shape[-1] != summed.meta["val"].shape[-1] or elements(large) != elements(summed):
                continue
            held = factors(x)
            if not all(_alike(n, large) for n in held.powers):
                continue
            rest = _without(_without(whole, Factors({large: 1}, 1.0)), held)
            shape = (*summed.meta["val"].shape[:-1], 1)
            if not all(tuple(n.meta["val"].shape) in (shape, ()) for n in rest.powers):
                continue
            rows, out = write.sizes(shape), write.sizes(node.meta["val"].shape)
            if rows is None or out is None:
                continue
            total = _total(write, left, _as_stored(write, o), node.meta["val"].dtype)
            total = _times(write, write(aten.view.default, total, rows), rest)
            node.replace_all_uses_with(write(aten.view.default, total, out))
            return


def _of_first(n: Node) -> tuple[Factors, Node] | None:
    """What is multiplied of the first places of a softmax, by a gradient with zeros behind these: factors, and a tensor
    of that shape, those places."""
    sides = [x for x in n.args if isinstance(x, Node)] if n.target is aten.mul.Tensor else []
    for padded, p in zip(sides, reversed(sides), strict=True) if len(sides) == 2 else ():
        while p.target in _SAME and isinstance(p.args[0], Node):
            p = p.args[0]
        zeros, y = padded.args[:2] if padded.target is aten.slice_scatter.default else (None, None)
        if not isinstance(y, Node) or not isinstance(zeros, Node) or zeros.target not in _ZEROS or not _is_softmax(p):
            continue
        for part in p.users:
            same = part.target is aten.slice.Tensor and part.meta["val"].shape == y.meta["val"].shape
            if same and _from_start(part, "self") and _from_start(padded, "src"):
                return _joined(factors(y), Factors({part: 1}, 1.0), 1), part
    return None


def _from_start(n: Node, like: str) -> bool:
    """Whether a slice is of the first places of the last axis; `like` has all axes."""
    a, of = attrs(n), attrs(n)[like]
    last = isinstance(of, Node) and a["dim"] in (-1, of.meta["val"].dim() - 1)
    return last and a["start"] in (None, 0) and a["step"] == 1


def _is_softmax(p: Node) -> bool:
    """Whether a tensor is numbers over their sum along the last axis."""
    e, total = p.args[:2] if p.target is aten.div.Tensor else (None, None)
    summed = isinstance(total, Node) and total.target is aten.sum.dim_IntList and total.args[0] is e
    return summed and isinstance(e, Node) and e.target is aten.exp.default and _over_last(total)  # type: ignore[arg-type]


def _total(write: Writer, a: Node, o: Node, dtype: torch.dtype) -> Node:
    """sum[e] a_ie o_ie, the axis kept."""
    return write(aten.sum.dim_IntList, write(aten.mul.Tensor, write.cast(a, dtype), write.cast(o, dtype)), [-1], True)


def _times(write: Writer, total: Node, rest: Factors) -> Node:
    for n, power in rest.powers.items():
        for _ in range(abs(power)):
            total = write(aten.mul.Tensor if power > 0 else aten.div.Tensor, total, write.cast(n, _type(total)))
    return total if rest.number == 1.0 else write(aten.mul.Tensor, total, rest.number)


def _type(n: Node) -> torch.dtype:
    found: torch.dtype = n.meta["val"].dtype
    return found


def _as_stored(write: Writer, o: Node) -> Node:
    """O, read back from what the forward has of it in memory: a result, or the operand of a product, which are saved
    in any case; where nothing is of the whole (products of parts of its rows), O as all of the forward reads it,
    rounded or not."""
    ways = list(_renamings(o, write.at))
    paths = [p for p in ways if any(u.op == "output" or u.target in _STORES for u in p[-1].users)]
    if not paths:
        order = {n: k for k, n in enumerate(o.graph.nodes)}
        read = [{u for u in n.users if order[u] < order[write.at]} for n in o.graph.nodes]
        users = dict(zip(o.graph.nodes, read, strict=True))
        paths = [p for p in ways if all(users[a] == {b} for a, b in pairwise(p))]
    made = min(paths, key=lambda p: _type(p[-1]).itemsize, default=[o])
    found = made[-1]
    for n in reversed(made[1:]):
        back = _undone(write, n, found)
        if back is None:
            return o
        found = back
    return found


def _renamings(o: Node, before: Node) -> Iterator[list[Node]]:
    """Chains of operators from O that only rename its elements, or round them."""
    order = {n: k for k, n in enumerate(o.graph.nodes)}
    todo = [[o]]
    while todo:
        path = todo.pop()
        yield path
        for user in path[-1].users:
            narrows = user.target in _CASTS and _type(user).is_floating_point
            if order[user] < order[before] and (user.target in _RENAMES or narrows):
                todo.append([*path, user])


def _undone(write: Writer, n: Node, made: Node) -> Node | None:
    """What n renames, out of what n made; None where it cannot be written."""
    source = n.args[0]
    assert isinstance(source, Node)
    if n.target in _SAME or n.target in _CASTS:
        return made
    if n.target is aten.transpose.int:
        return write(aten.transpose.int, made, *n.args[1:])
    if n.target is aten.permute.default:
        rank = source.meta["val"].dim()
        order = [int(k) % rank for k in n.args[1]]  # type: ignore[union-attr, arg-type]
        return write(aten.permute.default, made, [order.index(k) for k in range(rank)])
    old, new = source.meta["val"].shape, n.meta["val"].shape
    sizes = write.sizes(old)
    if sizes is None or prod(old) != prod(new):
        return None
    return made if old == new else write(aten.reshape.default, made, sizes)


def _transposed(n: object) -> Node | None:
    """The tensor whose last two axes change places in n."""
    if not isinstance(n, Node) or n.op != "call_function" or not isinstance(n.args[0], Node):
        return None
    rank = n.meta["val"].dim()
    if n.target is aten.t.default and rank == 2:
        return n.args[0]
    axes = [a % rank for a in n.args[1:] if isinstance(a, int)] if n.target is aten.transpose.int else []
    if n.target is aten.permute.default and isinstance(n.args[1], list | tuple):
        order = [a % rank for a in n.args[1] if isinstance(a, int)]
        axes = order[-2:] if order[:-2] == list(range(rank - 2)) and order[-2] == rank - 1 else []
    return n.args[0] if sorted(axes) == [rank - 2, rank - 1] else None


def factors(node: Node) -> Factors:
    """A tensor taken apart along products, quotients, signs and what only renames or rounds elements."""
    a = node.args
    if node.op == "call_function":
        if node.target in _CASTS or node.target in _SAME or (node.target in _RENAMES and _keeps_order(node)):
            return _operand(a[0])
        if node.target is aten.neg.default:
            return _joined(_operand(a[0]), Factors({}, -1.0), 1)
        if node.target is aten.mul.Tensor:
            return _joined(_operand(a[0]), _operand(a[1]), 1)
        if node.target is aten.div.Tensor and isinstance(a[1], Node | int | float):
            return _joined(_operand(a[0]), _operand(a[1]), -1)
    return Factors({node: 1}, 1.0)


def _operand(x: object) -> Factors:
    return factors(x) if isinstance(x, Node) else Factors({}, float(x))  # type: ignore[arg-type]


def _joined(a: Factors, b: Factors, power: int) -> Factors:
    powers = Counter(a.powers)
    for n, k in b.powers.items():
        powers[n] += power * k
    return Factors({n: k for n, k in powers.items() if k}, a.number * b.number**power)


def _without(a: Factors, b: Factors) -> Factors:
    """a / b."""
    return _joined(a, b, -1)


def _keeps_order(node: Node) -> bool:
    """Whether a node's elements, one row after the other, are its operand's: einsum's products have axes of one index
    between others, and rows of several axes in one."""
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    old, new = source.meta["val"].shape, node.meta["val"].shape
    if prod(old) != prod(new):
        return False
    if node.target not in (aten.permute.default, aten.transpose.int):
        return True
    order = list(range(len(old)))
    if node.target is aten.permute.default:
        order = [int(k) % len(old) for k in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        i, j = (int(k) % len(old) for k in node.args[1:3])  # type: ignore[arg-type]
        order[i], order[j] = j, i
    long = [k for k in order if old[k] != 1]
    return long == sorted(long)


def _alike(n: Node, large: Node) -> bool:
    """Whether a factor is the same one wherever the elements of a product are in its order: it has as many, one a row,
    or one in all; or its last axes, which may be repeated over leading ones.
    At all sizes: to ask of the one at hand would fix it."""
    own, shape = n.meta["val"].shape, large.meta["val"].shape
    count, whole = prod(own), prod(shape)
    a_row = bool(own) and own[-1] == 1 and known(count * shape[-1] == whole)
    return known(count == 1) or known(count == whole) or a_row or _same_ends(own[-2:], shape[-2:])


def _same_ends(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether the last two axes of both are the same at all sizes."""
    return len(a) == len(b) == 2 and all(known(x == y) for x, y in zip(a, b, strict=True))
