"""What is known about index expressions when code is generated: linear forms, bounds, widths.

A *linear form* maps atoms to integer coefficients; the key None is the constant. Atoms are
`Index`, `Sym` and any expression that is not linear in its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, dims_used
from tilefold.algebra.philox import BITS, FEW_BITS

Linear = dict[Expr | None, int]

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
#: Sizes and symbols of a launch are below this, unless the wide variant of the kernel is used.
SIZE_LIMIT = 2**28

_RANGES = {
    DType.I64: INT64,
    DType.I32: INT32,
    DType.I16: (-(2**15), 2**15 - 1),
    DType.I8: (-128, 127),
    DType.U8: (0, 255),
    DType.BOOL: (0, 1),
}


def linear(e: Expr, sizes: Mapping[str, Expr]) -> Linear:
    """`e` as a linear form; sizes of dims are replaced by their expressions over symbols."""
    match e:
        case Const(value, DType.I64 | DType.BOOL):
            return {None: int(value)}
        case Size(dim) if dim in sizes:
            return linear(sizes[dim], sizes)
        case Call("add", (a, b)):
            return _add(linear(a, sizes), linear(b, sizes), 1)
        case Call("sub", (a, b)):
            return _add(linear(a, sizes), linear(b, sizes), -1)
        case Call("neg", (a,)):
            return _add({}, linear(a, sizes), -1)
        case Call("mul", (a, b)):
            x, y = linear(a, sizes), linear(b, sizes)
            for p, q in ((x, y), (y, x)):
                if set(p) <= {None}:
                    return _add({}, q, p.get(None, 0))
    return {e: 1}


def _add(x: Linear, y: Linear, factor: int) -> Linear:
    out = dict(x)
    for k, v in y.items():
        out[k] = out.get(k, 0) + factor * v
        if out[k] == 0 and k is not None:
            del out[k]
    return out


def in_range(
    e: Expr, extent: Expr, sizes: Mapping[str, Expr], parts: Mapping[str, tuple[int, int | None]] | None = None
) -> bool:
    """Whether 0 <= e < extent is certain, for indices inside their dims, and inside [low, high) of those in `parts`."""
    if isinstance(e, Call) and e.op == "within":
        return linear(e.args[1], sizes) == linear(extent, sizes)
    form, limit = linear(e, sizes), linear(extent, sizes)
    low: Linear = {None: form.get(None, 0)}
    high: Linear = {None: form.get(None, 0)}
    for atom, c in form.items():
        if atom is None:
            continue
        if not isinstance(atom, Index) or atom.dim not in sizes:
            return False
        begin, end = (parts or {}).get(atom.dim, (0, None))
        last = _add(linear(sizes[atom.dim], sizes) if end is None else {None: end}, {None: 1}, -1)
        high = _add(high, last if c > 0 else {None: begin}, c)
        low = _add(low, {None: begin} if c > 0 else last, c)
    return _not_negative(low) and _not_negative(_add(_add(limit, {None: 1}, -1), high, -1))


def _not_negative(form: Linear) -> bool:
    return form.get(None, 0) >= 0 and all(k is None for k in form)


def split(e: Expr, dim: str, sizes: Mapping[str, Expr]) -> tuple[int, Expr] | None:
    """(c, rest) with e = c * Index(dim) + rest and rest free of dim; None if e is not so."""
    form = linear(e, sizes)
    c = form.pop(Index(dim), 0)
    rest: Expr = Const(form.pop(None, 0), DType.I64)
    for atom, k in form.items():
        assert atom is not None
        if dim in dims_used(atom):
            return None
        term = atom if k == 1 else atom * k
        rest = term if rest == Const(0, DType.I64) else rest + term
    return c, rest


def interval(e: Expr, dtype_of: Callable[[str], DType], limit: int) -> tuple[int, int]:
    """Bounds of an integer or boolean expression, with sizes and symbols up to `limit`."""
    found: dict[int, tuple[int, int]] = {}  # of its parts, each once: a sum of many terms is as deep

    def bounds(x: Expr) -> tuple[int, int]:
        known = found.get(id(x))
        if known is None:
            known = found[id(x)] = _interval(x, dtype_of, limit, bounds)
        return known

    return bounds(e)


def _interval(
    e: Expr, dtype_of: Callable[[str], DType], limit: int, bounds: Callable[[Expr], tuple[int, int]]
) -> tuple[int, int]:
    """See `interval`. bounds: of its parts."""
    match e:
        case Const(value, _):
            return int(value), int(value)
        case Index() | Size():
            return 0, limit
        case Sym():
            return -limit, limit
        case Load(tensor, _):
            return _RANGES.get(dtype_of(tensor), INT64)
        case Cast(_, dtype):
            return _RANGES.get(dtype, INT64)
        case Call("add", (a, b)):
            return _clip(bounds(a)[0] + bounds(b)[0], bounds(a)[1] + bounds(b)[1])
        case Call("sub", (a, b)):
            return _clip(bounds(a)[0] - bounds(b)[1], bounds(a)[1] - bounds(b)[0])
        case Call("neg", (a,)):
            return _clip(-bounds(a)[1], -bounds(a)[0])
        case Call("mul", (a, b)):
            ends = [x * y for x in bounds(a) for y in bounds(b)]
            return _clip(min(ends), max(ends))
        case Call("floordiv" | "mod", (a, b)):
            n = max(abs(x) for x in (*bounds(a), *bounds(b)))
            return _clip(-n, n)
        case Call("within", (a, n)):
            return 0, max(0, min(bounds(a)[1], bounds(n)[1] - 1))
        case Call("random", _):
            return 0, 2**BITS - 1
        case Call("random16", _):
            return 0, 2**FEW_BITS - 1
        case Call("abs", (a,)):
            return _clip(0, max(abs(x) for x in bounds(a)))
        case Call("maximum" | "minimum", (a, b)) | Call("where", (_, a, b)):
            return min(bounds(a)[0], bounds(b)[0]), max(bounds(a)[1], bounds(b)[1])
        case Call("sign" | "floor" | "ceil" | "trunc" | "round", (a,)):
            lo, hi = bounds(a)
            return min(lo, -1), max(hi, 1)
        case Call("lt" | "le" | "gt" | "ge" | "eq" | "ne" | "and" | "or" | "not" | "isnan" | "isinf"):
            return 0, 1
    return INT64


def _clip(lo: int, hi: int) -> tuple[int, int]:
    return (lo, hi) if INT64[0] <= lo and hi <= INT64[1] else INT64
