"""The rewriting behind `blockbuster.safety`: one graph at a time, values as significands and exponents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tilefold.algebra.expr import Expr, Load, call, lit, loads, substitute
from tilefold.blockbuster.builder import GraphBuilder
from tilefold.blockbuster.edit import consumers, rename
from tilefold.blockbuster.facts import Facts
from tilefold.blockbuster.ir import Func, Graph, In, Map, Node, Out, Param, Reduce, Type, arg
from tilefold.blockbuster.ops import ELEMENTWISE
from tilefold.blockbuster.pairs import Pair, guarded, linear_expr, nonpositive, pair_of, plain
from tilefold.blockbuster.verify import infer
from tilefold.names import fresh

Granularity = Literal["element", "row", "block"]
#: Functions of blocks whose first (or both) operands may be significands: exponents just add.
_PRODUCTS = ("mul", "row_scale", "col_scale", "outer", "dot")
_SUMS = {"add": "add", "row_shift": "add", "col_shift": "add"}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one way to share exponents, for a block of r x c: numbers kept, operations, and whether rows can underflow."""

    numbers: int
    operations: int
    loses: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A granularity, and what each would cost."""

    granularity: Granularity
    costs: Mapping[Granularity, Cost]


def choose(rank: int, along_rows: bool, r: int = 64, c: int = 64) -> Choice:
    """The cheapest way to share exponents that loses nothing.

    rank: axes of the item. along_rows: every use sums or maximises whole rows, which loses what is
    far below the row's maximum anyhow. r, c: extents of a block, for the costs.
    """
    costs: dict[Granularity, Cost] = {
        "block": Cost(1, r * c, loses=rank > 1 or not along_rows),
        "row": Cost(r, r * c, loses=not along_rows or rank < 2),
        # every sum of a row finds the maximum and rescales each element itself
        "element": Cost(r * c, 2 * r * c if along_rows else 0, loses=False),
    }
    fair = [g for g, cost in costs.items() if not cost.loses]
    return Choice(min(fair, key=lambda g: (costs[g].numbers + costs[g].operations, costs[g].numbers)), costs)


@dataclass(frozen=True, slots=True)
class Rep:
    """How a value of the old graph is had in the new one: a significand, and exponents (values -> coefficient)."""

    sig: str
    exponent: Mapping[str, float]


class SafeGraph:
    """One graph being rewritten.

    `reps`: how its inputs come, `extra`: inputs added for their exponents, `around`: dims of maps
    around it, `rows`: outputs of which only whole rows are summed outside.
    """

    def __init__(
        self,
        g: Graph,
        facts: Facts,
        granularity: Granularity | None,
        *,
        reps: Mapping[str, Rep] | None = None,
        extra: tuple[Param, ...] = (),
        around: tuple[str, ...] = (),
        rows: frozenset[str] = frozenset(),
    ):
        self.old, self.granularity, self.around, self.rows = g, granularity, around, rows
        self.params = [*g.inputs, *extra]
        self.nodes: list[Node] = []
        self.taken = {*g.values, *(p.name for p in extra)}
        self.reps = {p.name: Rep(p.name, {}) for p in g.inputs} | dict(reps or {})
        self.facts, self.used = facts, consumers(g)
        self.types = infer(g, around)

    def run(self) -> None:
        for n in self.old.nodes:
            self.node(n)

    def type(self, v: str) -> Type:
        return infer(Graph(tuple(self.params), tuple(self.nodes), ()), self.around)[v]

    def fresh(self, base: str) -> str:
        return fresh(base, self.taken)

    def add(self, n: Node) -> None:
        self.nodes.append(n)
        if not isinstance(n, Map):
            self.facts.learn(n)

    def func(self, op: str, *args: str, expr: Expr | None = None, out: str | None = None) -> str:
        out = out or self.fresh("x")
        self.add(Func(out, op, args, expr))
        return out

    def node(self, n: Node) -> None:
        match n:
            case Map():
                self.map(n)
            case Func(op=op) if op == ELEMENTWISE:
                self.elementwise(n)
            case Func():
                self.function(n)
            case Reduce():
                self.reduce(n)
            case _:
                plain_args = {v: self.number(v) for v in n.uses}
                self.add(rename(n, plain_args))
                self.reps |= {v: Rep(v, {}) for v in n.outs}

    # -- numbers --------------------------------------------------------------------------

    def number(self, v: str) -> str:
        """The value itself, computed from its pair at every position of its lists."""
        rep = self.reps[v]
        if not rep.exponent:
            return rep.sig
        names = [rep.sig, *rep.exponent]
        pair = Pair(arg(0), {arg(k + 1): c for k, c in enumerate(rep.exponent.values())})
        made = self.over_lists(self.types[v].lists, names, plain(pair), f"{v}_number")
        self.reps[v] = Rep(made, {})
        return made

    def over_lists(self, dims: tuple[str, ...], names: list[str], e: Expr, out: str) -> str:
        b = GraphBuilder()
        b.taken, b.types = self.taken, {v: self.type(v) for v in names}
        (made,) = b.map(dims, names, lambda inner, xs: [inner.elementwise(e, *xs, out=out)], [out])
        for n in b.nodes:
            self.add(n)
        return made

    # -- items ----------------------------------------------------------------------------

    def elementwise(self, n: Func) -> None:
        assert n.expr is not None
        args: list[str] = []

        def load(v: str) -> Expr:
            if v not in args:
                args.append(v)
            return arg(args.index(v))

        reps = {f"a{k}": self.reps[v] for k, v in enumerate(n.args)}
        table = {t: Pair(load(r.sig), {load(z): c for z, c in r.exponent.items()}) for t, r in reps.items()}
        e = substitute(n.expr, {Load(t, ()): Load(f"{t}!", ()) for t in reps})
        names = {f"a{k}": v for k, v in enumerate(args)}

        def known(ld: Load) -> Pair | None:
            return table.get(ld.tensor.removesuffix("!")) if ld.tensor.endswith("!") else None

        p = pair_of(e, known, lambda y: self.facts.bounded(y, names))
        if not p.exponent or nonpositive(linear_expr(p.exponent)):
            self.func(ELEMENTWISE, *args, expr=plain(p), out=n.out)
            self.reps[n.out] = Rep(n.out, {})
            return
        self.share(n, p, args)

    def share(self, n: Func, p: Pair, args: list[str]) -> None:
        """A pair whose exponents may be different in every element: share them as far as nothing is lost."""
        item = self.types[n.out].item
        names: dict[Expr, str] = {arg(k): v for k, v in enumerate(args)}
        exponents = {z for v in n.args for z in self.reps[v].exponent}
        if all(names.get(a) in exponents for a in p.exponent):
            self.compact(p.sig, args, n.out, shape=args[0])
            self.reps[n.out] = Rep(n.out, {names[a]: c for a, c in p.exponent.items()})
            return
        y = self.aligned(self.exponent_value(linear_expr(p.exponent), args, n.out), item)
        kind = self.granularity or choose(len(item), whole_rows(self.old, n.out, self.rows)).granularity
        if kind == "element" or not self.type(y).item or (kind == "row" and len(self.type(y).item) < 2):
            self.compact(p.sig, [*args, y], n.out, shape=y)
            self.reps[n.out] = Rep(n.out, {y: 1.0})
            return
        z = self.func("row_max" if kind == "row" else "block_max", y, out=self.fresh(f"{n.out}_max"))
        ay, az = arg(len(args)), arg(len(args) + 1)
        scale = call("exp", ay - guarded(az))
        sig = scale if p.sig == lit(1.0) else p.sig * scale
        self.compact(sig, [*args, y, z], n.out)
        self.reps[n.out] = Rep(n.out, {z: 1.0})

    def exponent_value(self, e: Expr, args: list[str], out: str) -> str:
        """An exponent with the axes of its own operands, as a value."""
        if e in [arg(k) for k in range(len(args))]:
            return args[int(loads(e)[0].tensor.removeprefix("a"))]
        name = self.fresh(f"{out}_exponent")
        self.compact(e, args, name)
        return name

    def compact(self, e: Expr, values: list[str], out: str, shape: str = "") -> None:
        """An elementwise function of those values that it uses; with the axes of `shape` (whose NaNs it keeps)."""
        used = [v for k, v in enumerate(values) if arg(k) in loads(e)]
        if shape and not any(self.type(v).item == self.type(shape).item for v in used):
            like = arg(values.index(shape))
            e = call("where", call("isnan", like), like, e)
            used.append(shape)
        table: dict[Expr, Expr] = {arg(k): arg(used.index(v)) for k, v in enumerate(values) if v in used}
        self.func(ELEMENTWISE, *used, expr=substitute(e, table), out=out)

    def to_rows(self, v: str) -> Rep:
        """The pair of a value with one exponent a row, where it has one an element."""
        rep = self.reps[v]
        column = self.types[v].item[-1]
        if not any(column in self.type(z).item for z in rep.exponent):
            return rep
        y = self.aligned(self.combined(rep), self.types[v].item)
        z = self.func("row_max", y, out=self.fresh(f"{v}_max"))
        sig = self.fresh(f"{v}_row")
        self.func(ELEMENTWISE, rep.sig, y, z, expr=arg(0) * call("exp", arg(1) - guarded(arg(2))), out=sig)
        return Rep(sig, {z: 1.0})

    def aligned(self, y: str, item: tuple[str, ...]) -> str:
        """An exponent with its axes in the order of the item that it belongs to."""
        have = self.type(y).item
        return y if have == tuple(d for d in item if d in have) else self.func("transpose", y)

    def combined(self, rep: Rep) -> str:
        """One value for the whole exponent of an item."""
        if list(rep.exponent.values()) == [1.0]:
            return next(iter(rep.exponent))
        e = linear_expr({arg(k): c for k, c in enumerate(rep.exponent.values())})
        return self.func(ELEMENTWISE, *rep.exponent, expr=e, out=self.fresh("exponent"))

    def function(self, n: Func) -> None:
        reps = [self.reps[a] for a in n.args]
        if not any(r.exponent for r in reps):
            self.add(replace(n, args=tuple(r.sig for r in reps)))
            self.reps[n.out] = Rep(n.out, {})
            return
        if n.op in _SUMS:
            self.elementwise(Func(n.out, ELEMENTWISE, n.args, call(_SUMS[n.op], arg(0), arg(1))))
            return
        if n.op in ("dot", "row_sum", "row_max", "row_min"):
            reps = [self.to_rows(a) for a in n.args]
        elif n.op not in _PRODUCTS and n.op != "transpose":
            reps = [Rep(self.number(a), {}) for a in n.args]
        self.func(n.op, *(r.sig for r in reps), out=n.out)
        exponent: dict[str, float] = {}
        for r in reps:
            for z, c in r.exponent.items():
                exponent[z] = exponent.get(z, 0.0) + c
        self.reps[n.out] = Rep(n.out, {z: c for z, c in exponent.items() if c})

    def reduce(self, n: Reduce) -> None:
        rep = self.reps[n.arg]
        if n.op == "prod":
            rep = Rep(self.number(n.arg), {})
        if not any(n.dim in self.type(z).lists for z in rep.exponent):
            self.add(replace(n, arg=rep.sig))
            self.reps[n.out] = Rep(n.out, rep.exponent)
            return
        if list(rep.exponent.values()) == [1.0]:
            z = next(iter(rep.exponent))
        else:
            e = linear_expr({arg(k): c for k, c in enumerate(rep.exponent.values())})
            z = self.over_lists((n.dim,), list(rep.exponent), e, self.fresh("exponent"))
        top = self.fresh(f"{n.out}_max")
        self.add(Reduce(top, "max", z, n.dim))
        scaled = arg(0) * call("exp", arg(1) - guarded(arg(2)))
        moved = self.over_lists((n.dim,), [rep.sig, z, top], scaled, self.fresh(f"{n.arg}_moved"))
        self.add(replace(n, arg=moved))
        self.reps[n.out] = Rep(n.out, {top: 1.0})

    # -- maps -----------------------------------------------------------------------------

    def map(self, n: Map) -> None:
        ins: list[In] = []
        extra: list[Param] = []
        reps: dict[str, Rep] = {}
        taken = set(n.body.values)
        brought: dict[tuple[str, bool], str] = {}
        for i in n.ins:
            rep = self.reps[i.value]
            ins.append(In(rep.sig, i.name, i.each))
            inside: dict[str, float] = {}
            for z, c in rep.exponent.items():
                t = self.type(z)
                each = i.each and n.dim in t.lists
                if (z, each) not in brought:
                    brought[z, each] = fresh(z, taken)
                    extra.append(Param(brought[z, each], t.at(n.dim) if each else t))
                inside[brought[z, each]] = c
            reps[i.name] = Rep(i.name, inside)
        ins += [In(z, name, each) for (z, each), name in brought.items()]
        rows = frozenset(
            v for o, v in n.pairs if (o.reduce is None and whole_rows(self.old, o.name, self.rows)) or o.reduce
        )
        inner = SafeGraph(
            n.body,
            self.facts.inside(tuple(ins)),
            self.granularity,
            reps=reps,
            extra=tuple(extra),
            around=(*self.around, n.dim),
            rows=rows,
        )
        inner.run()
        outs = _Outs(self, n, inner, {name: key for key, name in brought.items()})
        for o, v in n.pairs:
            outs.add(o, v)
        body = Graph(tuple(inner.params), tuple(inner.nodes), tuple(v for _, v in outs.pairs))
        new = replace(n, ins=tuple(ins), body=body, results=tuple(o for o, _ in outs.pairs))
        self.nodes.append(new)
        self.facts.leave(new, inner.facts)


class _Outs:
    """The results of a map whose body has been rewritten."""

    def __init__(self, outer: SafeGraph, n: Map, inner: SafeGraph, brought: Mapping[str, tuple[str, bool]]):
        self.outer, self.n, self.inner, self.brought = outer, n, inner, brought
        self.pairs: list[tuple[Out, str]] = []
        self.exponents: dict[tuple[str, str | None], str] = {}

    def add(self, o: Out, v: str) -> None:
        if o.reduce not in (None, "sum"):
            v = self.inner.number(v)
            rep = Rep(v, {})
        else:
            rep = self.inner.reps[v]
        if o.reduce is None:
            exponent = {self.listed(z): c for z, c in rep.exponent.items()}
            self.pairs.append((o, rep.sig))
            self.outer.reps[o.name] = Rep(o.name, exponent)
            return
        if all(z in self.brought and not self.brought[z][1] for z in rep.exponent):
            self.pairs.append((o, rep.sig))
            self.outer.reps[o.name] = Rep(o.name, {self.brought[z][0]: c for z, c in rep.exponent.items()})
            return
        z = self.running(self.inner.combined(rep))
        self.pairs.append((replace(o, exponent=z), rep.sig))
        self.outer.reps[o.name] = Rep(o.name, {z: 1.0})

    def listed(self, z: str) -> str:
        """The exponents of all iterations, outside."""
        if z in self.brought:
            return self.brought[z][0]
        if (z, None) not in self.exponents:
            self.exponents[z, None] = self.outer.fresh(z)
            self.pairs.append((Out(self.exponents[z, None]), z))
        return self.exponents[z, None]

    def running(self, z: str) -> str:
        """The maximum of the exponents of all iterations."""
        if (z, "max") not in self.exponents:
            self.exponents[z, "max"] = self.outer.fresh(z)
            self.pairs.append((Out(self.exponents[z, "max"], "max"), z))
        return self.exponents[z, "max"]


def whole_rows(g: Graph, v: str, rows: frozenset[str]) -> bool:
    """Whether all that becomes of a value is sums and maxima of its rows. `rows`: outputs of which that is known."""
    if v in g.outputs and v not in rows:
        return False
    for n in g.nodes:
        if v not in n.uses:
            continue
        match n:
            case Func(op="row_sum" | "row_max" | "row_min" | "dot"):
                continue
            case Func(op="row_scale" | "col_scale", args=(_, c)) if c == v:
                return False
            case Func(op="mul" | "row_scale" | "col_scale") | Reduce():
                if not whole_rows(g, n.outs[0], rows):
                    return False
            case Map():
                fine = frozenset(w for o, w in n.pairs if o.reduce or whole_rows(g, o.name, rows))
                if not all(whole_rows(n.body, i.name, fine) for i in n.ins if i.value == v):
                    return False
            case _:
                return False
    return True
