"""Numerical safety (Blockbuster, appendix): exponentials become significand-exponent pairs, after fusion.

A value that comes from an exponential of something without a known upper bound is carried as a
significand and an exponent (`graph.pairs`), until the exponents cancel (a softmax divides by its sum)
or the number itself is wanted as a result. Exponents are shared:

    granularity   exponent of a block            cost (r x c)             precision
    element       one an element                 r c more numbers         nothing is lost
    row           one a row, its maximum         r numbers, r c maxima    what a sum of the row would lose too
    block         one a block, its maximum       1 number, r c maxima     rows far below the others underflow

A sum of pairs over a loop keeps the running maximum of the exponents beside it: the Fold over
(maximum, sum) that `algebra` derives for the same cascade.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilefold.algebra.expr import Call, Expr, walk
from tilefold.blockbuster.edit import prune, rename
from tilefold.blockbuster.facts import Facts
from tilefold.blockbuster.ir import Func, Graph, Map, Program
from tilefold.blockbuster.ir import walk as walk_nodes
from tilefold.blockbuster.pairs import has_exp, nonpositive
from tilefold.blockbuster.safe import Granularity, SafeGraph
from tilefold.blockbuster.verify import verify
from tilefold.errors import NotFusibleError
from tilefold.names import fresh


def make_safe(p: Program, granularity: Granularity | None = None) -> Program:
    """The same program without an exponential that can overflow where its result does not.

    granularity: of all shared exponents; None chooses for each (`graph.safe.choose`). NotFusibleError:
    an exponential is left that cannot be made safe.
    """
    if not any(isinstance(n, Func) and n.expr is not None and has_exp(n.expr) for n in walk_nodes(p.graph)):
        return p
    top = SafeGraph(p.graph, Facts(), granularity)
    top.run()
    outputs = [top.number(v) for v in p.graph.outputs]
    graph = prune(Graph(p.graph.inputs, tuple(top.nodes), tuple(outputs)))
    safe = verify(replace(p, graph=_renamed(graph, p.graph.outputs)))
    if left := unsafe(safe):
        raise NotFusibleError(f"the exponential in {left[0]} can overflow, and no exponent to take out was found")
    return safe


def unsafe(p: Program) -> tuple[str, ...]:
    """Exponentials whose argument has no known upper bound; those that only undo an exponent do not count."""
    return tuple(_unsafe(p.graph, Facts()))


def _unsafe(g: Graph, facts: Facts) -> Iterable[str]:
    for n in g.nodes:
        if isinstance(n, Map):
            inner = facts.inside(n.ins)
            yield from _unsafe(n.body, inner)
            facts.leave(n, inner)
            continue
        if isinstance(n, Func) and n.expr is not None:
            names = {f"a{k}": v for k, v in enumerate(n.args)}
            for e in walk(n.expr):
                if isinstance(e, Call) and e.op in ("exp", "exp2", "expm1"):
                    y = e.args[0]
                    if not (nonpositive(y) or facts.bounded(y, names) or _undoing(n.expr, e)):
                        yield n.out
        facts.learn(n)


def _undoing(whole: Expr, e: Call) -> bool:
    """s * exp(t/2) * exp(t/2): the number of a pair, which overflows only where it must."""
    for n in walk(whole):
        match n:
            case Call("mul", (Call("mul", (_, a)) | a, b)) if a == b == e:
                return True
    return False


def _renamed(g: Graph, outputs: tuple[str, ...]) -> Graph:
    to = {old: new for old, new in zip(g.outputs, outputs, strict=True) if old != new}
    swap = {**{new: fresh(new, set(g.values)) for new in to.values() if new in g.values}, **to}
    return Graph(g.inputs, tuple(rename(n, swap) for n in g.nodes), outputs)
