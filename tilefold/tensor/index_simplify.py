"""Simplify integer index expressions, using the ranges of the loop indices.

An index is a polynomial over atoms (loop indices, symbols, and whatever has no structure here)
with integer coefficients. The laws, for a divisor m > 0:

    (m q + r) // m = q     (m q + r) % m = r      where 0 <= r < m is provable
    (c q + r) // (c d) = q // d     (c q + r) % (c d) = c (q % d) + r      where 0 <= r < c is provable
    (a % (c d)) % d = a % d
    (a // b) // c  = a // (b c)        (a // b) % c = (a % (b c)) // b

A bound is provable when, with every symbol s written as s' + 1, all coefficients of the difference
are >= 0. Symbols are extents or 0/1-specialised integers, so s >= 1 wherever an index is evaluated
at all (an empty dim evaluates nothing).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import comb, gcd

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, Sym, dims_named, rebuild, rename_dims

Monomial = tuple[Expr, ...]
Poly = dict[Monomial, int]
Sizes = Mapping[str, Expr]
#: What chooses between indices, or conditions of it.
_AROUND = frozenset({"where", "maximum", "minimum", "within", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})
#: Extents of dims, as a key.
Named = tuple[tuple[str, Expr], ...]


def const(n: int) -> Const:
    """The i64 literal n."""
    return Const(n, DType.I64)


def simplify(e: Expr, sizes: Sizes) -> Expr:
    """An equal integer expression in canonical form; `sizes` has the extent of every dim in it."""
    if isinstance(e, Index):
        return e
    return _simplified(e, _named(e, sizes))


@lru_cache(maxsize=1 << 14)
def _simplified(e: Expr, sizes: Named) -> Expr:
    """As it was found for the same expression of other dims (each operator has its own). Terms are in the order of
    their dims' names, which the numbers in the place of names keep."""
    names = {d: f"d{n:04}" for n, d in enumerate(sorted({*dims_named(e), *(d for d, _ in sizes)}))}
    extents = tuple((names[d], rename_dims(n, names)) for d, n in sizes)
    found = _nameless(rename_dims(e, names), extents)
    return rename_dims(found, {n: d for d, n in names.items()})


@lru_cache(maxsize=1 << 14)
def _nameless(e: Expr, sizes: Named) -> Expr:
    return to_expr(poly(e, dict(sizes)))


def _named(e: Expr, sizes: Sizes) -> Named:
    """Extents of the dims in an expression, and of those in these extents: all that decides how it is simplified."""
    found = {d: sizes[d] for d in dims_named(e) if d in sizes}
    for n in tuple(found.values()):
        found.update({d: sizes[d] for d in dims_named(n) if d in sizes})
    return tuple((d, found[d]) for d in sorted(found))


def same(a: Expr, b: Expr, sizes: Sizes | None = None) -> bool:
    """Whether two integer expressions are equal as polynomials."""
    if isinstance(a, Const) and isinstance(b, Const):
        return a.value == b.value
    table = sizes or {}
    return poly(a, table) == poly(b, table)


def product(sizes: tuple[Expr, ...] | list[Expr]) -> Expr:
    """Canonical product of size expressions."""
    out: Poly = {(): 1}
    for s in sizes:
        out = _mul(out, poly(s, {}))
    return to_expr(out)


def is_one(size: Expr) -> bool:
    """Whether an extent is the literal 1."""
    return isinstance(size, Const) and size.value == 1


# -- polynomials ----------------------------------------------------------------------------


def poly(e: Expr, sizes: Sizes) -> Poly:
    """The polynomial of an integer expression; what has no structure becomes an atom."""
    if isinstance(e, Index):
        return {(e,): 1}
    if isinstance(e, Const):
        return {(e,): 1} if e.dtype is not DType.I64 else {(): int(e.value)} if e.value else {}
    if isinstance(e, Size):
        return poly(sizes[e.dim], sizes) if e.dim in sizes else {(e,): 1}
    if isinstance(e, Call):
        # Divisions are remembered: of windows of windows, each one looks through all below it. A copy is handed out,
        # for a polynomial is its owner's to change.
        return dict(_divided(e, _named(e, sizes))) if e.op in ("floordiv", "mod") else _of_call(e, sizes)
    if isinstance(e, Load):
        return {(Load(e.tensor, tuple([simplify(i, sizes) for i in e.index])),): 1}
    return {(e,): 1}


