"""A cascade whose last reductions have nothing to do with each other: its Fold is their Folds, side by side.

    (F x G)(tile) = (F(tile), G(tile)), what both have once

A cascade grows reduction by reduction (the sums over all shifts of a window), and is derived each time with all that it
has: what one takes follows from what it depends on alone, and is derived once here, whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.expr import Expr, tensors_read
from tilefold.algebra.fold import Fold, StateVar
from tilefold.errors import NotFusibleError


def side_by_side(cascade: Cascade, derive: Callable[[Cascade], Fold]) -> Fold | None:
    """The Fold made of one for each reduction that no other reads, with all that it depends on; None where there is one
    such reduction, where what derives one needs a variable of its own (a count), which others may share, or fails where
    it does not in company, and where two want different variables for what both depend on."""
    parts = _parts(cascade)
    if len(parts) < 2:
        return None
    folds: list[Fold] = []
    state: dict[str, StateVar] = {}
    finish: dict[str, Expr] = {}
    for part in parts:
        read = frozenset[str]().union(*(tensors_read(r.body) for r in part))
        given = tuple([x for x in cascade.input_dtypes if x[0] in read])
        try:
            fold = derive(Cascade(cascade.axes, part, given, cascade.few))
        except NotFusibleError:
            return None
        own = {r.name for r in part}
        if any(v.name not in own or state.setdefault(v.name, v) != v for v in fold.state):
            return None
        if any(finish.setdefault(n, e) != e for n, e in fold.finish):
            return None
        folds.append(fold)
    results = [n for r in cascade.reductions for n in (r.name, r.index_name) if n is not None]
    return replace(
        folds[0],
        state=tuple([state[r.name] for r in cascade.reductions if r.name in state]),
        finish=tuple([(n, finish[n]) for n in results if n in finish]),
        derivation=tuple(dict.fromkeys(s for f in folds for s in f.derivation)),
        checks=tuple(dict.fromkeys(c for f in folds for c in f.checks)),
    )


def _parts(cascade: Cascade) -> list[tuple[Reduction, ...]]:
    """Each reduction whose results no other reads, behind all that it depends on."""
    of = {n: r.name for r in cascade.reductions for n in (r.name, r.index_name) if n is not None}
    below: dict[str, frozenset[str]] = {}  # results that a reduction depends on, with its own
    used = set[str]()
    for r in cascade.reductions:
        read = {of[t] for t in tensors_read(r.body) if t in of}
        used |= read
        below[r.name] = frozenset({r.name}).union(*(below[n] for n in read))
    last = [below[r.name] for r in cascade.reductions if r.name not in used]
    return [tuple([r for r in cascade.reductions if r.name in names]) for names in last]
