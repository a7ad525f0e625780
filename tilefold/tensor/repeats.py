"""Products of rows that are repeated, computed once for all of the same rows.

Law: y[i, l] = sum over m of x[i, m, l // r] w[i, m]  is  y'[i, l // r],  y'[i, g] = sum over m of x[i, m, g] w[i, m]

and the same of l % r (rows that come again after r others). So are a condition that is repeated in time
(`repeat_interleave`, a vocoder's mel frames) and pixels (`interpolate(mode="nearest")`) in front of a convolution of
single taps. What reads y is a map, or reads a map of it that is stored.

Side conditions: r is known; every factor has l in that one form alone (heads that share keys have it plainly in their
queries). Rounding: none.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, children, dims_named, loads, substitute
from tilefold.names import fresh
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import prune_dims, rename_loads


def products_of_repeats(p: Program) -> Program:
    """The program in which products have each row once."""
    for c in p.body:
        product = product_of(c)
        for d in c.dims if product is not None and product.is_matrix() else ():
            part, n = _part(c.body, d), p.sizes[d]
            if part is not None and isinstance(n, Const):
                p, c = _once(p, c, d, part, int(n.value))  # (its other dims may repeat as well)
    return prune_dims(p)


def _part(e: Expr, d: str) -> Call | None:
    """The one form, d // r or d % r, in which an expression has d; None: there is another, or none."""
    found: set[Call] = set()

    def look(x: Expr) -> bool:
        """Whether d is in no other form."""
        match x:
            case Call("floordiv" | "mod", (Index(dim), Const(r, DType.I64))) if dim == d and r > 1:
                found.add(x)
                return True
        return x != Index(d) and all(map(look, children(x)))

    plain = look(e)
    if not plain or len(found) != 1 or d in dims_named(substitute(e, {next(iter(found)): const(0)})):
        return None
    return next(iter(found))


def _once(p: Program, c: Compute, d: str, part: Call, extent: int) -> tuple[Program, Compute]:
    """The program with `c` in rows that are not repeated along d, and that statement."""
    r = int(part.args[1].value)  # type: ignore[attr-defined]
    few = -(-extent // r) if part.op == "floordiv" else r
    if few >= extent:
        return p, c
    taken = set(p.names)
    g = fresh(f"{d}_once", taken)
    at = c.dims.index(d)
    once = replace(
        c, name=fresh(f"{c.name}_once", taken), dims=(*c.dims[:at], g, *c.dims[at + 1 :]),
        body=substitute(c.body, {part: Index(g)}),
    )  # fmt: skip
    repeated = replace(c, body=_read(once, at, part, tuple(map(Index, c.dims))), reducer=None, rdims=())
    readers = [x for x in p.body if any(ld.tensor == c.name for ld in loads(x.body))]
    kept = c.name in p.outputs or any(x.reducer is not None for x in readers)

    def direct(ld: Load) -> Expr | None:
        return _read(once, at, part, ld.index) if ld.tensor == c.name else None

    body: list[Compute] = []
    for x in p.body:
        if x.name == c.name:
            body += [once, repeated] if kept else [once]
        else:
            body.append(x if x.reducer is not None else replace(x, body=rename_loads(x.body, direct)))
    return replace(p, body=tuple(body), sizes={**p.sizes, g: const(few)}), once


def _read(once: Compute, at: int, part: Call, index: tuple[Expr, ...]) -> Load:
    """An element of the repeated result."""
    return Load(once.name, (*index[:at], Call(part.op, (index[at], part.args[1])), *index[at + 1 :]))
