"""Positions that are computed from one index (images are resized so, padded by reflection) are known for every index.

Law: where a position is a function of one dim alone and its values at all indices are those of a form in integers, it
is that form. Its check, and what a negative one would wrap to, go where no value needs them.

    i64(f32(k) * 0.5)                                   k // 2                       nearest, by a whole number
    i64(f32(k) * (n / N))                               k n // N                     nearest
    i64(maximum((f32(k) + 0.5) * (n / N) - 0.5, 0))     maximum(2 k n + n - N, 0) // 2 N          bilinear
    minimum(the same + 1, n - 1)                        minimum(the same + 1, n - 1)

What checks a position, or chooses between two, by one dim alone, and comes to the same at all its indices, is dropped:

    within(where(k - 3 < 0, 3 - k, k - 3), n)           where(k - 3 < 0, 3 - k, k - 3)      where all of them exist

Side conditions: n, the extent of what is read, and N, the number of indices, are known; all N values are compared, as
torch computes them. Rounding: none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    call,
    children,
    dims_used,
    loads,
    ops_used,
    rebuild,
    walk,
)
from tilefold.tensor.index_simplify import const, is_integer, simplify
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import rename_loads

#: Indices of a dim that are looked at.
MOST = 1 << 16


def settled_positions(p: Program) -> Program:
    """The program with positions in integers where they can be."""
    known: dict[tuple[Expr, Expr], Expr] = {}

    def settled(e: Expr, extent: Expr) -> Expr:
        if not any(isinstance(x, Cast) or _is_guard(x) for x in walk(e)):
            return e
        if (e, extent) not in known:
            with _disable_current_modes():  # values are looked at: not under AOT's fake mode
                plain = _unguarded(p, e)
                rounded = any(isinstance(x, Cast) for x in walk(plain))
                known[e, extent] = _settled(p, plain, extent) if rounded else plain
        return known[e, extent]

    def read(ld: Load) -> Expr:
        shape = p.shape_of(ld.tensor)
        return Load(ld.tensor, tuple(settled(e, n) for e, n in zip(ld.index, shape, strict=True)))

    return replace(p, body=tuple(replace(c, body=rename_loads(c.body, read)) for c in p.body))


def plain_places(p: Program) -> Program:
    """The program with places of what gives a position in canonical form: at[(448 j + k) // 448, (448 j + k) % 448], of
    the view of a view, is at[j, k], which one kernel computes and reads."""

    def plain(ld: Load) -> Expr | None:
        return Load(ld.tensor, tuple(simplify(e, p.sizes) for e in ld.index)) if _is_part(ld) else None

    def read(ld: Load) -> Expr | None:
        return (
            Load(ld.tensor, tuple(rename_loads(e, plain) for e in ld.index))
            if any(map(_is_part, loads(ld)[1:]))
            else None
        )

    return replace(p, body=tuple(replace(c, body=rename_loads(c.body, read)) for c in p.body))


def _settled(p: Program, e: Expr, extent: Expr) -> Expr:
    values = _known(p, e)
    if values is None or values.dtype.is_floating_point or not isinstance(extent, Const):
        return e
    n = int(extent.value)
    if int(values.min()) < 0 or int(values.max()) >= n:
        return e
    (d,) = dims_used(e)
    for form in _forms(Index(d), n, len(values), values):
        found = _known(p, form)
        if found is not None and torch.equal(found.to(values.dtype), values):
            return form
    return e


def _is_part(ld: Load) -> bool:
    """Whether an element is read at quotients of dims, or at what is left of them."""
    apart = any(isinstance(e, Call) and e.op in ("floordiv", "mod") for e in ld.index)
    return apart and all(map(is_integer, ld.index))


def _is_guard(e: Expr) -> bool:
    return isinstance(e, Call) and e.op in ("where", "within")


def _unguarded(p: Program, e: Expr) -> Expr:
    """Without checks and branches that one dim alone decides, alike at all its indices."""
    e = rebuild(e, tuple(_unguarded(p, x) for x in children(e)))
    match e:
        case Call("where", (c, a, b)) if (taken := _known(p, c)) is not None and taken.dtype is torch.bool:
            return a if bool(taken.all()) else e if bool(taken.any()) else b
        case Call("within", (x, Const(n))) if (at := _known(p, x)) is not None and not at.dtype.is_floating_point:
            return x if int(at.min()) >= 0 and int(at.max()) < n else e
    return e


def _known(p: Program, e: Expr) -> torch.Tensor | None:
    """An expression's values at all indices of its one dim: [its extent]; None where it has more, or none, or depends
    on more, or has a check that some index fails."""
    dims = dims_used(e)
    extent = p.sizes[next(iter(dims))] if len(dims) == 1 else None
    if not isinstance(extent, Const) or not 0 < extent.value <= MOST:
        return None
    if loads(e) or "within" in ops_used(e):
        return None
    (d,) = dims
    length = int(extent.value)
    try:
        return evaluate(e, Grid({d: (0, length)}), Env(lambda tensor, at: at[0], {d: length}, {})).expand(length)
    except KeyError:
        return None


def _forms(k: Expr, n: int, length: int, values: torch.Tensor) -> Iterator[Expr]:
    """Forms in integers that the values may have, the simplest first."""
    run = int((values == values[0]).sum())
    yield k
    yield call("floordiv", k, const(run))
    by = math.gcd(n, length)
    yield call("floordiv", k * const(n // by), const(length // by))
    by = math.gcd(2 * n, abs(n - length), 2 * length)
    low = call(
        "floordiv",
        call("maximum", k * const(2 * n // by) + const((n - length) // by), const(0)),
        const(2 * length // by),
    )
    yield low
    yield call("minimum", low + const(1), const(n - 1))
