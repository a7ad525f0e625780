"""Losses over rows of logits, a chunk of rows at a time: logits of the whole batch never exist.

A part of a joint graph *runs over rows* if each of its values is of a row, computed from values of that row and of none
(weights), or is a sum over all rows that the part itself does not read. Such a part may run for some rows after the
others. Linear layer and cross-entropy are one (Hsu et al., "Liger Kernel", 2024): logits, their log-sum-exp, softmax
minus one-hot, the gradient of the hidden states are of a row, loss and gradient of the weight are sums. Label
smoothing, ignored labels, soft caps, z-loss and what else a row's loss may be are the same to the law.

The backward belongs to the part where the gradient of the loss only scales it:

    d(weight) = g d'(weight)        for every value between them, of degree 1 in the number g

The forward then computes d' beside the loss, and the backward multiplies. Otherwise nothing is changed, nor where
rows depend on one another, where logits are a result, for values of float16 (whose small gradients need g), and where
what streams (`tensor.streams`) is never in memory anyway.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence

import torch

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.table import VIEWS
from tilefold.frontend.operators.writer import Writer
from tilefold.frontend.regions.rows import MOST_ROUNDED, Loop, Product, Result, Rows, Total, scaled
from tilefold.frontend.training.prices import elements, product
from tilefold.frontend.training.row_body import Body, roots
from tilefold.frontend.training.row_parts import NLL, PRODUCTS, TURNS, Part, is_total, part_around
from tilefold.runtime.reuse import THREADS

aten = torch.ops.aten
Node = torch.fx.Node

#: Bytes of values as wide as the logits, of all rows, from which on they are taken apart.
MOST_BYTES = 3 << 27
#: Bytes of them that a chunk holds at least, and, where that is more, as a share of what the part holds in any case:
#: weights and their gradients. Each chunk reads and writes the weight's gradient once more and has smaller products: on
#: an H200, 4096 x 2048 x 32000 in bf16 takes 2.39 ms whole, 2.79 in 2 chunks, 3.01 in 4, 4.88 in 8.
CHUNK_BYTES, SHARE = 1 << 28, 0.25
_LINEAR = {aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mm.default, *VIEWS, *TURNS} | {
    torch.ops.prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
}


def in_chunks(graph: torch.fx.Graph, late: Iterable[Node], budget: float = 1.0) -> int:
    """Replace parts that run over rows, in place; how many there were. late: what depends on gradients of results.

    Expects symbolic sizes nowhere in a part: such parts stay. budget: the part of `MOST_BYTES` that is allowed."""
    products = [n for n in graph.nodes if n.op == "call_function" and n.target in PRODUCTS]
    large = [n for n in products if n not in set(late) and 2 * _nbytes(n) > budget * MOST_BYTES]
    if large:
        _sums_of_losses(graph)
    return sum(_replaced(graph, n, set(late), budget) for n in large if n.users)


def _nbytes(n: Node) -> int:
    val = n.meta["val"]
    return elements(n) * val.element_size() if all(isinstance(k, int) for k in val.shape) else 0


def _replaced(graph: torch.fx.Graph, seed: Node, late: set[Node], budget: float) -> bool:
    sizes = product(seed)
    if sizes is None or sizes.streamed is not None or seed.meta["val"].dtype is torch.float16:
        return False
    part = part_around(graph, seed)
    if part is None or not any(m in late for m in part.members):
        return False  # of a forward alone nothing is saved
    gradients = _degrees(graph, part, late)
    if gradients is None:
        return False
    tangent, degree = gradients
    _Writing(graph, part, tangent, degree).write(_chunk(part, seed, budget))
    return True


def _sums_of_losses(graph: torch.fx.Graph) -> None:
    """The mean of rows' losses is their sum over the number of labels, which no logit is needed for."""
    for n in list(graph.nodes):
        if n.target is not NLL or attrs(n)["weight"] is not None:
            continue
        own = attrs(n)
        write = Writer(n)
        dtype = n.meta["val"][0].dtype
        counted = write.cast(write(aten.ne.Scalar, own["target"], own["ignore_index"]), dtype)
        count = write(aten.sum.default, counted)
        for user in list(n.users):
            if user.args[1] == 1:  # which no gradient of single losses reads
                user.replace_all_uses_with(count)
                graph.erase_node(user)
            elif user.args[1] == 0 and own["reduction"] == 1:
                n.args = (*n.args[:3], 2, *n.args[4:])
                with graph.inserting_after(user):
                    mean = graph.call_function(aten.div.Tensor, (user, count))
                mean.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(mean, delete_user_cb=lambda u, mean=mean: u is not mean)


