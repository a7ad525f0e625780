"""Building block graphs: nested maps around functions of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilefold.algebra.expr import Expr
from tilefold.blockbuster.ir import Func, Graph, In, Map, Misc, Node, Out, Param, Reduce, Type, View
from tilefold.blockbuster.ops import BLOCK_OPS, ELEMENTWISE, union
from tilefold.names import fresh
from tilefold.tensor.ir import Compute

#: Fills the body of a map: gets its builder and the operands inside, returns the results inside.
Body = Callable[["GraphBuilder", list[str]], list[str]]


class GraphBuilder:
    """A graph under construction; every method returns the names of new values."""

    def __init__(self) -> None:
        self.params: list[Param] = []
        self.nodes: list[Node] = []
        self.types: dict[str, Type] = {}
        self.taken: set[str] = set()

    def input(self, name: str, t: Type) -> str:
        name = fresh(name, self.taken)
        self.params.append(Param(name, t))
        self.types[name] = t
        return name

    def func(self, op: str, *args: str, out: str = "x") -> str:
        """A functional operator on items; AssertionError where the shapes do not fit."""
        item = BLOCK_OPS[op].item(*(self.types[a].item for a in args))
        assert item is not None, (op, [self.types[a] for a in args])
        return self._add(Func(fresh(out, self.taken), op, args), Type((), item))

    def elementwise(self, e: Expr, *args: str, out: str = "x") -> str:
        """A scalar function of items, over `arg(0)`, `arg(1)`, ..."""
        item = union(tuple(self.types[a].item for a in args))
        return self._add(Func(fresh(out, self.taken), ELEMENTWISE, args, e), Type((), item))

    def reduce(self, op: str, a: str, dim: str, out: str = "r") -> str:
        return self._add(Reduce(fresh(out, self.taken), op, a, dim), self.types[a].at(dim))

    def view(self, a: str, index: tuple[Expr, ...], t: Type, out: str = "V") -> str:
        return self._add(View(fresh(out, self.taken), a, index, t), t)

    def misc(self, compute: Compute, args: Sequence[str], names: Sequence[str], types: Sequence[Type]) -> list[str]:
        results = tuple(Param(fresh(r, self.taken), t) for r, t in zip(compute.results, types, strict=True))
        self.nodes.append(Misc(results, tuple(args), tuple(names), compute))
        self.types |= {p.name: p.type for p in results}
        return [p.name for p in results]

    def map(self, dims: Sequence[str], args: Sequence[str], body: Body, outs: Sequence[str]) -> list[str]:
        """Nested maps, outermost first; an operand is taken entry by entry where it is a list over the dim."""
        if not dims:
            return body(self, list(args))
        dim = dims[0]
        inner = GraphBuilder()
        ins: list[In] = []
        for a in args:
            t = self.types[a]
            each = dim in t.lists
            ins.append(In(a, inner.input(a, t.at(dim) if each else t), each))
        results = inner.map(dims[1:], [i.name for i in ins], body, outs)
        names = [fresh(o, self.taken) for o in outs]
        graph = Graph(tuple(inner.params), tuple(inner.nodes), tuple(results))
        self.nodes.append(Map(dim, tuple(ins), graph, tuple(Out(n) for n in names)))
        for n, r in zip(names, results, strict=True):
            t = inner.types[r]
            self.types[n] = Type((dim, *t.lists), t.item)
        return names

    def graph(self, outputs: Sequence[str]) -> Graph:
        return Graph(tuple(self.params), tuple(self.nodes), tuple(outputs))

    def _add(self, n: Func | Reduce | View, t: Type) -> str:
        self.nodes.append(n)
        self.types[n.out] = t
        return n.out