@lru_cache(maxsize=1 << 14)
def _divided(e: Call, sizes: Named) -> Poly:
    return _of_call(e, dict(sizes))


def _of_call(e: Call, sizes: Sizes) -> Poly:
    if e.op in ("where", "maximum", "minimum", "within"):
        return {(_with_simple_parts(e, sizes),): 1}
    if e.op not in ("add", "sub", "mul", "floordiv", "mod", "neg"):
        return {(e,): 1}
    if e.op == "neg":
        return _scale(poly(e.args[0], sizes), -1)
    a, b = [poly(x, sizes) for x in e.args]
    match e.op:
        case "add":
            return _add(a, b)
        case "sub":
            return _add(a, b, -1)
        case "mul":
            return _mul(a, b)
        case "floordiv":
            return _floordiv(a, b, sizes)
    return _mod(a, b, sizes)


def _with_simple_parts(e: Expr, sizes: Sizes) -> Expr:
    """A choice between indices, or its condition, with the indices in canonical form."""
    if is_integer(e):
        return simplify(e, sizes)
    if isinstance(e, Call) and e.op in _AROUND:
        return rebuild(e, tuple([_with_simple_parts(a, sizes) for a in e.args]))
    return e


def is_integer(e: Expr) -> bool:
    """Whether an expression is certainly an i64 (comparisons and casts are left alone)."""
    match e:
        case Const(_, dtype):
            return dtype is DType.I64
        case Call("add" | "sub" | "mul" | "floordiv" | "mod" | "neg", args):
            return all(is_integer(a) for a in args)
        case Index() | Size() | Sym():
            return True
    return False


def to_expr(p: Poly) -> Expr:
    """The canonical expression: terms of higher degree first, the constant last."""
    terms = sorted(p.items(), key=lambda t: (-len(t[0]), tuple(map(_key, t[0]))))
    out: Expr | None = None
    for mono, coef in terms:
        term = _term(mono, abs(coef))
        if out is None:
            out = term if coef > 0 else (const(coef) if not mono else _term(mono, coef))
        else:
            out = Call("add" if coef > 0 else "sub", (out, term))
    return const(0) if out is None else out


def _term(mono: Monomial, coef: int) -> Expr:
    out: Expr | None = None
    for atom in mono:
        out = atom if out is None else Call("mul", (out, atom))
    if out is None:
        return const(coef)
    return out if coef == 1 else Call("mul", (out, const(coef)))


def _key(atom: Expr) -> tuple[int, str]:
    match atom:
        case Index(d):
            return 0, d
        case Sym(s):
            return 2, s
        case Size(d):
            return 2, d
        case _:
            return 1, repr(atom)


def _add(a: Poly, b: Poly, sign: int = 1) -> Poly:
    out = dict(a)
    for mono, coef in b.items():
        total = out.get(mono, 0) + sign * coef
        if total:
            out[mono] = total
        else:
            out.pop(mono, None)
    return out


def _scale(a: Poly, k: int) -> Poly:
    return {m: c * k for m, c in a.items()} if k else {}


def _mul(a: Poly, b: Poly) -> Poly:
    for one, other in ((a, b), (b, a)):
        if len(one) == 1 and () in one:
            return other if one[()] == 1 else _scale(other, one[()])
    out: Poly = {}
    for ma, ca in a.items():
        for mb, cb in b.items():
            mono = tuple(sorted(ma + mb, key=_key)) if ma and mb else ma or mb
            total = out.get(mono, 0) + ca * cb
            if total:
                out[mono] = total
            else:
                del out[mono]
    return out


