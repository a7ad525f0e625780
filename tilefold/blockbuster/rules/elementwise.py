"""Rule 9: composition of elementwise operators (Blockbuster, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Expr, substitute
from tilefold.blockbuster.edit import consumers
from tilefold.blockbuster.ir import Func, Graph, arg
from tilefold.blockbuster.ops import ELEMENTWISE
from tilefold.blockbuster.rules.law import Law, Match, Refusal


@dataclass(frozen=True, slots=True)
class FuseElementwise(Law):
    """Rule 9. g(f(x)) is one scalar function of x."""

    name = "fuse consecutive elementwise"
    number = 9
    statement = "elementwise(g) after elementwise(f) is elementwise(g after f)"
    condition = "the first has no other use"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        used = consumers(g)
        for at, n in enumerate(g.nodes):
            if not isinstance(n, Func) or n.op != ELEMENTWISE:
                continue
            next_ones = [k for k in used[n.out] if k >= 0 and _elementwise(g, k)]
            if not next_ones:
                continue
            if len(used[n.out]) > 1:
                yield Refusal(self, g, (at, next_ones[0]), f"{n.out} has other uses")
                continue
            yield Match(self, g, (at, next_ones[0]), f"{n.out} into {g.nodes[next_ones[0]].outs[0]}")

    def apply(self, m: Match) -> Graph:
        g, (a, b) = m.graph, m.nodes
        first, second = g.nodes[a], g.nodes[b]
        assert isinstance(first, Func) and isinstance(second, Func) and first.expr is not None
        assert second.expr is not None
        args = list[str]()
        inner = _over(first.expr, first.args, args, {})
        outer = _over(second.expr, second.args, args, {first.out: inner})
        fused = Func(second.out, ELEMENTWISE, tuple(args), outer)
        return replace(g, nodes=tuple(fused if k == b else n for k, n in enumerate(g.nodes) if k != a))


def _elementwise(g: Graph, k: int) -> bool:
    n = g.nodes[k]
    return isinstance(n, Func) and n.op == ELEMENTWISE


def _over(e: Expr, names: tuple[str, ...], args: list[str], values: dict[str, Expr]) -> Expr:
    """The expression over a growing list of arguments, some of them replaced by expressions."""
    table: dict[Expr, Expr] = {}
    for k, v in enumerate(names):
        if v in values:
            table[arg(k)] = values[v]
            continue
        if v not in args:
            args.append(v)
        table[arg(k)] = arg(args.index(v))
    return substitute(e, table)
