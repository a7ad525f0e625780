"""Shapes that several laws look for: an operator mapped over a list, and a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.blockbuster.ir import Func, Graph, In, Map, Node, Out, Param, Reduce


@dataclass(frozen=True, slots=True)
class MappedRowOp:
    """`out = map_k op(list, c)` with op row_scale or row_shift, and c one vector for all blocks."""

    op: str
    dim: str
    source: In
    source_type: Param
    vector: In
    vector_type: Param
    out: str


def mapped_row_op(n: Node, ops: tuple[str, ...]) -> MappedRowOp | None:
    """The node as a mapped row operator of one of these kinds."""
    if not isinstance(n, Map) or n.start or len(n.body.nodes) != 1 or len(n.results) != 1:
        return None
    f = n.body.nodes[0]
    if not isinstance(f, Func) or f.op not in ops or n.results[0].reduce is not None or n.body.outputs != (f.out,):
        return None
    by_name = {i.name: (i, p) for i, p in zip(n.ins, n.body.inputs, strict=True)}
    if f.args[0] not in by_name or f.args[1] not in by_name:
        return None
    (source, sp), (vector, vp) = by_name[f.args[0]], by_name[f.args[1]]
    if not source.each or vector.each or vp.type.buffered:
        return None
    return MappedRowOp(f.op, n.dim, source, sp, vector, vp, n.results[0].name)


@dataclass(frozen=True, slots=True)
class Product:
    """`out = map_n sum_k dot(left[k], right[n, k])`: a row of blocks times a matrix of blocks."""

    dim: str
    inner: str
    left: In
    left_type: Param
    right: In
    right_type: Param
    out: str


def product(n: Node) -> Product | None:
    """The node as a matrix product: a map whose body is a mapped dot and its sum, fused or not."""
    if not isinstance(n, Map) or n.start or len(n.results) != 1 or n.results[0].reduce is not None:
        return None
    inner = _dot_sum(n.body)
    if inner is None:
        return None
    k, left, right = inner
    by_name = {i.name: (i, p) for i, p in zip(n.ins, n.body.inputs, strict=True)}
    (a, ap), (b, bp) = by_name[left], by_name[right]
    if a.each or not b.each:
        return None
    return Product(n.dim, k, a, ap, b, bp, n.results[0].name)


def _dot_sum(g: Graph) -> tuple[str, str, str] | None:
    """Dim and operands (values of `g`) of a graph that is the sum over a dim of dots of two lists."""
    match g.nodes:
        case (Map() as m, Reduce(out, "sum", a, dim)) if m.dim == dim and m.outs == (a,) and g.outputs == (out,):
            wanted = None
        case (Map() as m,) if g.outputs == m.outs and len(m.results) == 1:
            wanted = "sum"
        case _:
            return None
    if m.start or m.results[0].reduce != wanted or len(m.body.nodes) != 1:
        return None
    f = m.body.nodes[0]
    if not isinstance(f, Func) or f.op != "dot" or m.body.outputs != (f.out,):
        return None
    by_name = {i.name: i for i in m.ins}
    if set(f.args) - set(by_name) or not all(by_name[x].each for x in f.args):
        return None
    return m.dim, by_name[f.args[0]].value, by_name[f.args[1]].value


def mapped(dim: str, ins: tuple[tuple[str, Param, bool], ...], f: Func, out: str) -> Map:
    """`out = map_dim f`, a list; `ins` are (value outside, parameter inside, each)."""
    body = Graph(tuple(p for _, p, _ in ins), (f,), (f.out,))
    return Map(dim, tuple(In(v, p.name, each) for v, p, each in ins), body, (Out(out),))
