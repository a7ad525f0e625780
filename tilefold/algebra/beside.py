"""Reductions of a cascade that have nothing to do with each other: their Fold is their Folds, side by side.

    (F x G)(tile) = (F(tile), G(tile))

A cascade that grows by such reductions one by one (the sums over all shifts of a window) is derived in all its states,
and each derivation goes through all before it: what one takes is derived once here, whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.expr import tensors_read
from tilefold.algebra.fold import Fold
from tilefold.errors import NotFusibleError


def side_by_side(cascade: Cascade, derive: Callable[[Cascade], Fold]) -> Fold | None:
    """The Fold made of one for each reduction that stands alone and one for all others; None where no two parts are
    apart: what derives one needs a variable of its own (a count), which others may share, or fails where it does not
    in company."""
    parts = _parts(cascade)
    if len(parts) < 2:
        return None
    folds: list[Fold] = []
    for part in parts:
        read = frozenset[str]().union(*(tensors_read(r.body) for r in part))
        given = tuple([x for x in cascade.input_dtypes if x[0] in read])
        try:
            fold = derive(Cascade(cascade.axes, part, given))
        except NotFusibleError:
            return None
        own = {r.name for r in part}
        if any(v.name not in own for v in fold.state):
            return None
        folds.append(fold)
    state = {v.name: v for f in folds for v in f.state}
    finish = dict(e for f in folds for e in f.finish)
    results = [n for r in cascade.reductions for n in (r.name, r.index_name) if n is not None]
    return replace(
        folds[0],
        state=tuple([state[r.name] for r in cascade.reductions if r.name in state]),
        finish=tuple([(n, finish[n]) for n in results if n in finish]),
        derivation=tuple(dict.fromkeys(s for f in folds for s in f.derivation)),
        checks=tuple(dict.fromkeys(c for f in folds for c in f.checks)),
    )


def _parts(cascade: Cascade) -> list[tuple[Reduction, ...]]:
    """Each reduction that reads no result and whose results none reads, and all others together."""
    results = {n for r in cascade.reductions for n in (r.name, r.index_name) if n is not None}
    used = {t for r in cascade.reductions for t in tensors_read(r.body) & results}
    alone = [
        r
        for r in cascade.reductions
        if r.name not in used and r.index_name not in used and results.isdisjoint(tensors_read(r.body))
    ]
    names = {r.name for r in alone}
    others = tuple(r for r in cascade.reductions if r.name not in names)
    return [*((r,) for r in alone), *((others,) if others else ())]
