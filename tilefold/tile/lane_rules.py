"""What decides whether a fold may be kept per lane (`lanes`): dependence, cancellation, additive repair, bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    call,
    dims_used,
    lit,
    ops_used,
    tensors_read,
    transform,
    walk,
)
from tilefold.algebra.ops import TILE_BOUNDS, TILE_EXTREMES
from tilefold.tile import ir
from tilefold.tile.uses import written

#: Operations that are singular in their last operand.
SINGULAR = frozenset({"div", "floordiv", "mod", "rsqrt", "log", "log2", "log1p"})


def across_lanes(dims: frozenset[str], body: Sequence[ir.Stmt], elements: frozenset[str]) -> frozenset[str]:
    """Buffers whose values differ from lane to lane, which lie along `dims`."""
    found = set(elements)
    while True:
        before = len(found)
        for s in body:
            if isinstance(s, ir.Map | ir.Reduce):
                power = isinstance(s, ir.Reduce) and s.op == "prod"
                if power or dims & dims_used(s.expr) or found & tensors_read(s.expr):
                    found.add(s.buf)
        if len(found) == before:
            return frozenset(found)


def singular(body: Sequence[ir.Stmt], states: frozenset[str]) -> bool:
    """Whether what depends on the states of a lane is where an operation may be singular."""
    found = set(states)
    for s in body:
        if isinstance(s, ir.Map | ir.Reduce) and found & tensors_read(s.expr):
            found.add(s.buf)
    for s in body:
        for x in walk(s.expr) if isinstance(s, ir.Map | ir.Reduce) else ():
            match x:
                case Call("pow", (a, e)):
                    if found & tensors_read(e) or (found & tensors_read(a) and not _positive(e)):
                        return True
                case Call(op, args) if op in SINGULAR and found & tensors_read(args[-1]):
                    return True
    return False


def reduces_alone(
    body: Sequence[ir.Stmt],
    states: Collection[str],
    elements: Collection[str],
    buffers: Mapping[str, ir.Buffer],
) -> bool:
    """Whether a loop's statements are reductions alone, to floats, whose identities are numbers, and of elements that
    no state is needed for."""
    computed = [s for s in body if isinstance(s, ir.Map | ir.Reduce)]
    read = {t for s in computed for t in tensors_read(s.expr)}
    return read.isdisjoint(states) and all(
        isinstance(s, ir.Alloc)
        or (isinstance(s, ir.Map | ir.Reduce) and s.buf in elements)
        or (
            isinstance(s, ir.Reduce)
            and s.buf in states
            and s.op in ("sum", "max", "min")
            and buffers[s.buf].dtype.is_float
        )
        for s in body
    )


def stores_states(body: Sequence[ir.Stmt], states: Collection[str]) -> bool:
    """Whether a loop stores what depends on its states, which lanes have parts of."""
    found = set(states)
    for s in body:
        if isinstance(s, ir.Map | ir.Reduce) and found & tensors_read(s.expr):
            found.add(s.buf)
    return any(isinstance(s, ir.Store) and bool(found & tensors_read(s.expr)) for s in body)


def _positive(e: Expr) -> bool:
    return isinstance(e, Const) and e.value > 0


def adds(e: Expr, buf: str) -> bool:
    """Whether e is the buffer's own value plus something that does not depend on it."""
    match e:
        case Load(t):
            return t == buf
        case Call("add", (a, b)):
            return (adds(a, buf) and buf not in tensors_read(b)) or (adds(b, buf) and buf not in tensors_read(a))
        case Call("sub", (a, b)):
            return adds(a, buf) and buf not in tensors_read(b)
    return False


def plus(a: Expr, b: Expr) -> Expr:
    """a + b, without zeros."""
    zero = lit(0)
    return b if a == zero else a if b == zero else call("add", a, b)


def met_by(first: Expr, tile: int, lanes: int, lane: str) -> list[Expr]:
    """The indices of a tile that begins at `first` as lanes meet them, one after the other."""
    return [plus(plus(first, lit(e * lanes)), Index(lane)) for e in range(tile // lanes)]


def rest_of(s: ir.For, turns: Expr | None, length: int | None) -> ir.For:
    """A loop over the indices behind its whole tiles."""
    full = turns or lit(length // s.tile if length is not None else 0)
    return replace(s, start=plus(s.start or lit(0), call("mul", call("maximum", full, 0), s.tile)))


def first_fill(n: str, before: Sequence[ir.Stmt]) -> ir.Fill | None:
    """The statement that fills buffer n, if nothing else before touches it."""
    touching = [
        s for s in before
        if (isinstance(s, ir.Alloc) and s.buffer.name == n) or n in written((s,))
    ]  # fmt: skip
    match touching:
        case [ir.Alloc(), ir.Fill(value=Const()) as fill]:
            return fill
    return None


def position(e: Expr, tiles: Mapping[str, int]) -> Expr | None:
    """A loop bound as an expression of statements; None where it needs the tile of a dim in tiles of several."""

    def one(n: Expr) -> Expr | None:
        match n:
            case Call("tile_start", (Index(d),)) if tiles.get(d) == 1:
                return Index(d)
            case Call("tile_stop", (Index(d),)) if tiles.get(d) == 1:
                return call("add", Index(d), 1)
        return None

    done = transform(e, one)
    named = (*TILE_BOUNDS, *TILE_EXTREMES)
    return done if ops_used(done).isdisjoint(named) else None
