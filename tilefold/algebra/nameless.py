"""Names taken out: what is decided about expressions holds for all that differ from them in names only.

The layers of a model give the same cascades under other names; their laws are proved once.
"""

from __future__ import annotations

from tilefold.algebra.expr import Expr, Index, Load, Size, Sym, children, rebuild


def numbered(*exprs: Expr) -> tuple[Expr, ...]:
    """The expressions with a number for each distinct load, index, size or symbol: equal where those were equal."""
    table: dict[Expr, Load] = {}

    def one(e: Expr) -> Expr:
        if isinstance(e, Load | Index | Size | Sym):
            return table.setdefault(e, Load(f"%{len(table)}", ()))
        return rebuild(e, tuple(map(one, children(e))))

    return tuple(map(one, exprs))