def divide(a: Poly, m: Poly) -> tuple[Poly, Poly]:
    """Quotient and remainder by the leading monomial of m; a = m q + r, r not necessarily < m. By 0
    (an axis without elements) everything remains."""
    if not m:
        return {}, dict(a)
    lead = max(m, key=lambda mono: (len(mono), tuple(map(_key, mono))))
    quotient: Poly = {}
    rest = dict(a)
    for mono in sorted(a, key=len, reverse=True):
        coef = rest.get(mono, 0)
        factor = _without(mono, lead)
        if factor is None or coef // m[lead] == 0:
            continue
        k = coef // m[lead] if not mono or coef % m[lead] == 0 else 0
        if k:
            step = {factor: k}
            quotient = _add(quotient, step)
            rest = _add(rest, _mul(step, m), -1)
    return quotient, rest


def _without(mono: Monomial, part: Monomial) -> Monomial | None:
    left = list(mono)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _floordiv(a: Poly, m: Poly, sizes: Sizes) -> Poly:
    if m == {(): 1} or not a:
        return a
    if not m or not _positive(m, a, sizes):
        return {(Call("floordiv", (to_expr(a), to_expr(m))),): 1}
    if within(a, m, sizes):
        return {}
    quotient, rest = divide(a, m)
    if within(rest, m, sizes):
        return quotient
    if (coarse := _coarser(rest, m, sizes)) is not None:
        _, q, d, _ = coarse
        return _add(quotient, _floordiv(q, d, sizes))
    match to_expr(rest):
        case Call("floordiv", (inner, by)) if _positive_const(by):
            return _add(quotient, _floordiv(poly(inner, sizes), _mul(poly(by, sizes), m), sizes))
        case other:
            return _add(quotient, {(Call("floordiv", (other, to_expr(m))),): 1})


def _mod(a: Poly, m: Poly, sizes: Sizes) -> Poly:
    if m == {(): 1} or not a:
        return {}
    if not m or not _positive(m, a, sizes):
        return {(Call("mod", (to_expr(a), to_expr(m))),): 1}
    if within(a, m, sizes):
        return a
    rest = divide(a, m)[1]
    if within(rest, m, sizes):
        return rest
    if (coarse := _coarser(rest, m, sizes)) is not None:
        c, q, d, r = coarse
        return _add(_scale(_mod(q, d, sizes), c), r)
    match to_expr(rest):
        case Call("mod", (inner, Const(by))) if set(m) == {()} and by % m[()] == 0:
            return _mod(poly(inner, sizes), m, sizes)
        case Call("floordiv", (inner, by)) if _positive_const(by) or isinstance(by, Sym):
            step = poly(by, sizes)
            return _floordiv(_mod(poly(inner, sizes), _mul(step, m), sizes), step, sizes)
        case other:
            return {(Call("mod", (other, to_expr(m))),): 1}


