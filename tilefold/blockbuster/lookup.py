"""Array operators as block subgraphs: Blockbuster's table 2, for any number of batch-like dims.

An array is a list over all of its dims; its last (up to two) blocked dims are the axes of the
items, the others have one element a block. Every operator is fully unfused: the map of its rows
comes first, so that rules 1 and 2 can join neighbours. Names in the table:

    elementwise matmul softmax safe_softmax rmsnorm layernorm reduce quantise topk conv2d
    add mul outer row_scale row_shift col_scale col_shift transpose

Everything else is a miscellaneous operator: `misc` with the statement of the tensor IR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, Index, Load, Size, call, lit
from tilefold.blockbuster.builder import Body, GraphBuilder
from tilefold.blockbuster.edit import prune, rename
from tilefold.blockbuster.ir import Array, Graph, Param, Program, Type, arg
from tilefold.blockbuster.ops import BLOCK_OPS, REDUCTIONS, union
from tilefold.blockbuster.verify import verify
from tilefold.errors import UnsupportedError
from tilefold.tensor.ir import Compute

#: Largest finite value of the type that quantise rounds to.
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class ArrayOp:
    """`out = op(args)`. Options, where the operator takes them:

    expr: the function of an elementwise operator (over `arg(0)`, ...), or of the sum of squares in
    rmsnorm. over: dims that a reduction or product sums over, the one that blocks have last.
    reducer: of `reduce`. eps: of the norms. dims: axes of the result of `elementwise` and `matmul`
    where operands do not settle it. compute, types: of `misc`, and its results.
    """

    out: tuple[str, ...]
    op: str
    args: tuple[str, ...]
    expr: Expr | None = None
    over: tuple[str, ...] = ()
    reducer: str = "sum"
    eps: float | None = None
    compute: Compute | None = None
    names: tuple[str, ...] = ()
    types: tuple[Type, ...] = ()
    index: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class ArrayProgram:
    """A DAG of array operators. `inputs`: types as lists over all dims; `arrays`: how inputs and outputs lie."""

    name: str
    inputs: tuple[Param, ...]
    ops: tuple[ArrayOp, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, Expr]
    arrays: Mapping[str, Array]
    syms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))


def block_program(a: ArrayProgram) -> Program:
    """Every array operator replaced by its subgraph. UnsupportedError: one with operands that it does not take."""
    t = _Table()
    where = {p.name: t.b.input(p.name, p.type) for p in a.inputs}
    for op in a.ops:
        rule = TABLE.get(op.op)
        if rule is None:
            raise UnsupportedError(f"{op.op} is not in the table of array operators", hint="make it `misc`")
        results = rule(t, op, [where[x] for x in op.args])
        where |= dict(zip(op.out, results, strict=True))
    graph = prune(t.b.graph([where[v] for v in a.outputs]))
    return verify(Program(a.name, _called(graph, a.outputs), a.sizes, a.arrays, a.syms))


def _called(g: Graph, names: tuple[str, ...]) -> Graph:
    """Outputs by the names they are declared with."""
    to = {old: new for old, new in zip(g.outputs, names, strict=True) if old != new}
    swap = {**{new: f"{new}_inner" for new in to.values()}, **to}
    return Graph(g.inputs, tuple(rename(n, swap) for n in g.nodes), names)


class _Table:
    """The graph being built, with the steps that several operators share."""

    def __init__(self) -> None:
        self.b = GraphBuilder()

    def type(self, v: str) -> Type:
        return self.b.types[v]

    def blockwise(self, dims: tuple[str, ...], args: list[str], body: Body, out: str) -> str:
        return self.b.map(dims, args, body, [out])[0]

    def elementwise(self, e: Expr, args: list[str], out: str) -> str:
        dims = union(tuple(self.type(a).lists for a in args))
        return self.blockwise(dims, args, lambda b, xs: [b.elementwise(e, *xs)], out)

    def blocks(self, op: str, args: list[str], out: str) -> str:
        """A functional operator on every block."""
        found = BLOCK_OPS[op].item(*(self.type(a).item for a in args))
        if found is None:
            shapes = ", ".join(str(self.type(a).item) for a in args)
            raise UnsupportedError(f"{op} of blocks {shapes}: {BLOCK_OPS[op].constraint} wanted")
        dims: list[str] = []
        for a in args:
            dims += [d for d in self.type(a).lists if d not in dims]
        return self.blockwise(tuple(dims), args, lambda b, xs: [b.func(op, *xs)], out)

    def reduce(self, x: str, over: tuple[str, ...], reducer: str, out: str) -> str:
        """Row reduction: inside blocks along the last axis, then over the lists, innermost dim last."""
        t = self.type(x)
        rows = tuple(d for d in t.lists if d not in over)

        def level(b: GraphBuilder, v: str, dims: tuple[str, ...]) -> str:
            if not dims:
                return b.func(REDUCTIONS[reducer], v) if t.item and t.item[-1] in over else v
            (partial,) = b.map(dims[:1], [v], lambda c, vs: [level(c, vs[0], dims[1:])], ["s"])
            return b.reduce(reducer, partial, dims[0])

        return self.blockwise(rows, [x], lambda b, vs: [level(b, vs[0], over)], out)

    def matmul(self, x: str, y: str, over: tuple[str, ...], out: str) -> str:
        """Rows of x times rows of y: maps over rows, then columns, then the contracted dims."""
        a, b = self.type(x), self.type(y)
        if not (a.item and b.item and a.item[-1] == b.item[-1] and a.item[-1] in over):
            raise UnsupportedError(f"a product of blocks {a.item} and {b.item} contracts their last axis")
        rows = [d for d in a.lists if d not in over]
        dims = tuple([*(d for d in rows if d not in a.item), *(d for d in b.lists if d not in (*rows, *over, *b.item))])
        dims += tuple(d for d in rows if d in a.item) + tuple(d for d in b.lists if d in b.item and d not in over)
        lists = (*(d for d in over if d != a.item[-1]), a.item[-1])

        def level(g: GraphBuilder, vs: list[str], left: tuple[str, ...]) -> str:
            if not left:
                return g.func("dot", *vs)
            (partial,) = g.map(left[:1], vs, lambda c, ws: [level(c, ws, left[1:])], ["p"])
            return g.reduce("sum", partial, left[0])

        return self.blockwise(dims, [x, y], lambda g, vs: [level(g, vs, lists)], out)


def _elementwise(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    assert op.expr is not None
    return [t.elementwise(op.expr, args, op.out[0])]


def _blocks(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    return [t.blocks(op.op, args, op.out[0])]


def _matmul(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    over = op.over or t.type(args[0]).item[-1:]
    return [t.matmul(args[0], args[1], over, op.out[0])]


def _reduce(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    return [t.reduce(args[0], op.over or t.type(args[0]).item[-1:], op.reducer, op.out[0])]


def _softmax(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """exp, row sums, their inverses, row scale: four operators."""
    (x,) = args
    e = t.elementwise(call("exp", arg(0)), [x], f"{op.out[0]}_exp")
    total = t.reduce(e, t.type(x).item[-1:], "sum", f"{op.out[0]}_sum")
    inverse = t.elementwise(call("div", 1, arg(0)), [total], f"{op.out[0]}_inv")
    return [t.blocks("row_scale", [e, inverse], op.out[0])]


def _safe_softmax(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """The same of x minus its row maximum."""
    (x,) = args
    top = t.reduce(x, t.type(x).item[-1:], "max", f"{op.out[0]}_max")
    shift = t.elementwise(-arg(0), [top], f"{op.out[0]}_neg")
    return _softmax(t, op, [t.blocks("row_shift", [x, shift], f"{op.out[0]}_shifted")])


def _square_sum(t: _Table, x: str, out: str) -> str:
    return t.reduce(t.elementwise(arg(0) ** 2, [x], f"{out}_sq"), t.type(x).item[-1:], "sum", f"{out}_ss")


def _rmsnorm(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """Squares, row sums, inverse root, row scale (by a weight for each column where one is given)."""
    x, weight = args[0], args[1:]
    total = _square_sum(t, x, op.out[0])
    e = op.expr
    if e is None:
        mean = arg(0) / Size(t.type(x).item[-1])
        e = call("div", 1, call("sqrt", mean if op.eps is None else mean + lit(op.eps)))
    r = t.elementwise(e, [total], f"{op.out[0]}_inv")
    y = t.blocks("row_scale", [x, r], f"{op.out[0]}_n" if weight else op.out[0])
    return [t.blocks("col_scale", [y, weight[0]], op.out[0])] if weight else [y]


def _layernorm(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """Sum and sum of squares, minus the mean, inverse deviation, shift and scale (Blockbuster eq. 1)."""
    x, out = args[0], op.out[0]
    k = Size(t.type(x).item[-1])
    total = t.reduce(x, t.type(x).item[-1:], "sum", f"{out}_sum")
    shift = t.elementwise(call("neg", arg(0)) / k, [total], f"{out}_neg")
    moved = t.blocks("row_shift", [x, shift], f"{out}_c")
    squares = _square_sum(t, x, out)
    variance = arg(0) / k - arg(1) ** 2
    r = t.elementwise((variance if op.eps is None else variance + lit(op.eps)) ** -0.5, [squares, shift], f"{out}_inv")
    y = t.blocks("row_scale", [moved, r], out if len(args) == 1 else f"{out}_n")
    for n, (kind, w) in enumerate(zip(("col_scale", "col_shift"), args[1:], strict=False), 2):
        y = t.blocks(kind, [y, w], out if n == len(args) else f"{out}_w")
    return [y]


def _quantise(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """Row-wise e4m3: (rounded values, scales). A row of zeros has scale 1."""
    (x,) = args
    out = op.out[0]
    top = t.reduce(t.elementwise(call("abs", arg(0)), [x], f"{out}_abs"), t.type(x).item[-1:], "max", f"{out}_max")
    safe = call("where", call("gt", arg(0), 0.0), arg(0) / lit(E4M3_MAX), 1.0)
    scale = t.elementwise(safe, [top], op.out[1])
    inverse = t.elementwise(call("div", 1.0, arg(0)), [scale], f"{out}_inv")
    scaled = t.blocks("row_scale", [x, inverse], f"{out}_scaled")
    return [t.elementwise(Cast(arg(0), DType.E4M3), [scaled], out), scale]


def _topk(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """Values and indices of the largest entries of each row: no block operator, so miscellaneous."""
    (x,) = args
    lists = t.type(x).lists
    slot, (axis,) = op.types[0].lists[-1], op.over or lists[-1:]
    dims = (*(d for d in lists if d != axis), slot)
    body = Load("x", tuple(Index(d) for d in _array_axes(t.type(x))))
    compute = Compute(op.out[0], dims, DType.F32, body, "topk", (axis,), op.out[1])
    return t.b.misc(compute, [x], ["x"], op.types)


def _conv2d(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    """Implicit im2col: the columns are a view of the image, never stored; then a product."""
    image, weight = args
    (columns,) = op.types
    v = t.b.view(image, op.index, columns, f"{op.out[0]}_cols")
    return [t.matmul(v, weight, op.over, op.out[0])]


def _misc(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    assert op.compute is not None
    return t.b.misc(op.compute, args, op.names, op.types)


def _view(t: _Table, op: ArrayOp, args: list[str]) -> list[str]:
    return [t.b.view(args[0], op.index, op.types[0], op.out[0])]


def _array_axes(t: Type) -> tuple[str, ...]:
    return (*(d for d in t.lists if d not in t.item), *t.item)


_Rule = Callable[[_Table, ArrayOp, list[str]], list[str]]
TABLE: Mapping[str, _Rule] = MappingProxyType(
    {
        "elementwise": _elementwise,
        "matmul": _matmul,
        "softmax": _softmax,
        "safe_softmax": _safe_softmax,
        "rmsnorm": _rmsnorm,
        "layernorm": _layernorm,
        "reduce": _reduce,
        "quantise": _quantise,
        "topk": _topk,
        "conv2d": _conv2d,
        "view": _view,
        "misc": _misc,
        **dict.fromkeys(
            ("add", "mul", "outer", "row_scale", "row_shift", "col_scale", "col_shift", "transpose"), _blocks
        ),
    }
)
