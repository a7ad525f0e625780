"""Where masks of equal numbers may be true: tables that bound the loop over what they mask (documents of packed rows).

Law: where a[i] = b[j] for an i of a block, b[j] is between the least and the greatest a of the block; so j is not
before the first such index, nor after the last one:

    where(a[i] == b[j], s, -inf)   =   where((a[i] == b[j]) & (first[i // 64] <= j) & (j < last[i // 64]), s, -inf)

The tables are small, and their comparison bounds the loop over j (`block.bounds`). Of numbers in order, as documents in
a packed sequence have them, nothing is visited that the mask empties, but the rest of a tile; of others, too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used, lit, loads, substitute, walk
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph, is_static
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.streams import streaming

#: Rows of a block: tiles of kernels are multiples of it.
ROWS = 64
#: Extent of what is masked from which on tables are worth their kernels.
LEAST = 1024


@dataclass(frozen=True, slots=True)
class _Equal:
    """a[.., row, ..] == b[.., stream, ..], with the dims that either has beside."""

    a: Load
    b: Load
    row: str
    stream: str
    rest: tuple[str, ...]


def bounded(p: Program) -> Program:
    """The program with masks of equal numbers over long streams that say so."""
    g = Graph.of(p)
    wide = streaming(g)
    taken, made = {*p.names, *p.sizes, *p.syms}, dict[_Equal, tuple[str, str]]()
    body: list[Compute] = []
    sizes = dict(p.sizes)
    for c in p.body:
        found = list(_masks(g, c)) if c.name in wide and c.reducer is None else []
        for _, _, equal in found:
            if equal not in made:
                tables, more = _tables(equal, sizes, taken)
                sizes |= more
                body += tables
                made[equal] = (tables[-2].name, tables[-1].name)
        table: dict[Expr, Expr] = {where: _with(where, truth, equal, *made[equal]) for where, truth, equal in found}
        body.append(replace(c, body=substitute(c.body, table)) if table else c)
    return replace(p, body=tuple(body), sizes=sizes) if made else p


def _masks(g: Graph, c: Compute) -> Iterator[tuple[Call, bool, _Equal]]:
    """`where`s that discard what a comparison for equality does not let through, with its truth where they do not."""
    reduced = {d for r in g.reached(c.name, g.consumers, lambda x: x.reducer is None) for d in r.rdims}
    for e in dict.fromkeys(walk(c.body)):
        match e:
            case Call("where", (mask, kept, other)) if isinstance(kept, Const) != isinstance(other, Const):
                truth = isinstance(other, Const)
                for x, y in _equals(mask, truth):
                    equal = _sorted(g, x, y, reduced)
                    if equal is not None and not _told(mask, equal.stream):
                        yield e, truth, equal
                        break


def _equals(e: Expr, truth: bool) -> Iterator[tuple[Load, Load]]:
    """Elements that are equal wherever `e` has that value."""
    match e:
        case Call("not", (a,)):
            yield from _equals(a, not truth)
        case Call(("and" | "or") as op, (a, b)) if truth == (op == "and"):
            yield from (*_equals(a, truth), *_equals(b, truth))
        case Cast(a, DType.BOOL):
            yield from _equals(a, truth)
        case Call(("eq" | "ne") as op, (Load() as a, Load() as b)) if truth == (op == "eq"):
            yield a, b


def _told(mask: Expr, stream: str) -> bool:
    """Whether data bounds the stream already: the ends of a list of blocks."""
    ordered = (x for x in walk(mask) if isinstance(x, Call) and x.op in ("lt", "le", "gt", "ge"))
    return any(Index(stream) in x.args and any(True for _ in loads(x)) for x in ordered)


def _sorted(g: Graph, x: Load, y: Load, reduced: set[str]) -> _Equal | None:
    """Which of two elements is a row's, and which the stream's; None where that is not one dim each, or it is short."""
    p = g.program
    inputs = {i.name: i for i in p.inputs}
    for a, b in ((x, y), (y, x)):
        if not all(ld.tensor in inputs and inputs[ld.tensor].dtype in (DType.I64, DType.I32) for ld in (a, b)):
            return None
        if not all(isinstance(ix, Index) for ix in (*a.index, *b.index)):
            return None
        rows, streams = dims_used(a) - dims_used(b), dims_used(b) - dims_used(a)
        if len(rows) != 1 or len(streams) != 1:
            return None
        (row,), (stream,) = rows, streams
        if stream in reduced and row not in reduced:
            fixed = is_static(p.sizes[row]) and is_static(p.sizes[stream])
            rest = tuple(sorted(dims_used(a) & dims_used(b)))
            return _Equal(a, b, row, stream, rest) if fixed and g.extent(stream) >= LEAST else None
    return None


def _tables(x: _Equal, sizes: dict[str, Expr], taken: set[str]) -> tuple[list[Compute], dict[str, Expr]]:
    """Least and greatest of a block of rows, then the first index that may be equal and the end of the last one."""
    rows, columns = (int(sizes[d].value) for d in (x.row, x.stream))  # type: ignore[attr-defined]
    block, within, at = (fresh(n, taken) for n in ("blocks", "within", "places"))
    more: dict[str, Expr] = {block: lit(-(-rows // ROWS)), within: lit(ROWS), at: lit(columns)}
    dims = (*x.rest, block)
    place = call("minimum", call("add", call("mul", Index(block), ROWS), Index(within)), lit(rows - 1))
    a, b = substitute(x.a, {Index(x.row): place}), substitute(x.b, {Index(x.stream): Index(at)})

    def table(name: str, reducer: str, over: str, body: Expr) -> Compute:
        return Compute(fresh(name, taken), dims, DType.I64, body, reducer, (over,))

    least, most = table("least", "min", within, a), table("most", "max", within, a)
    least_at, most_at = (Load(t.name, tuple(map(Index, dims))) for t in (least, most))
    between = call("and", call("ge", b, least_at), call("le", b, most_at))
    first = table("first", "min", at, call("where", between, Index(at), lit(columns)))
    last = table("last", "max", at, call("where", between, call("add", Index(at), 1), lit(0)))
    return [least, most, first, last], more


def _with(where: Call, truth: bool, x: _Equal, first: str, last: str) -> Expr:
    """The `where` that also asks for an index between the table's."""
    mask, kept, other = where.args
    place = (*map(Index, x.rest), call("floordiv", Index(x.row), ROWS))
    inside = call(
        "and", call("ge", Index(x.stream), Load(first, place)), call("lt", Index(x.stream), Load(last, place))
    )
    return Call("where", (call("and", mask, inside) if truth else call("or", mask, call("not", inside)), kept, other))