def _coarser(a: Poly, m: Poly, sizes: Sizes) -> tuple[int, Poly, Poly, Poly] | None:
    """c, q, d, r with a = c q + r, m = c d, c > 1 and 0 <= r < c, for a literal m; None where there are none."""
    if set(m) != {()}:
        return None
    whole = m[()]
    for c in sorted({gcd(whole, k) for mono, k in a.items() if mono} - {1}, reverse=True):
        q = {mono: k // c for mono, k in a.items() if k // c and (not mono or k % c == 0)}
        r = _add(a, _scale(q, c), -1)
        if any(q) and within(r, {(): c}, sizes):
            return c, q, {(): whole // c}, r
    return None


def _positive(m: Poly, a: Poly, sizes: Sizes) -> bool:
    """Whether m > 0 wherever `a` has a value: it is the extent of a dim that indexes `a`, or so for all sizes."""
    if nonnegative(_add(m, {(): 1}, -1)):
        return True
    dims = {x.dim for mono in a for x in mono if isinstance(x, Index)}
    return any(poly(sizes[d], sizes) == m for d in dims if d in sizes)


def _positive_const(e: Expr) -> bool:
    return isinstance(e, Const) and e.value > 0


# -- ranges -----------------------------------------------------------------------------------


def within(a: Poly, m: Poly, sizes: Sizes) -> bool:
    """Whether 0 <= a < m is provable for all indices in range."""
    r = interval(a, sizes)
    if r is None:
        return False
    return nonnegative(r[0]) and nonnegative(minus(m, r[1], 1))


def minus(a: Poly, b: Poly, n: int) -> Poly:
    """a - b - n."""
    return _add(_add(a, b, -1), {(): 1}, -n)


def interval(a: Poly, sizes: Sizes) -> tuple[Poly, Poly] | None:
    """Lower and upper bound over symbols; None where an atom has no known range."""
    lo: Poly = {}
    hi: Poly = {}
    for mono, coef in a.items():
        upper: Poly = {(): 1}
        fixed = True
        for atom in mono:
            r = _atom_range(atom, sizes)
            if r is None:
                return None
            fixed &= isinstance(atom, Sym | Size)
            upper = _mul(upper, r)
        if fixed:
            lo, hi = _add(lo, upper, coef), _add(hi, upper, coef)
        elif coef > 0:
            hi = _add(hi, upper, coef)
        else:
            lo = _add(lo, upper, coef)
    return lo, hi


def _atom_range(atom: Expr, sizes: Sizes) -> Poly | None:
    """Upper bound of an atom whose lower bound is 0 (a symbol: itself)."""
    match atom:
        case Sym() | Size():
            return {(atom,): 1}
        case Index(d) if d in sizes:
            return _add(poly(sizes[d], sizes), {(): 1}, -1)
        case Call("mod", (_, m)):
            return _add(poly(m, sizes), {(): 1}, -1)
        case Call("floordiv"):
            return _quotient_range(atom, _named(atom, sizes))
        case Call("maximum" | "minimum"):
            return _bounded_range(atom, _named(atom, sizes))
        case Call("where", (_, Const(a, DType.I64), Const(b, DType.I64))) if min(a, b) >= 0:
            return {(): int(max(a, b))}
    return None


@lru_cache(maxsize=1 << 14)
def _bounded_range(e: Call, named: Named) -> Poly | None:
    """As `_atom_range`, of the greater or the lesser of two numbers: a position kept inside of an axis, whatever it is
    computed from."""
    sizes = dict(named)
    if not _least_is_zero(e, sizes):
        return None
    highest = [None if r is None else r[1] for r in (interval(poly(x, sizes), sizes) for x in e.args)]
    known = [hi for hi in highest if hi is not None]
    if e.op == "maximum" and len(known) < len(e.args):
        return None
    if len(known) < len(e.args):
        return known[0] if known else None
    less, more = known if nonnegative(minus(known[1], known[0], 0)) else known[::-1]
    if e.op == "minimum":
        return less
    return more if nonnegative(minus(more, less, 0)) else None


def _least_is_zero(e: Expr, sizes: Sizes) -> bool:
    """Whether a number is provably 0 or more."""
    if isinstance(e, Call) and e.op in ("maximum", "minimum"):
        decides = any if e.op == "maximum" else all
        return decides(_least_is_zero(x, sizes) for x in e.args)
    r = interval(poly(e, sizes), sizes)
    return r is not None and nonnegative(r[0])


@lru_cache(maxsize=1 << 14)
def _quotient_range(e: Call, named: Named) -> Poly | None:
    sizes = dict(named)
    a, m = (poly(x, sizes) for x in e.args)
    r = interval(a, sizes)
    if r is None or not nonnegative(r[0]):
        return None
    quotient, rest = divide(r[1], m)
    if rest and not within(rest, m, {}):
        # (m q - 1) // m = q - 1 leaves the remainder -1
        quotient, rest = _add(quotient, {(): 1}, -1), _add(rest, m)
    return quotient if not rest or within(rest, m, {}) else r[1]


def nonnegative(p: Poly) -> bool:
    """Whether p >= 0 for all symbols >= 1 is provable; False where p has other atoms."""
    shifted: Poly = {}
    for mono, coef in p.items():
        if any(not isinstance(a, Sym | Size) for a in mono):
            return False
        term: Poly = {(): coef}
        for atom in dict.fromkeys(mono):
            power = mono.count(atom)
            term = _mul(term, {(atom,) * k: comb(power, k) for k in range(power + 1)})
        shifted = _add(shifted, term)
    return all(c >= 0 for c in shifted.values())
