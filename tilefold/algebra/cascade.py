"""A cascade: reductions over shared axes in which later ones use the results of earlier ones.

    d_i = R_i over l of F_i(x[l], d_1 .. d_{i-1})          (RedFuser eq. 1)

Maps between the reductions are already substituted into the bodies, so a body refers to
earlier reductions only through `Load(name, plain indices)`; every other load is an input x.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.errors import SourceLoc


@dataclass(frozen=True, slots=True)
class Reduction:
    """`name[dims] = reducer over Cascade.axes of body`.

    topk: `dims` ends with the slot dim; `index_name` names the index result of topk, and of
    argmax / argmin (whose `name` is then the best value, which the state carries anyway).
    exact: a maximum is one of its elements to the last bit, for it is compared with them.
    """

    name: str
    reducer: str
    dims: tuple[str, ...]
    body: Expr
    dtype: DType
    index_name: str | None = None
    loc: SourceLoc | None = field(default=None, compare=False)
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Cascade:
    """Reductions over the same axes, in dependency order. dtypes of the inputs matter to the proofs. few: elements are
    so few that a thread has them all, and that reading them again is nothing to save digits for."""

    axes: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    input_dtypes: tuple[tuple[str, DType], ...]
    few: bool = False
