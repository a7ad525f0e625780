"""What the statements of a tile kernel read, allocate and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, loads, tensors_read, walk
from tilefold.tile import ir


def every(stmts: Iterable[ir.Stmt]) -> Iterator[ir.Stmt]:
    """The statements and those of their loops, in order."""
    for s in stmts:
        yield s
        if isinstance(s, ir.For):
            yield from every(s.body)


def grows(stmts: Sequence[ir.Stmt], d: str) -> bool:
    """Whether later tiles of d have longer loops (causal masks): the longest then start first."""
    for s in stmts:
        if isinstance(s, ir.For):
            stop = () if s.stop is None else walk(s.stop)
            start = () if s.start is None else walk(s.start)
            if Call("tile_stop", (Index(d),)) in stop and Call("tile_start", (Index(d),)) not in start:
                return True
            if grows(s.body, d):
                return True
    return False


def shrinks(stmts: Sequence[ir.Stmt], d: str) -> bool:
    """Whether later tiles of d have shorter loops: keys that later queries alone see, in a backward."""
    for s in stmts:
        if isinstance(s, ir.For):
            stop = () if s.stop is None else walk(s.stop)
            start = () if s.start is None else walk(s.start)
            if Call("tile_start", (Index(d),)) in start and Call("tile_stop", (Index(d),)) not in stop:
                return True
            if shrinks(s.body, d):
                return True
    return False


def expressions(stmts: Sequence[ir.Stmt]) -> list[Expr]:
    """Every expression that is computed, loop bounds excepted."""
    out: list[Expr] = []
    for s in stmts:
        match s:
            case ir.Map(_, e) | ir.Store(expr=e):
                out.append(e)
            case ir.Reduce(expr=e):
                out.append(e)
            case ir.Select(expr=e, payload=p):
                out += [e, p]
            case ir.Gemm(a=a, b=b):
                out += [a, b]
            case ir.For(body=body):
                out += expressions(body)
    return out


def allocated(stmts: Sequence[ir.Stmt]) -> set[str]:
    """Names of the buffers that come to life."""
    return {s.buffer.name for s in every(stmts) if isinstance(s, ir.Alloc)}


def written(stmts: Sequence[ir.Stmt]) -> list[str]:
    """Names of buffers, once a statement that writes them."""
    out: list[str] = []
    for s in stmts:
        match s:
            case ir.Fill(buf) | ir.Map(buf) | ir.Reduce(buf) | ir.Gemm(buf):
                out.append(buf)
            case ir.Select(buf, index_buf):
                out += [buf, index_buf]
            case ir.For(body=body):
                out += written(body)
    return out


def count_writes(stmts: Sequence[ir.Stmt]) -> dict[str, int]:
    """Statements that write each buffer."""
    counts: dict[str, int] = {}
    for n in written(stmts):
        counts[n] = counts.get(n, 0) + 1
    return counts


def rounded(stmts: Sequence[ir.Stmt]) -> dict[str, DType]:
    """Buffers written by one statement, which rounds to a narrower type than the buffer may have; the type."""
    counts, found = count_writes(stmts), dict[str, DType]()

    def look(within: Sequence[ir.Stmt]) -> None:
        for s in within:
            match s:
                case ir.Map(buf, Cast(_, dtype)) if counts[buf] == 1:
                    found[buf] = dtype
                case ir.For(body=body):
                    look(body)

    look(stmts)
    return found


def entered(stmts: Sequence[ir.Stmt]) -> set[str]:
    """Buffers that a step of a loop adds to after it used or changed what they held when it began, and not before."""
    found: set[str] = set()
    for s in stmts:
        if not isinstance(s, ir.For):
            continue
        for n, x in enumerate(s.body):
            if isinstance(x, ir.Reduce) and x.accumulate:
                before = _reads(s.body[:n]) | set(written(s.body[:n]))
                found |= {x.buf} & (before - _reads(s.body[n + 1 :]))
        found |= entered(s.body)
    return found


def _reads(stmts: Sequence[ir.Stmt]) -> set[str]:
    return {t for e in expressions(stmts) for t in tensors_read(e)}


def read_raw(stmts: Sequence[ir.Stmt]) -> set[str]:
    """Buffers whose value is used as it is held: operands of products of two loads, indices."""
    found: set[str] = set()
    for s in stmts:
        match s:
            case ir.Gemm(a=a, b=b) | ir.Reduce(op="sum", expr=Call("mul", (Load() as a, Load() as b))):
                found |= {a.tensor, b.tensor}
            case ir.For(body=body):
                found |= read_raw(body)
        computed = [] if isinstance(s, ir.For) else expressions((s,))
        indices = [ix for e in computed for ld in loads(e) for ix in ld.index]
        indices += s.index if isinstance(s, ir.Store) else ()
        found |= {t for ix in indices for t in tensors_read(ix)}
    return found