def _chunk(part: Part, seed: Node, budget: float) -> int:
    """Rows of a chunk, all of them where they are few: nothing as wide as the logits is then held for the backward."""
    wide = (1 if _overwritten(seed) else 2) * _nbytes(seed) // part.rows
    whole = [n for n in part.inputs if n not in part.sliced]
    held = sum(map(_nbytes, (*whole, *(n for n in part.results if is_total(n, part.rows, part.members)))))
    chunk = int(max(CHUNK_BYTES * budget, SHARE * held) // wide) or 1
    sums = [n for n in part.results if is_total(n, part.rows, part.members) and n.target is aten.mm.default]
    sums = [n for n in sums if n.meta["val"].dtype.itemsize == 2]
    fewer = -(-part.rows // MOST_ROUNDED)
    if sums and chunk < fewer and (fewer - chunk) * wide < sum(map(_nbytes, sums)):
        chunk = fewer  # larger chunks hold less than sums in float32 would
    return _even(part.rows, chunk)


def _overwritten(seed: Node) -> bool:
    """Whether a kernel writes the gradient of the logits over them (`runtime.reuse`). Where rows are not at multiples
    of 16 bytes, the library's product leaves gaps between them (`runtime.aligned`), and results have none."""
    val = seed.meta["val"]
    columns = int(val.shape[-1])
    return bool(val.device.type == "cuda" and columns >= THREADS and columns * val.dtype.itemsize % 16 == 0)


def _even(rows: int, chunk: int) -> int:
    """At least about that many rows, up to twice as many where chunks are then equal: one body serves them all."""
    if chunk >= rows:
        return rows
    count = max(2, rows // chunk)
    for n in range(count, count // 2, -1):
        if rows % n == 0 and rows // n % 64 == 0:
            return rows // n
    return chunk if chunk < 64 else -(-chunk // 64) * 64


# -- what the gradient of the loss scales


def _degrees(graph: torch.fx.Graph, part: Part, late: set[Node]) -> tuple[Node, dict[Node, int]] | None:
    """The number that the backward's part is given, and the degree in it of all that depends on it up to the part's
    end; None where there is not one number, or a value is not of degree 1."""
    given = [n for n in graph.find_nodes(op="placeholder") if n in late]
    inside = set(part.members)
    above: set[Node] = set()
    todo = [*part.members]
    while todo:
        for x in todo.pop().all_input_nodes:
            if x in late and x not in above:
                above.add(x)
                todo.append(x)
    tangents = [n for n in given if n in above]
    if len(tangents) != 1 or tangents[0].meta["val"].numel() != 1 or not tangents[0].meta["val"].is_floating_point():
        return None
    degree = {n: 0 for n in graph.nodes if n not in late}
    degree[tangents[0]] = 1
    for n in graph.nodes:
        if n in degree or not (n in above or n in inside):
            continue
        found = _degree(n, degree)
        if found is None:
            return None
        degree[n] = found
    return tangents[0], degree


#: Gradients that are of degree 1 in their first operand.
_SCALE_FIRST = (
    aten.nll_loss_backward.default,
    aten._log_softmax_backward_data.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
)


def _degree(n: Node, degree: dict[Node, int]) -> int | None:
    a = n.args
    of = [degree.get(x, 0) if isinstance(x, Node) else 0 for x in a]
    if not all(x in degree for x in n.all_input_nodes):
        return None
    most = max((degree[x] for x in n.all_input_nodes), default=0)
    if most == 0:
        return 0
    if n.target in _LINEAR:
        return sum(of) if n.target is aten.mm.default and sum(of) < 2 else of[0] if sum(of) == of[0] else None
    if n.target in (aten.mul.Tensor, aten.mul.Scalar):
        return sum(of) if sum(of) < 2 else None
    if n.target in (aten.div.Tensor, aten.div.Scalar):
        return of[0] if of[1] == 0 else None
    if n.target in (aten.add.Tensor, aten.sub.Tensor):
        return of[0] if of[0] == of[1] else None
    if n.target is aten.where.self:
        return 1 if of[0] == 0 and all(d == 1 or _zero(x) for x, d in zip(a[1:], of[1:], strict=True)) else None
    if n.target is aten.masked_fill.Scalar:
        return 1 if of[0] == 1 and a[2] == 0 else None
    if n.target in _SCALE_FIRST:
        return 1 if of[0] == 1 and sum(of) == 1 else None
    return None


def _zero(x: object) -> bool:
    if isinstance(x, Node) and x.target in (aten.full.default, aten.zeros.default, aten.scalar_tensor.default):
        return x.target is aten.zeros.default or bool(x.args[-1] == 0)
    return not isinstance(x, Node) and x == 0


# -- writing


class _Writing:
    """Puts a loop in the place of a part."""

    def __init__(self, graph: torch.fx.Graph, part: Part, tangent: Node, degree: dict[Node, int]):
        self.graph, self.part, self.tangent, self.degree = graph, part, tangent, degree
        self.made: dict[Node, Node] = {}

    def write(self, chunk: int) -> None:
        part = self.part
        given = roots(part)
        inputs = [self._of_one(n) for n in given]
        last = -(-part.rows // chunk)
        sizes = {chunk, part.rows - (last - 1) * chunk}
        bodies = {n: self._body(n) for n in sizes}
        sliced = tuple(n in part.sliced for n in given)
        results = tuple(self._result(n) for n in part.results)
        loop = Loop(part.rows, chunk, sliced, results, bodies)
        node = self.graph.call_function(loop, tuple(inputs))
        node.meta["val"] = tuple(n.meta["val"] for n in part.results)
        for k, n in enumerate(part.results):
            pick = self.graph.call_function(operator.getitem, (node, k))
            pick.meta["val"] = n.meta["val"]
            new = pick
            if self.degree.get(n, 0):
                new = self.graph.call_function(scaled, (pick, self.tangent))
                new.meta["val"] = n.meta["val"]
            n.replace_all_uses_with(new, delete_user_cb=lambda u: u not in set(part.members))
        _in_order(self.graph)
        for n in reversed(part.members):
            self.graph.erase_node(n)
        self.graph.eliminate_dead_code()

    def _of_one(self, n: Node) -> Node:
        """An input with 1 in the place of the tangent."""
        if self.degree.get(n, 0) == 0 and n is not self.tangent:
            return n
        if n not in self.made:
            if n is self.tangent:
                val = n.meta["val"]
                new = self.graph.call_function(
                    aten.full.default, (list(val.shape), 1.0), {"dtype": val.dtype, "device": val.device}
                )
            else:
                new = self.graph.node_copy(n, self._of_one)
            new.meta = {"val": n.meta["val"]}
            self.made[n] = new
        return self.made[n]

    def _result(self, n: Node) -> Result:
        val = n.meta["val"]
        if n.target is aten.mm.default and is_total(n, self.part.rows, self.part.members):
            return Product(tuple(val.shape), val.dtype)
        kind = Total if is_total(n, self.part.rows, self.part.members) else Rows
        return kind(tuple(val.shape), val.dtype)

    def _body(self, rows: int) -> torch.fx.GraphModule:
        return Body(self.part, rows).module()


def _in_order(graph: torch.fx.Graph) -> None:
    """Sort the nodes so that each comes after what it reads, else as they are."""
    nodes = list(graph.nodes)
    place = {n: k for k, n in enumerate(nodes)}
    waits = {n: len(n.all_input_nodes) for n in nodes}
    ready = [place[n] for n in nodes if waits[n] == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        n = nodes[heapq.heappop(ready)]
        order.append(n)
        for u in n.users:
            waits[u] -= 1
            if waits[u] == 0:
                heapq.heappush(ready, place[u])
    assert len(order) == len(nodes)
    first: Sequence[Node] = [n for n in order if n.op == "placeholder"]
    end = next(n for n in nodes if n.op == "output")
    for n in (*first, *(n for n in order if n.op not in ("placeholder", "output"))):
        end.prepend(n)
