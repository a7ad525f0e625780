"""Listings of block programs, as Blockbuster prints them.

    program softmax(n)
    dim m = 64
    dim n = n
    input X[m, n] of (m, n) in (m, n): f32
    output Y[m, n] in (m, n): f32
    forall m in range(M):
        for n in range(N):
            t1 = load(X[m,n])
            t2 = exp(t1)
            t3 += row_sum(t2)
            store(t2,I1[m,n])
        t4 = 1.0 / t3
        forall n in range(N):
            t5 = load(I1[m,n])
            t6 = row_scale(t5,t4)
            store(t6,Y[m,n])

Lower-case values are in local memory, upper-case ones in global memory; a map is `forall`, or
`for` if it carries reductions; a reduction starts from its operation's neutral element
(`+=`, `*=`, `max=`, `min=`), and `s += pair(x,z)` adds x * exp(z) to a significand whose exponent
is the running max of z. `load(X[0])`, `range(1,M)`: an iteration was peeled off.
`blockbuster.parse` reads listings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Load, substitute
from tilefold.blockbuster.edit import consumers
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, Map, Misc, Node, Out, Program, Reduce, Type, View, arg
from tilefold.blockbuster.verify import infer
from tilefold.tensor.text import show_compute

INDENT = "    "
#: Statement that accumulates a reduction.
ACCUMULATE = {"sum": "+=", "prod": "*=", "max": "max=", "min": "min="}


def show(p: Program) -> str:
    """The whole program: declarations, then the listing."""
    types = infer(p.graph)
    lines = [f"program {p.name}({', '.join(p.syms)})"]
    lines += [f"dim {d} = {expr_text.show(e)}" for d, e in p.sizes.items()]
    for i in p.graph.inputs:
        a = p.arrays[i.name]
        if i.type.raw:
            lines.append(f"input {i.name} raw [{', '.join(map(expr_text.show, a.shape))}]: {a.dtype.value}")
        else:
            lines.append(f"input {i.name}{_type(i.type)} in ({', '.join(a.axes)}): {a.dtype.value}")
    for v in p.graph.outputs:
        a, t = p.arrays[v], types[v]
        lines.append(f"output {v}[{', '.join(t.lists)}] in ({', '.join(a.axes)}): {a.dtype.value}")
    return "\n".join([*lines, *lines_of(p)]) + "\n"


def lines_of(p: Program) -> list[str]:
    """The listing without declarations."""
    printer = _Printer(p)
    printer.graph(p.graph, printer.top(), (), 0)
    return printer.lines


def _type(t: Type) -> str:
    return f"[{', '.join(t.lists)}] of ({', '.join(t.item)})"


@dataclass(frozen=True, slots=True)
class _Local:
    """A value in local memory."""

    name: str


@dataclass(frozen=True, slots=True)
class _Memory:
    """A list in global memory: its name there, and an index (a loop or "0") for every dim."""

    name: str
    index: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.index)}]"

    def first(self, dim: str) -> _Memory:
        return replace(self, index=tuple("0" if d == dim else d for d in self.index))


_Ref = _Local | _Memory


class _Printer:
    def __init__(self, p: Program):
        self.p, self.lines = p, list[str]()
        self.locals, self.buffers = 0, 0
        self.taken = {*p.arrays, *p.sizes, *p.syms}

    def top(self) -> dict[str, _Ref]:
        """Where the inputs and outputs of the program are."""
        types = infer(self.p.graph)
        return {v: _Memory(v, types[v].lists) for v in self.p.arrays if v in types}

    def say(self, depth: int, text: str) -> None:
        self.lines.append(INDENT * depth + text)

    def local(self) -> _Local:
        while True:
            self.locals += 1
            if f"t{self.locals}" not in self.taken:
                return _Local(f"t{self.locals}")

    def buffer(self, loops: tuple[str, ...], t: Type) -> _Memory:
        while True:
            self.buffers += 1
            if f"I{self.buffers}" not in self.taken:
                return _Memory(f"I{self.buffers}", (*loops, *t.lists))

    def graph(self, g: Graph, at: dict[str, _Ref], loops: tuple[str, ...], depth: int) -> None:
        """Print the nodes of a graph. `at`: where its inputs are and where its outputs go."""
        scope = _Scope(self, g, at, loops, depth)
        scope.place_lists()
        for p in g.inputs:
            scope.store(p.name)
        for n in g.nodes:
            scope.node(n)


class _Scope:
    """One graph being printed: `at` says where values are, `sinks` what has to happen to them."""

    def __init__(self, pr: _Printer, g: Graph, at: dict[str, _Ref], loops: tuple[str, ...], depth: int):
        self.pr, self.g, self.loops, self.depth = pr, g, loops, depth
        self.types = infer(g, loops)
        self.at, self.used = dict(at), consumers(g)
        self.loaded: dict[str, _Local] = {}
        self.sinks: dict[str, list[str]] = {}

    def place_lists(self) -> None:
        """Lists that are put together from two parts are stored in one place."""
        for n in self.g.nodes:
            if isinstance(n, Cons):
                self.place_cons(n)

    def say(self, text: str) -> None:
        self.pr.say(self.depth, text)

    def memory(self, v: str) -> _Memory:
        """The place of a list in global memory."""
        ref = self.at.get(v)
        if ref is None:
            ref = self.at[v] = self.pr.buffer(self.loops, self.types[v])
        assert isinstance(ref, _Memory), v
        return ref

    def place_cons(self, n: Cons) -> None:
        whole = self.memory(n.out)
        self.at[n.rest] = whole
        if self.types[n.first].lists:
            self.at[n.first] = whole.first(n.dim)
        else:
            self.sinks.setdefault(n.first, []).append(str(whole.first(n.dim)))

    def local(self, v: str) -> str:
        """The local variable of an item, loaded now if it is still in global memory."""
        ref = self.at[v]
        if isinstance(ref, _Local):
            return ref.name
        if v not in self.loaded:
            self.loaded[v] = self.pr.local()
            self.say(f"{self.loaded[v].name} = load({ref})")
        return self.loaded[v].name

    def store(self, v: str) -> None:
        """Send an item where it is wanted."""
        for place in self.sinks.get(v, ()):
            self.say(f"store({self.local(v)},{place})")

    def define(self, v: str, text: str) -> None:
        """An item computed here: an output item of the program goes to memory at once."""
        place = self.at.get(v)
        self.at[v] = self.pr.local()
        self.say(f"{self.local(v)} = {text}")
        if isinstance(place, _Memory):
            self.say(f"store({self.local(v)},{place})")
        self.store(v)

    def node(self, n: Node) -> None:
        match n:
            case Func():
                self.define(n.out, self.func(n))
            case Reduce(out, op, a, dim):
                self.reduce(out, op, a, dim)
            case Head(out, a, dim):
                self.at[out] = self.memory(a).first(dim)
                self.store(out)
            case Cons():
                pass
            case View(out, a, index, t):
                self.at[out] = self.pr.buffer((), t)
                at = ", ".join(map(expr_text.show, index))
                self.say(f"view {self.memory(out).name}{_type(t)} = {self.memory(a).name}[{at}]")
            case Misc():
                self.misc(n)
            case Map():
                _Loop(self, n).show()

    def func(self, n: Func) -> str:
        names = [self.local(a) for a in n.args]
        if n.expr is None:
            return f"{n.op}({','.join(names)})"
        return expr_text.show(substitute(n.expr, {arg(k): Load(t, ()) for k, t in enumerate(names)}))

    def reduce(self, out: str, op: str, a: str, dim: str) -> None:
        source, total, item = self.memory(a), self.pr.local(), self.pr.local()
        self.say(f"for {dim} in range({dim.upper()}):")
        self.pr.say(self.depth + 1, f"{item.name} = load({source})")
        self.pr.say(self.depth + 1, f"{total.name} {ACCUMULATE[op]} {item.name}")
        self.settle(out, total)

    def settle(self, out: str, total: _Local) -> None:
        """A reduction is complete."""
        place = self.at.get(out)
        self.at[out] = total
        if isinstance(place, _Memory):
            self.say(f"store({total.name},{place})")
        self.store(out)

    def misc(self, n: Misc) -> None:
        outs = ", ".join(f"{self.memory(p.name)} of ({', '.join(p.type.item)})" for p in n.results)
        args = ", ".join(f"{name}={self.memory(a)}" for a, name in zip(n.args, n.names, strict=True))
        self.say(f"misc {outs} = {{{show_compute(n.compute)}}} with {args}")


class _Loop:
    """A map being printed."""

    def __init__(self, scope: _Scope, n: Map):
        self.outer, self.n = scope, n
        self.totals = {o.name: scope.pr.local() for o in n.results if o.reduce}
        self.added: set[str] = set()

    def show(self) -> None:
        outer, n = self.outer, self.n
        for i in n.ins:
            if not outer.types[i.value].buffered:
                outer.local(i.value)
        span = f"range({n.start},{n.dim.upper()})" if n.start else f"range({n.dim.upper()})"
        outer.say(f"{'for' if n.serial else 'forall'} {n.dim} in {span}:")
        at: dict[str, _Ref] = {}
        for i in n.ins:
            held = outer.types[i.value].buffered
            at[i.name] = outer.memory(i.value) if held else _Local(outer.local(i.value))
        inner = _Scope(outer.pr, n.body, at, (*outer.loops, n.dim), outer.depth + 1)
        for o, v in n.pairs:
            if o.reduce is None and inner.types[v].lists:
                inner.at[v] = outer.memory(o.name)
            elif o.reduce is None:
                inner.sinks.setdefault(v, []).append(str(outer.memory(o.name)))
        inner.place_lists()
        self.body(inner)
        for name, total in self.totals.items():
            outer.settle(name, total)

    def body(self, inner: _Scope) -> None:
        pending = {o.name: (o, v) for o, v in self.n.pairs if o.reduce}
        for p in self.n.body.inputs:
            if not p.type.lists:
                inner.store(p.name)
                self.accumulate(inner, p.name)
        for m in self.n.body.nodes:
            if isinstance(m, Func) and self.direct(m, inner):
                (o, v), text = next(x for x in pending.values() if x[1] == m.out), inner.func(m)
                inner.say(self.statement(o, text, inner))
                continue
            inner.node(m)
            for v in m.outs:
                self.accumulate(inner, v)

    def direct(self, m: Func, inner: _Scope) -> bool:
        """Whether the value has no other use than one sum, so that it needs no name."""
        uses = [o for o, v in self.n.pairs if v == m.out]
        if len(uses) != 1 or uses[0].reduce is None or inner.used[m.out] != [-1] or m.out in inner.sinks:
            return False
        z = self.exponent(uses[0])
        return (z is None or z in inner.at) and not any(o.exponent == uses[0].name for o in self.n.results)

    def exponent(self, o: Out) -> str | None:
        """The value in the body that is the exponent of a significand; None where the result is no pair's."""
        return next((v for out, v in self.n.pairs if out.name == o.exponent), None)

    def accumulate(self, inner: _Scope, v: str) -> None:
        """Sums of `v`, and of a significand whose exponent it is: a pair is added when both are there."""
        for o, inside in self.n.pairs:
            needs = {inside, self.exponent(o)} - {None}
            if o.reduce and v in needs and o.name not in self.added and needs <= inner.at.keys():
                self.added.add(o.name)
                inner.say(self.statement(o, inner.local(inside), inner))

    def statement(self, o: Out, text: str, inner: _Scope) -> str:
        z = self.exponent(o)
        if z is not None:
            text = f"pair({text},{inner.local(z)})"
        return f"{self.totals[o.name].name} {ACCUMULATE[str(o.reduce)]} {text}"
