"""Rules 4 and 5: linearity of the matrix product (Blockbuster, section 3.2).

    rule 4    (diag(c) A) B    =  diag(c) (A B)
    rule 5    (A + c 1^T) B    =  A B + c (1^T B)

A is a row of blocks over k, B a matrix of blocks over k and n, c a column vector. Afterwards the
product does not wait for c, and all maps are over n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.blockbuster.edit import consumers, in_order, producers, prune, single
from tilefold.blockbuster.ir import Func, Graph, Map, Node, Out, Param, Reduce, Type
from tilefold.blockbuster.rules.law import Law, Match, Refusal
from tilefold.blockbuster.rules.patterns import MappedRowOp, Product, mapped, mapped_row_op, product
from tilefold.names import fresh


def _attempts(law: Law, g: Graph, op: str) -> Iterator[Match | Refusal]:
    made, used = producers(g), consumers(g)
    for at, n in enumerate(g.nodes):
        p = product(n)
        if p is None or p.left.value not in made:
            continue
        first = made[p.left.value]
        row = mapped_row_op(g.nodes[first], (op,))
        if row is None or row.dim != p.inner:
            continue
        if used[row.out] != [at]:
            yield Refusal(law, g, (first, at), f"{row.out} has other uses, so it would still be computed")
            continue
        yield Match(law, g, (first, at), f"{op} by {row.vector.value}, and the product {p.out}", p.dim)


def _parts(m: Match, op: str) -> tuple[MappedRowOp, Product]:
    row, p = mapped_row_op(m.graph.nodes[m.nodes[0]], (op,)), product(m.graph.nodes[m.nodes[1]])
    assert row is not None and p is not None
    return row, p


def _with(m: Match, new: list[Node]) -> Graph:
    """The graph with new nodes in place of the matched ones."""
    g, (a, b) = m.graph, m.nodes
    rest = [n for k, n in enumerate(g.nodes) if k not in (a, b)]
    rest[b - 1 : b - 1] = new
    return prune(replace(g, nodes=in_order(rest, (p.name for p in g.inputs))))


def _product_of(g: Graph, m: Match, row: MappedRowOp, out: str) -> Map:
    """The product with the row operator's operand on its left."""
    old = g.nodes[m.nodes[1]]
    assert isinstance(old, Map)
    ins = tuple(replace(i, value=row.source.value) if i.value == row.out else i for i in old.ins)
    return replace(old, ins=ins, results=(Out(out),))


@dataclass(frozen=True, slots=True)
class SwapScaleDot(Law):
    """Rule 4. A row scale moves from the left operand of a matrix product to its result."""

    name = "swap scale and dot"
    number = 4
    statement = "(diag(c) A) B = diag(c) (A B)"
    condition = "the scaled matrix has no other use; c is the same for all its blocks of a row"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        return _attempts(self, g, "row_scale")

    def apply(self, m: Match) -> Graph:
        row, p = _parts(m, "row_scale")
        taken = set(m.graph.values)
        plain = fresh(f"{p.out}_plain", taken)
        item = (*row.source_type.type.item[:-1], *p.right_type.type.item[:-1])
        scale = mapped(
            p.dim,
            ((plain, Param("x", Type((), item)), True), (row.vector.value, Param("c", row.vector_type.type), False)),
            Func("y", "row_scale", ("x", "c")),
            p.out,
        )
        return _with(m, [_product_of(m.graph, m, row, plain), scale])


@dataclass(frozen=True, slots=True)
class SwapShiftDot(Law):
    """Rule 5. A row shift of the left operand becomes a rank-1 correction of the product."""

    name = "swap shift and dot"
    number = 5
    statement = "(A + c 1^T) B = A B + c (1^T B)"
    condition = "the shifted matrix has no other use; c is a vector that is the same for all its blocks of a row"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        for m in _attempts(self, g, "row_shift"):
            if isinstance(m, Match):
                row, _ = _parts(m, "row_shift")
                if len(row.vector_type.type.item) != 1:
                    yield Refusal(self, g, m.nodes, f"{row.vector.value} is no vector")
                    continue
            yield m

    def apply(self, m: Match) -> Graph:
        row, p = _parts(m, "row_shift")
        taken = set(m.graph.values)
        plain, sums, outer = (fresh(f"{p.out}_{x}", taken) for x in ("plain", "sums", "outer"))
        rows, cols = row.vector_type.type, Type((), p.right_type.type.item[:-1])
        both = Type((), (*row.source_type.type.item[:-1], *cols.item))
        right = Param("b", p.right_type.type)
        column_sums = single(
            p.dim,
            [(p.right.value, right, True)],
            [
                mapped(p.inner, (("b", Param("x", right.type.at(p.inner)), True),), Func("s", "row_sum", ("x",)), "s"),
                Reduce("r", "sum", "s", p.inner),
            ],
            {Out(sums): "r"},
        )
        corrections = mapped(
            p.dim,
            ((row.vector.value, Param("c", rows), False), (sums, Param("r", cols), True)),
            Func("y", "outer", ("c", "r")),
            outer,
        )
        total = mapped(
            p.dim,
            ((outer, Param("x", both), True), (plain, Param("y", both), True)),
            Func("z", "add", ("x", "y")),
            p.out,
        )
        return _with(m, [column_sums, corrections, _product_of(m.graph, m, row, plain), total])
