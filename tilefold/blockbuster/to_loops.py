"""A block graph as loop programs (`block.ir`), which the tile layer lowers and the back ends run.

Every node of the top graph becomes a kernel. A map is a loop (`forall`, or `for` with states), a list
between operators a tensor in memory, a function of items a block value. Dims with a single block
(`whole`) have no loop: their maps are inlined, and lists over them are block values. With the
blocks of all other dims one index long the loop program reads like the paper's scalar listing.

A sum of significands keeps the running maximum z of their exponents: what the body computes
relative to its own exponent is computed relative to z instead, which is the update of the Fold,
    z' = max(z, z_block);  s' = s exp(z - z') + sum of (values relative to z').
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Const, Expr, Index, Load, call, substitute, tensors_read, type_of
from tilefold.block import ir
from tilefold.block.tidy import tidy
from tilefold.block.verify import verify
from tilefold.blockbuster.edit import consumers
from tilefold.blockbuster.ir import Func, Graph, Map, Misc, Node, Out, Param, Program, Reduce, Type, View, arg
from tilefold.blockbuster.ops import ELEMENTWISE, REDUCTIONS
from tilefold.blockbuster.pairs import guarded
from tilefold.blockbuster.verify import blocked_dims, infer
from tilefold.errors import UnsupportedError
from tilefold.names import fresh
from tilefold.tensor.ir import Input

#: A dim of extent 1 for kernels without a parallel one.
UNIT = "unit"
_ROW_OPS = {row: op for op, row in REDUCTIONS.items()}
_MERGE = {"add": "add", "mul": "mul", "row_shift": "add", "row_scale": "mul", "col_shift": "add", "col_scale": "mul"}


def to_loops(p: Program, whole: Iterable[str] = ()) -> tuple[ir.Block, ...]:
    """Kernels in order; each reads inputs and results of earlier ones.

    whole: dims that are one block. UnsupportedError: miscellaneous operators, peeled iterations, lists
    of partial sums that are not accumulated where they are made, lists that a kernel reads back.
    """
    return _Kernels(p, frozenset(whole)).run()


@dataclass(frozen=True, slots=True)
class _Held:
    """A value as the expression of its element, over the dims along which it varies."""

    expr: Expr
    dims: tuple[str, ...]


class _Kernels:
    def __init__(self, p: Program, whole: frozenset[str]):
        self.p, self.whole = p, whole
        self.sizes = {**p.sizes, UNIT: Const(1, DType.I64)}
        self.taken = {*p.arrays, *p.sizes, *p.syms, UNIT}
        self.dtypes = {n: a.dtype for n, a in p.arrays.items()}
        self.shapes: dict[str, tuple[Expr, ...]] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.results: list[str] = []
        self.blocked = blocked_dims(p.graph) - whole

    def run(self) -> tuple[ir.Block, ...]:
        types = infer(self.p.graph)
        at: dict[str, _Held] = {}
        for i in self.p.graph.inputs:
            a = self.p.arrays[i.name]
            self.shapes[i.name] = a.shape or tuple(self.p.sizes[d] for d in a.axes)
            at[i.name] = _Held(Load(i.name, tuple(Index(d) for d in a.axes)), a.axes)
        for v in self.p.graph.outputs:
            self.axes[v] = self.p.arrays[v].axes
        blocks: list[ir.Block] = []
        for n in self.p.graph.nodes:
            blocks += self.kernel(n, at, types)
        return tuple(blocks)

    def kernel(self, n: Node, at: dict[str, _Held], types: Mapping[str, Type]) -> list[ir.Block]:
        known = tuple(Param(v, types[v]) for v in at)
        scope = _Scope(self, Graph(known, (n,), n.outs), at, types, ())
        self.results = []
        if isinstance(n, View):
            scope.node(n)
            at[n.out] = scope.at[n.out]
            return []
        for v in n.outs:
            scope.sink(v, ())
        scope.node(n)
        for v in n.outs:
            scope.settle(v)
            at[v] = self.memory(scope.names[v])
        body = tuple(scope.nodes)
        if not (len(body) == 1 and isinstance(body[0], ir.Loop) and body[0].kind == "forall"):
            body = (ir.Loop("forall", UNIT, body),)
        return [self.block(n.outs[0], body)]

    def memory(self, name: str) -> _Held:
        axes = self.axes[name]
        return _Held(Load(name, tuple(Index(d) for d in axes)), axes)

    def block(self, name: str, body: tuple[ir.Node, ...]) -> ir.Block:
        read = {t for n in ir.walk(body) for e in ir.exprs_of(n) for t in tensors_read(e)}
        inputs = [Input(t, self.dtypes[t], s) for t, s in self.shapes.items() if t in read and t not in self.results]
        if own := sorted(read & set(self.results)):
            raise UnsupportedError(
                f"{name}: {own[0]} is stored and read again inside of one kernel",
                hint="fuse further, or make a dim that it is a list over one block",
            )
        results = tuple(ir.Result(r, self.axes[r], self.dtypes[r]) for r in self.results)
        for r in self.results:
            self.shapes[r] = tuple(self.sizes[d] for d in self.axes[r])
        b = ir.Block(name, self.p.syms, self.sizes, tuple(inputs), results, tuple(self.results), body)
        return verify(tidy(verify(b)))

    def fresh(self, base: str) -> str:
        return fresh(base, self.taken)


class _Scope:
    """The body of a loop being emitted. `at`: how values are held, `names`: tensors that lists go to."""

    def __init__(
        self,
        k: _Kernels,
        g: Graph,
        at: Mapping[str, _Held],
        types: Mapping[str, Type],
        loops: tuple[str, ...],
        around: tuple[str, ...] = (),
    ):
        self.k, self.g, self.types, self.loops, self.around = k, g, dict(types), loops, around
        self.at: dict[str, _Held] = dict(at)
        self.names: dict[str, str] = {}
        self.sinks: dict[str, list[str]] = {}
        self.nodes: list[ir.Node] = []
        self.used = consumers(g)
        self.exponents: dict[str, str] = {}  # exponent of this iteration -> running maximum

    # -- where results go -----------------------------------------------------------------

    def lists(self, v: str) -> tuple[str, ...]:
        """The dims over which a value is still a list in memory."""
        return tuple(d for d in self.types[v].lists if d not in self.k.whole)

    def sink(self, v: str, loops: tuple[str, ...], name: str | None = None) -> None:
        """A value that has to be in memory: a result is made for it."""
        if partial := [d for d in self.lists(v) if d in self.k.blocked and d not in self.types[v].item]:
            raise UnsupportedError(
                f"{v} has one entry for each block of {partial[0]}, which no tensor holds",
                hint="fuse its reduction first (rules.algorithm.fuse_reductions), or make the dim one block",
            )
        if name is None:
            name = v if v in self.k.p.graph.outputs and not loops else self.k.fresh(v)
            t = self.types[v]
            own = (*t.lists, *(d for d in t.item if d not in t.lists))
            self.k.axes.setdefault(name, (*loops, *(d for d in own if d not in loops)))
            self.k.dtypes.setdefault(name, DType.F32)
            self.k.results.append(name)
        self.names[v] = name
        if not self.lists(v):
            self.sinks.setdefault(v, []).append(name)

    def settle(self, v: str) -> None:
        """Store an item where it is wanted."""
        held = self.at.get(v)
        for name in self.sinks.pop(v, ()):
            assert held is not None
            axes = self.k.axes[name]
            self.nodes.append(ir.Store(name, tuple(Index(d) for d in axes), axes, held.expr))

    # -- nodes ----------------------------------------------------------------------------

    def define(
        self, v: str, e: Expr, dims: tuple[str, ...], reducer: str | None = None, over: tuple[str, ...] = ()
    ) -> None:
        """A block value."""
        name = self.k.fresh(v)
        dtype = type_of(e, lambda t: self.k.dtypes[t])
        self.k.dtypes[name] = dtype
        self.nodes.append(ir.Let(name, dims, dtype, e, reducer, over))
        self.at[v] = _Held(Load(name, tuple(Index(d) for d in dims)), dims)
        self.settle(v)

    def node(self, n: Node) -> None:
        match n:
            case Func():
                e, dims, reducer, over = self.func(n)
                self.define(n.out, e, dims, reducer, over)
            case Reduce(out, op, a, dim):
                self.reduce(out, op, a, dim)
            case View(out, a, index, t):
                held = self.at[a]
                assert isinstance(held.expr, Load)
                dims = (*t.lists, *(d for d in t.item if d not in t.lists))
                self.at[out] = _Held(Load(held.expr.tensor, index), dims)
            case Map():
                self.map(n)
            case _:
                what = "a miscellaneous operator" if isinstance(n, Misc) else "a peeled iteration"
                raise UnsupportedError(
                    f"{', '.join(n.outs)}: {what} has no loop program",
                    hint="compile the tensor program it comes from instead",
                )

    def func(self, n: Func) -> tuple[Expr, tuple[str, ...], str | None, tuple[str, ...]]:
        """Expression of a function, the dims of its result, and its reduction, if it is one."""
        items = [self.at[self.exponents.get(a, a)] for a in n.args]
        dims = list[str]()
        for it in items:
            dims += [d for d in it.dims if d not in dims]
        values = [it.expr for it in items]
        if n.op == ELEMENTWISE:
            assert n.expr is not None
            table: dict[Expr, Expr] = {arg(k): e for k, e in enumerate(values)}
            return substitute(n.expr, table), tuple(dims), None, ()
        if n.op in ("dot", "outer"):
            column = self.types[n.args[0]].item[-1:] if n.op == "dot" else ()
            kept = tuple(d for d in dims if d not in column)
            return call("mul", *values), kept, "sum" if column else None, column
        if n.op in _ROW_OPS or n.op == "block_max":
            over = self.types[n.args[0]].item if n.op == "block_max" else self.types[n.args[0]].item[-1:]
            return values[0], tuple(d for d in dims if d not in over), _ROW_OPS.get(n.op, "max"), over
        if n.op == "transpose":
            return values[0], tuple(dims), None, ()
        return call(_MERGE[n.op], *values), tuple(dims), None, ()

    def reduce(self, out: str, op: str, a: str, dim: str) -> None:
        held = self.at[a]
        over = (dim,) if dim in held.dims else ()
        dims = tuple(d for d in held.dims if d != dim)
        if dim in self.k.whole:
            if over:
                self.define(out, held.expr, dims, op, over)
            else:
                self.at[out] = held
                self.settle(out)
            return
        total = self.state(out, op, dims, DType.F32)
        state = self.at[out].expr
        self.nodes.append(ir.Loop("for", dim, (accumulated(total, state, op, over, held.expr),)))
        self.settle(out)

    def state(self, v: str, op: str, dims: tuple[str, ...], dtype: DType) -> str:
        name = self.k.fresh(v)
        self.k.dtypes[name] = dtype
        self.nodes.append(ir.Init(name, dims, dtype, Const(identity_of(op, dtype.torch_dtype), dtype)))
        self.at[v] = _Held(Load(name, tuple(Index(d) for d in dims)), dims)
        return name

    # -- maps -----------------------------------------------------------------------------

    def map(self, n: Map) -> None:
        if n.start:
            raise UnsupportedError(f"{', '.join(n.outs)}: a peeled loop has no loop program")
        loops = self.loops if n.dim in self.k.whole else (*self.loops, n.dim)
        around = (*self.around, n.dim)
        at = {i.name: self.at[i.value] for i in n.ins}
        inner = _Scope(self.k, n.body, at, infer(n.body, around), loops, around)
        for i in n.ins:
            if i.value in self.exponents:
                inner.at[i.name] = self.at[self.exponents[i.value]]
        if n.dim in self.k.whole:
            self.inline(n, inner)
            return
        totals: dict[str, str] = {}
        for o, v in n.pairs:
            if o.reduce:
                totals[o.name] = ""
                continue
            if o.name not in self.names:
                self.sink(o.name, self.loops)
            inner.sink(v, loops, self.names[o.name])
        _LoopBody(self, n, inner).emit(totals)
        for o, _ in n.pairs:
            if not o.reduce:
                self.at[o.name] = self.k.memory(self.names[o.name])
            else:
                self.settle(o.name)

    def inline(self, n: Map, inner: _Scope) -> None:
        """A map over a single block is its body."""
        for o, v in n.pairs:
            if o.name in self.names and inner.lists(v):
                inner.sink(v, inner.loops, self.names[o.name])
        inner.nodes = self.nodes
        for m in n.body.nodes:
            inner.node(m)
        for o, v in n.pairs:
            held = inner.at[v]
            if o.reduce and n.dim in held.dims:
                total, dims = f"{v}_{o.reduce}", tuple(d for d in held.dims if d != n.dim)
                inner.define(total, held.expr, dims, o.reduce, (n.dim,))
                held = inner.at[total]
            self.at[o.name] = held
            if not inner.lists(v):
                self.settle(o.name)


def accumulated(name: str, state: Expr, op: str, over: tuple[str, ...], e: Expr) -> ir.Update | ir.Accumulate:
    """The statement that adds to a state, with or without a reduction inside the block."""
    if over:
        return ir.Accumulate(name, op, over, e)
    pairwise = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}[op]
    return ir.Update(name, call(pairwise, state, e))


class _LoopBody:
    """A map as a loop with states."""

    def __init__(self, outer: _Scope, n: Map, inner: _Scope):
        self.outer, self.n, self.inner = outer, n, inner
        self.by_value: dict[str, list[Out]] = {}
        for o, v in n.pairs:
            if o.reduce:
                self.by_value.setdefault(v, []).append(o)
        self.running = {v: o.name for o, v in n.pairs if any(p.exponent == o.name for p in n.results)}

    def emit(self, totals: dict[str, str]) -> None:
        inits: list[ir.Node] = []
        for p in self.n.body.inputs:
            self.arrived(p.name, inits)
        for m in self.n.body.nodes:
            if isinstance(m, Func) and self.direct(m):
                e, dims, _, over = self.inner.func(m)
                (o,) = self.by_value[m.out]
                self.accumulate(o, e, dims, over, inits)
                continue
            self.inner.node(m)
            for v in m.outs:
                self.arrived(v, inits)
        assert set(totals) == {o.name for os in self.by_value.values() for o in os}
        self.outer.nodes += inits
        kind: Literal["for", "forall"] = "for" if self.n.serial else "forall"
        self.outer.nodes.append(ir.Loop(kind, self.n.dim, tuple(self.inner.nodes)))

    def direct(self, m: Func) -> bool:
        """Whether a function's own reduction can go straight into the one sum that uses it."""
        outs = self.by_value.get(m.out, [])
        if len(outs) != 1 or self.inner.used[m.out] != [-1] or m.out in self.inner.sinks or m.out in self.running:
            return False
        own = "sum" if m.op == "dot" else _ROW_OPS.get(m.op)
        return own == outs[0].reduce

    def arrived(self, v: str, inits: list[ir.Node]) -> None:
        """A value of the body is there: store it if it is an output, and add it to its sums."""
        self.inner.settle(v)
        for o in self.by_value.get(v, ()):
            held = self.inner.at[v]
            self.accumulate(o, held.expr, held.dims, (), inits)
        if v in self.running:
            self.inner.exponents[v] = self.running[v]

    def accumulate(self, o: Out, e: Expr, dims: tuple[str, ...], over: tuple[str, ...], inits: list[ir.Node]) -> None:
        """One statement that adds to a state, after moving it to the new exponent if it is a significand."""
        over = (*over, *(d for d in dims if d == self.n.dim))
        dims = tuple(d for d in dims if d != self.n.dim)
        k, op = self.outer.k, str(o.reduce)
        dtype = type_of(e, lambda t: k.dtypes[t])
        dtype = DType.F32 if dtype in (DType.BOOL, DType.I64) else dtype
        name = k.fresh(o.name)
        k.dtypes[name] = dtype
        inits.append(ir.Init(name, dims, dtype, Const(identity_of(op, dtype.torch_dtype), dtype)))
        state = Load(name, tuple(Index(d) for d in dims))
        self.outer.at[o.name] = _Held(state, dims)
        if o.name in self.running.values():
            k.dtypes[f"{name}_old"] = dtype
            self.inner.nodes.append(ir.Let(f"{name}_old", dims, dtype, state))
        if o.exponent is not None:
            z = self.outer.at[o.exponent].expr
            assert isinstance(z, Load)
            old = replace(z, tensor=f"{z.tensor}_old")
            self.inner.nodes.append(ir.Update(name, call("mul", state, call("exp", call("sub", old, guarded(z))))))
        self.inner.nodes.append(accumulated(name, state, op, over, e))
        self.inner.at[o.name] = self.outer.at[o.name]
