"""What is known about the values of a block program: which are upper bounds of which, which are at most 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilefold.algebra.expr import Call, Const, Expr, Load
from tilefold.blockbuster.ir import Func, Graph, In, Map, Node, Reduce
from tilefold.blockbuster.ops import ELEMENTWISE
from tilefold.blockbuster.pairs import nonpositive


@dataclass(slots=True)
class Facts:
    """By value of one graph. An item and the list that it is an entry of have the same key.

    `above`: keys that a value is a row-wise upper bound of; `below`: the same of its negative.
    """

    key: dict[str, object] = field(default_factory=dict)
    above: dict[str, frozenset[object]] = field(default_factory=dict)
    below: dict[str, frozenset[object]] = field(default_factory=dict)
    nonpositive: set[str] = field(default_factory=set)

    def name(self, v: str) -> object:
        """The key of a value, its own if nothing else is known."""
        return self.key.setdefault(v, object())

    def inside(self, ins: tuple[In, ...]) -> Facts:
        """The facts about a map's operands in its body."""
        inner = Facts()
        for i in ins:
            inner.copy(i.name, self, i.value)
        return inner

    def copy(self, v: str, other: Facts, w: str) -> None:
        """All that is known about a value `w` holds for `v`."""
        self.key[v] = other.name(w)
        self.above[v] = other.above.get(w, frozenset())
        self.below[v] = other.below.get(w, frozenset())
        if w in other.nonpositive:
            self.nonpositive.add(v)

    def bounded(self, e: Expr, args: Mapping[str, str]) -> bool:
        """Whether an elementwise expression is at most 0; `args`: argument name -> value."""
        match e:
            case Load(a, ()):
                return args.get(a) in self.nonpositive
            case Call("sub", (Load(a, ()), b)):
                top = _unguarded(b)
                return isinstance(top, Load) and self.is_above(args.get(top.tensor), args.get(a))
            case Call("add", (Load(a, ()), Load(b, ()))):
                return self.name(args.get(a, "")) in self.below.get(args.get(b, ""), frozenset())
        return False

    def is_above(self, big: str | None, small: str | None) -> bool:
        if big is None or small is None:
            return False
        return big == small or self.name(small) in self.above.get(big, frozenset())

    # -- learning -------------------------------------------------------------------------

    def learn(self, n: Node) -> None:
        """Note what a node tells about its results (of maps: `leave`)."""
        match n:
            case Func(out, ("row_max" | "block_max"), (a,)):
                self.above[out] = frozenset({self.name(a)})
            case Func(out, "row_shift", (a, c)):
                if self.name(a) in self.below.get(c, frozenset()):
                    self.nonpositive.add(out)
            case Func(out, op, args, expr) if op == ELEMENTWISE and expr is not None:
                self.learn_expression(out, args, expr)
            case Reduce(out, "max", a, _):
                self.above[out] = self.above.get(a, frozenset()) | {self.name(a)}

    def learn_expression(self, out: str, args: tuple[str, ...], e: Expr) -> None:
        names = {f"a{k}": v for k, v in enumerate(args)}
        negated = isinstance(e, Call) and e.op == "neg"
        top = _unguarded(e.args[0] if isinstance(e, Call) and negated else e)
        if isinstance(top, Load) and top.tensor in names:
            # a maximum of nothing, -inf, may be replaced by anything larger
            above = self.above.get(names[top.tensor], frozenset()) | {self.name(names[top.tensor])}
            if negated:
                self.below[out] = above
            else:
                self.above[out] = above
        if nonpositive(e) or self.bounded(e, names):
            self.nonpositive.add(out)

    def leave(self, n: Map, inner: Facts) -> None:
        """Facts about the results of a map from those about its body's."""
        for o, v in n.pairs:
            if o.reduce is None:
                self.copy(o.name, inner, v)
            elif o.reduce == "max":
                self.above[o.name] = inner.above.get(v, frozenset()) | {inner.name(v)}


def facts_of(g: Graph, facts: Facts | None = None) -> Facts:
    """The facts about a graph."""
    facts = facts or Facts()
    for n in g.nodes:
        if isinstance(n, Map):
            facts.leave(n, facts_of(n.body, facts.inside(n.ins)))
        else:
            facts.learn(n)
    return facts


def _unguarded(e: Expr) -> Expr:
    match e:
        case Call("where", (Call("eq", (z, Const(v, _))), _, w)) if z == w and v == float("-inf"):
            return z
    return e
