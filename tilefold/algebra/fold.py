"""The Fold: a commutative monoid that computes a whole cascade in one pass.

The state is a tuple of variables in dependency order. All schedules are instances of one
step, the *update*: with D the state before and D' the state after,

    var' = repair(var, D, D') (+) R over the tile of element(x, D')        (RedFuser eq. 16, Neptune eq. 7)

evaluated variable by variable, because D' of a variable only involves earlier ones. From it:

    lift(tile)  = update(identity, tile)
    merge(a, b) = for each var: repair(a.var, a.D, D') (+) repair(b.var, b.D, D')     (RedFuser eq. 11)
    finish      = the cascade's results from the final state

In expressions, `Load("t")` is the variable itself, `Load("m@old")` and `Load("m@new")` an
earlier variable in D and D'. State loads are indexed by the variable's dims as plain indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr

OLD, NEW = "@old", "@new"


@dataclass(frozen=True, slots=True)
class StateVar:
    """One component of the state.

    `reducer`: how elements, and repaired parts, combine: a value reducer, or argmax / argmin /
    topk, which carry `index_name` beside the value (topk: `dims` ends with the slot dim).
    `element`: contribution of one element, over inputs and `@new` loads of earlier variables.
    `repair`: this variable moved from D to D', over itself and `@old` / `@new` loads; None where
    it needs none. Guards for non-invertible H (RedFuser A.1) are inside the expressions.
    """

    name: str
    reducer: str
    dims: tuple[str, ...]
    dtype: DType
    identity: Const
    element: Expr
    repair: Expr | None = None
    index_name: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a derivation: a law (named as in the papers) and what it gave."""

    law: str
    text: str
    latex: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One proof obligation or numerical check. `method`: "symbolic", "facts", "z3" or "numeric"."""

    name: str
    method: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """See the module. `finish` gives every reduction (and topk/arg index) of the cascade by name.

    `derivation` and `checks` are for people: `explain` and `derive` print them.
    """

    axes: tuple[str, ...]
    state: tuple[StateVar, ...]
    finish: tuple[tuple[str, Expr], ...]
    derivation: tuple[Step, ...] = field(default=(), compare=False)
    checks: tuple[Check, ...] = field(default=(), compare=False)

    def var(self, name: str) -> StateVar:
        """The state variable of that name; KeyError if there is none."""
        for v in self.state:
            if v.name == name:
                return v
        raise KeyError(name)
