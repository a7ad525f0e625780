"""Facts about tensor programs that fusion asks for: who reads whom, and what it costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import ref

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    children,
    loads,
    remember,
    tensors_read,
    transform,
    walk,
)
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import estimate

_OP_COST = {
    "exp": 8, "exp2": 8, "expm1": 10, "log": 10, "log2": 10, "log1p": 12, "tanh": 14, "sigmoid": 12, "erf": 16,
    "erfinv": 30, "lgamma": 40,
    "sin": 14, "cos": 14, "pow": 20, "sqrt": 4, "rsqrt": 6, "div": 4, "floordiv": 4, "mod": 4,
    "random": 60, "random16": 42,
}  # fmt: skip
#: Graphs that are kept although nothing uses them.
LAST = 8


def out_dims(c: Compute) -> tuple[str, ...]:
    """Dims of the result that its body may index (topk: without the slot dim)."""
    return c.dims[:-1] if c.reducer == "topk" else c.dims


def is_map(c: Compute) -> bool:
    """Whether a statement reduces nothing."""
    return c.reducer is None


def is_static(e: Expr) -> bool:
    return isinstance(e, Const)


def expr_flops(e: Expr) -> int:
    """Arithmetic of one evaluation, in units of an add; index arithmetic is free."""
    if not isinstance(e, Call | Cast):
        return 0
    found: int | None = getattr(e, "_flops", None)
    if found is None:
        own = _OP_COST.get(e.op, 1) if isinstance(e, Call) else 0
        found = remember(e, "_flops", own + sum(map(expr_flops, children(e))))
    return found


def readings(e: Expr) -> Iterator[tuple[Load, DType | None]]:
    """Loads, and the type that each is rounded to at once; None: read as it is stored."""
    if isinstance(e, Load):
        yield e, None
    for n in walk(e):
        for k in children(n):
            if isinstance(k, Load):
                yield k, n.dtype if isinstance(n, Cast) else None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Graph:
    """Edges of a program: `producers[c]` and `consumers[c]` hold Compute names. `results`: in program order."""

    program: Program
    by_name: Mapping[str, Compute]
    producers: Mapping[str, tuple[str, ...]]
    consumers: Mapping[str, tuple[str, ...]]
    results: tuple[str, ...]
    _above: dict[str, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    _below: dict[str, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    _known: dict[str, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(p: Program) -> Graph:
        """A program's own, made once while it is used or one of the last: passes that change nothing ask one after the
        other. Each of both would keep the other until a collector comes."""
        found = None if p._graph is None else p._graph()
        if found is None:
            found = Graph._made(p)
            object.__setattr__(p, "_graph", ref(found))  # neither ever changes
            _last.append(found)
        return found

    @staticmethod
    def _made(p: Program) -> Graph:
        owner = {r: c.name for c in p.body for r in c.results}
        producers: dict[str, tuple[str, ...]] = {}
        consumers: dict[str, list[str]] = {c.name: [] for c in p.body}
        for c in p.body:
            read = dict.fromkeys(owner[t] for t in _reads(c) if t in owner)
            producers[c.name] = tuple(read)
            for r in read:
                consumers[r].append(c.name)
        by_name = {c.name: c for c in p.body}
        return Graph(p, by_name, producers, {k: tuple(v) for k, v in consumers.items()}, tuple(owner))

    def extent(self, dim: str) -> int:
        return estimate(self.program.sizes[dim])

    def points(self, dims: Iterable[str]) -> int:
        n = 1
        for d in dict.fromkeys(dims):
            n *= max(1, self.extent(d))
        return n

    def flops(self, name: str) -> int:
        """Arithmetic of one Compute over its whole domain."""
        c = self.by_name[name]
        return self.points((*out_dims(c), *c.rdims)) * max(1, expr_flops(c.body) + (c.reducer is not None))

    def nbytes(self, tensors: Iterable[str]) -> float:
        """Bytes of inputs or results."""
        p = self.program
        return sum(math.prod(map(estimate, p.shape_of(t))) * p.dtype_of(t).nbytes for t in tensors)

    def reached(
        self, name: str, step: Mapping[str, tuple[str, ...]], through: Callable[[Compute], bool]
    ) -> Iterator[Compute]:
        """What `step` (`consumers` or `producers`) leads to from a Compute, once each; on from those let `through`."""
        todo, seen = list(step[name]), set()
        while todo:
            u = todo.pop()
            if u not in seen:
                seen.add(u)
                found = self.by_name[u]
                yield found
                todo += step[u] if through(found) else ()

    def once(self, fact: str, find: Callable[[Graph], frozenset[str]]) -> frozenset[str]:
        """The Computes of which a fact holds, found when it is first asked for."""
        if fact not in self._known:
            self._known[fact] = find(self)
        return self._known[fact]

    def above(self, name: str) -> frozenset[str]:
        """All that a Compute depends on, by name."""
        if name not in self._above:
            self._above[name] = self._all(name, self.producers)
        return self._above[name]

    def below(self, name: str) -> frozenset[str]:
        """All that depends on a Compute, by name."""
        if name not in self._below:
            self._below[name] = self._all(name, self.consumers)
        return self._below[name]

    def _all(self, name: str, step: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
        return frozenset(c.name for c in self.reached(name, step, lambda _: True))

    def escapes(self, name: str, within: Collection[str]) -> bool:
        """Whether something outside `within`, or the caller, needs a result of the Compute."""
        c = self.by_name[name]
        if any(u not in within for u in self.consumers[name]):
            return True
        return any(r in self.program.outputs for r in c.results)


_last: deque[Graph] = deque(maxlen=LAST)


def _reads(c: Compute) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ld.tensor for ld in loads(c.body)))


def plain_axes(c: Compute, producer: Compute) -> frozenset[str]:
    """Dims of `producer` that every load in `c` indexes by the dim itself."""
    same, results = set(producer.dims), producer.results
    for ld in loads(c.body):
        if ld.tensor in results:
            same &= {d for d, ix in zip(producer.dims, ld.index, strict=True) if isinstance(ix, Index) and ix.dim == d}
    return frozenset(same)


def renamed(e: Expr, names: Mapping[str, str]) -> Expr:
    """With other tensors read in the place of those that have a new name."""
    if tensors_read(e).isdisjoint(names):
        return e
    return transform(e, lambda x: Load(names[x.tensor], x.index) if isinstance(x, Load) and x.tensor in names else None)
