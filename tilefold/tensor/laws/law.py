"""What a law of tensor programs is: a statement, where it applies, and the rewrite.

A law is an equation between two programs that holds in real arithmetic under a side condition that
`matches` checks. What it changes under rounding is part of the law and said in `rounding`. No law
moves anything through a quantising cast (`DType.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilefold.algebra.expr import Expr
from tilefold.tensor.ir import Program


@dataclass(frozen=True, slots=True)
class Match:
    """One place where a law applies. `at`: names of statements; `what` says it in a line.

    `choice`: what the law needs to know beyond the names (an expression, a dim).
    """

    law: str
    at: tuple[str, ...]
    what: str
    choice: tuple[Expr | str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Law:
    """`statement` is the equation, `rounding` what changes in floating point, `source` where it is from."""

    name: str
    statement: str
    rounding: str
    source: str
    matches: Callable[[Program], tuple[Match, ...]]
    apply: Callable[[Program, Match], Program]
