"""What is to be planned, for `plan.select`: an operator DAG, which sets of nodes may be kernels, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilefold.plan.dag import Dag

#: Sizes of the search beyond which it stops with an error instead of running for minutes.
MOST_IDEALS = 200_000


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a candidate. `gives`: shape label of each result (by node) that has one; `wants`: of each
    operand from another kernel that it reads best. `what` is the caller's own."""

    seconds: float
    gives: Mapping[int, str] = field(default_factory=dict)
    wants: Mapping[int, str] = field(default_factory=dict)
    what: object = None


@dataclass(frozen=True)
class Problem:
    """`partners[k]`: nodes that may be linked to k in a kernel (symmetric; edges not in it cannot be fused).

    `bound(S)`: a lower bound in seconds of the cost of candidate S, None if S is not legal. `variants(S)`: none
    cheaper than the bound; none at all if S turns out not to be a kernel. `hopeless(S)`: no superset of S is legal
    either. `transfer(node, given, wanted)`: extra seconds to read a tensor with another shape than wanted (not
    negative). `largest`: most nodes of a candidate. `spent()`: no more candidates should be priced than are needed to
    finish: from then on one without a price is taken to cost as much above its bound as the priced ones do on average.
    `most_sets`: sets to look at before smaller kernels have to do. `most_ideals`: beyond which the program is
    too large.
    """

    dag: Dag
    partners: tuple[int, ...]
    bound: Callable[[int], float | None]
    variants: Callable[[int], Sequence[Variant]]
    hopeless: Callable[[int], bool] = lambda s: False
    transfer: Callable[[int, str, str], float] = lambda node, given, wanted: 0.0
    largest: int = 64
    spent: Callable[[], bool] = lambda: False
    most_sets: int | None = None
    most_ideals: int = MOST_IDEALS
