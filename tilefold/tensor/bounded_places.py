"""Places that data give in a type of few values are known to exist where all of these do, and none is negative.

Laws: of a place x, integers of which lie from a to b,

    within(x, n)                x                       where 0 <= a and b < n
    where(x < 0, x + n, x)      x                       where 0 <= a: nothing wraps
    where(c, t[x], t[y])        t[where(c, x, y)]       where data give both, and both exist: one place is looked up

Weights of four bits are read so: code[q >> 4] and code[q & 15], of 16 values, of which an element needs one.

Side conditions: bounds follow from types, indices and whole numbers; a cast to a type that does not hold what it is
given has that type's bounds. Rounding: none.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, children, loads, ops_used, rebuild
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import rename_loads

#: The least and the largest number.
Ends = tuple[int, int]
_ENDS = {DType.BOOL: (0, 1), DType.U8: (0, 255)}


def bounded_places(p: Program) -> Program:
    """The program without checks of places that exist, and with one place where a choice is between two."""

    def read(ld: Load) -> Expr | None:
        return Load(ld.tensor, tuple(_existing(p, e) for e in ld.index)) if any(map(loads, ld.index)) else None

    def stated(e: Expr) -> Expr:
        return _one_place(rename_loads(e, read))

    return replace(p, body=tuple(replace(c, body=stated(c.body)) if _looks_up(c.body) else c for c in p.body))


def _looks_up(e: Expr) -> bool:
    return any(loads(i) for ld in loads(e) for i in ld.index)


def _existing(p: Program, e: Expr) -> Expr:
    if isinstance(e, Load) or not children(e):
        return e
    e = rebuild(e, tuple(_existing(p, x) for x in children(e)))
    match e:
        case Call("within", (x, Const(int() as n))) if (at := ends(p, x)) is not None and at[0] >= 0 and at[1] < n:
            return x
        case Call("where", (Call("lt", (x, Const(int() as n))), _, b)) if (at := ends(p, x)) and at[0] >= n:
            return b
    return e


def _one_place(e: Expr) -> Expr:
    """With one place for both elements of a choice."""
    if not _looks_up(e):
        return e
    e = rebuild(e, tuple(map(_one_place, children(e)))) if not isinstance(e, Load) else e
    match e:
        case Call("where", (c, Load(t, first), Load(u, second))) if t == u and first != second:
            chosen = tuple(a if a == b else call("where", c, a, b) for a, b in zip(first, second, strict=True))
            apart = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
            if all(_is_plain(a) and _is_plain(b) for a, b in apart):
                return Load(t, chosen)
    return e


def _is_plain(e: Expr) -> bool:
    """Whether data give a place that is known to exist."""
    return bool(loads(e)) and "within" not in ops_used(e)


def ends(p: Program, e: Expr) -> Ends | None:
    """The least and the largest value of an integer expression, as far as types, indices and numbers say."""
    match e:
        case Const(int() as n, DType.I64):
            return n, n
        case Index(d) if isinstance(size := p.sizes.get(d), Const):
            return 0, max(0, int(size.value) - 1)
        case Load(t):
            return _ENDS.get(p.dtype_of(t))
        case Cast(arg, dtype):
            return _cast(ends(p, arg), dtype)
        case Call("floordiv" | "mod" | "bits_and" as op, (x, Const(int() as n, DType.I64))) if n > 0:
            return _parted(op, ends(p, x), n)
        case Call("where", (_, a, b)):
            found = [ends(p, a), ends(p, b)]
            known = [x for x in found if x is not None]
            return (min(x[0] for x in known), max(x[1] for x in known)) if len(known) == 2 else None
        case Call("add" | "sub" | "mul" as op, (a, b)):
            first, second = ends(p, a), ends(p, b)
            return None if first is None or second is None else _combined(op, first, second)
    return None


def _cast(x: Ends | None, dtype: DType) -> Ends | None:
    if dtype.is_float:
        return None
    half = 1 << (8 * dtype.nbytes - 1)
    least, most = _ENDS.get(dtype, (-half, half - 1))
    return x if x is not None and least <= x[0] and x[1] <= most else _ENDS.get(dtype)


def _parted(op: str, x: Ends | None, n: int) -> Ends | None:
    """Of whole numbers from x[0] to x[1], and a positive number."""
    if x is None:
        return None
    if op == "floordiv":
        return x[0] // n, x[1] // n
    if op == "mod":
        return (0, n - 1) if x[0] < 0 or x[1] >= n else x
    return 0, min(n, x[1]) if x[0] >= 0 else n


def _combined(op: str, x: Ends, y: Ends) -> Ends:
    match op:
        case "add":
            return x[0] + y[0], x[1] + y[1]
        case "sub":
            return x[0] - y[1], x[1] - y[0]
    products = [a * b for a in x for b in y]
    return min(products), max(products)
