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
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, children, dims_used, loads, rebuild, walk
from tilefold.tensor.index_simplify import const
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
                rounded = any(isinstance(x, Cast) for x in walk(e))
                known[e, extent] = _unguarded(p, _settled(p, e, extent) if rounded else e)
        return known[e, extent]

    def read(ld: Load) -> Expr:
        shape = p.shape_of(ld.tensor)
        return Load(ld.tensor, tuple(settled(e, n) for e, n in zip(ld.index, shape, strict=True)))

    return replace(p, body=tuple(replace(c, body=rename_loads(c.body, read)) for c in p.body))


def _settled(p: Program, e: Expr, extent: Expr) -> Expr:
    inner = e.args[0] if isinstance(e, Call) and e.op == "within" else e
    dims = dims_used(inner)
    if len(dims) != 1 or loads(inner) or not isinstance(extent, Const):
        return e
    (d,) = dims
    count = p.sizes[d]
    if not isinstance(count, Const) or not 0 < count.value <= MOST:
        return e
    n, length = int(extent.value), int(count.value)
    values = _values(inner, d, length)
    if values is None or int(values.min()) < 0 or int(values.max()) >= n:
        return e
    for form in _forms(Index(d), n, length, values):
        found = _values(form, d, length)
        if found is not None and torch.equal(found, values):
            return form
    return _without_branches(inner, d, length)


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
    """An expression's values at all indices of its one dim; None where it has more, or depends on more."""
    dims = dims_used(e)
    extent = p.sizes[next(iter(dims))] if len(dims) == 1 else None
    if loads(e) or not isinstance(extent, Const) or not 0 < extent.value <= MOST:
        return None
    if any(isinstance(x, Call) and x.op == "within" for x in walk(e)):
        return None  # a check that some index fails
    (d,) = dims
    length = int(extent.value)
    try:
        return evaluate(e, Grid({d: (0, length)}), Env(lambda tensor, at: at[0], {d: length}, {}))
    except KeyError:
        return None


def _values(e: Expr, d: str, length: int) -> torch.Tensor | None:
    """All values of an integer expression over d: [length]; None where it refers to something else."""
    try:
        found = evaluate(e, Grid({d: (0, length)}), Env(lambda tensor, at: at[0], {d: length}, {}))
    except KeyError:
        return None
    return found.to(torch.int64).expand(length) if not found.dtype.is_floating_point else None


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


def _without_branches(e: Expr, d: str, length: int) -> Expr:
    """Without the branches that no index takes."""
    if isinstance(e, Call) and e.op == "where" and not loads(e.args[0]):
        taken = evaluate(e.args[0], Grid({d: (0, length)}), Env(lambda tensor, at: at[0], {d: length}, {}))
        if taken.dtype is torch.bool and (bool(taken.all()) or not bool(taken.any())):
            return _without_branches(e.args[1] if bool(taken.all()) else e.args[2], d, length)
    return rebuild(e, tuple(_without_branches(x, d, length) for x in children(e)))
