"""Tensor programs as array programs: operators recognised in index notation, statement by statement.

    sum over k of a(i, k) b(j, k)      matmul (`block.contract` finds the two sides)
    sum, prod, max, min over k of f    the elementwise operators of f, then a reduction
    x(i, j) * c(i), x / c, x + c ...   row_scale, row_shift, and the same by columns
    any other scalar expression        elementwise
    a load with computed indices       a view (implicit im2col)
    argmax, argmin, topk, any, all     miscellaneous

Softmax and the norms need no entry: they are compositions of these. Equal expressions are one value.
A softmax with its maximum is taken without it (`graph.unshift`); `blockbuster.safety` makes it safe after fusion.

A dim is *blocked* if a product keeps or contracts it, or a reduction runs along it; blocks have at
most two axes. All other dims are batch-like: one element a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    call,
    children,
    dims_used,
    loads,
    rebuild,
    transform,
)
from tilefold.block.contract import as_contraction
from tilefold.blockbuster.ir import Array, Param, Program, Type, arg
from tilefold.blockbuster.lookup import ArrayOp, ArrayProgram, block_program
from tilefold.blockbuster.ops import REDUCTIONS
from tilefold.blockbuster.unshift import unshift
from tilefold.errors import UnsupportedError
from tilefold.names import fresh
from tilefold.tensor.ir import Compute
from tilefold.tensor.ir import Program as TensorProgram

#: Most axes of a block.
MOST_AXES = 2


@dataclass(frozen=True, slots=True)
class Bridged:
    """The array program. `source`: its inputs -> those of the tensor program, which may come in several forms."""

    array: ArrayProgram
    source: Mapping[str, str]

    @property
    def program(self) -> Program:
        """The block program before any fusion."""
        return block_program(self.array)


def from_tensor(p: TensorProgram) -> Bridged:
    """Recognise the operators of a program. UnsupportedError says what has no block form."""
    return _Bridge(p).run()


class _Bridge:
    def __init__(self, p: TensorProgram):
        self.p = p
        self.inputs = {i.name: i for i in p.inputs}
        self.by_name = {c.name: c for c in p.body}
        self.blocked = _blocked(p)
        self.params: list[Param] = []
        self.arrays: dict[str, Array] = {}
        self.source: dict[str, str] = {}
        self.ops: list[ArrayOp] = []
        self.types: dict[str, Type] = {}
        self.made: dict[tuple[object, ...], str] = {}
        self.results: dict[str, tuple[str, tuple[str, ...]]] = {}  # tensor -> value, its axes
        self.taken = {*self.inputs, *p.sizes, *p.syms, *(r for c in p.body for r in c.results)}

    def run(self) -> Bridged:
        for c in self.p.body:
            self.compute(c)
        for name in self.p.outputs:
            if name not in self.results:
                raise UnsupportedError(f"{name} is an input that is returned as it is")
            value, axes = self.results[name]
            if set(self.types[value].lists) != set(axes):
                raise UnsupportedError(f"{name} repeats its values along a dim")
            if value in self.arrays or value in self.source:
                raise UnsupportedError(f"{name} repeats another result")
            self.arrays[value] = Array(axes, self.p.dtype_of(name))
        outputs = tuple(self.results[name][0] for name in self.p.outputs)
        a = ArrayProgram(
            self.p.name, tuple(self.params), tuple(self.ops), outputs, self.p.sizes, self.arrays, self.p.syms
        )
        return Bridged(unshift(a, self.types), self.source)

    # -- values ---------------------------------------------------------------------------

    def fresh(self, base: str) -> str:
        return fresh(base, self.taken)

    def item(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(d for d in dims if d in self.blocked)
        if len(found) > MOST_AXES:
            raise UnsupportedError(f"a block would have the axes {', '.join(found)}")
        return found

    def type_of_dims(self, dims: tuple[str, ...]) -> Type:
        """Batch-like dims first, then the axes of the blocks in the order given."""
        item = self.item(dims)
        return Type((*(d for d in dims if d not in item), *item), item)

    def emit(self, op: ArrayOp, t: Type) -> str:
        self.ops.append(op)
        self.types[op.out[0]] = t
        return op.out[0]

    def oriented(self, v: str, dims: tuple[str, ...]) -> str:
        """The value with its blocks' axes in this order."""
        want = self.item(dims)
        if self.types[v].item in (want, ()) or set(self.types[v].item) != set(want):
            return v
        key = ("transpose", v)
        if key not in self.made:
            t = Type((*(d for d in self.types[v].lists if d not in want), *want), want)
            self.made[key] = self.emit(ArrayOp((self.fresh(f"{v}_t"),), "transpose", (v,)), t)
        return self.made[key]

    def load(self, ld: Load, dims: tuple[str, ...]) -> str:
        """An input or earlier result, blocks oriented as `dims`."""
        plain = tuple(ix.dim for ix in ld.index if isinstance(ix, Index))
        if len(plain) != len(ld.index) or len(set(plain)) != len(plain):
            return self.view(ld, dims)
        order = (*(d for d in dims if d in plain), *(d for d in plain if d not in dims))
        if ld.tensor in self.inputs:
            if any(self.p.sizes[d] != e for d, e in zip(plain, self.inputs[ld.tensor].shape, strict=True)):
                return self.view(ld, dims)  # only a part of the input
            t = self.type_of_dims(order)
            key = ("input", ld.tensor, plain, t.item)
            if key not in self.made:
                self.made[key] = self.param(ld.tensor, t, Array(plain, self.inputs[ld.tensor].dtype))
            return self.made[key]
        value, axes = self.results[ld.tensor]
        if axes != plain:
            raise UnsupportedError(f"{ld.tensor} is read with other dims than it is computed with")
        return self.oriented(value, order)

    def param(self, tensor: str, t: Type, a: Array) -> str:
        name = tensor if tensor not in self.source else self.fresh(tensor)
        self.params.append(Param(name, t))
        self.source[name], self.arrays[name], self.types[name] = tensor, a, t
        return name

    def view(self, ld: Load, dims: tuple[str, ...]) -> str:
        """A gather from an input as it lies."""
        if ld.tensor not in self.inputs or any(isinstance(n, Load) for ix in ld.index for n in _parts(ix)):
            raise UnsupportedError(f"{ld.tensor} is read at computed places")
        used = tuple(d for d in dims if any(d in dims_used(ix) for ix in ld.index))
        t = self.type_of_dims(used)
        key = ("view", ld, t)
        if key not in self.made:
            raw = self.raw(ld.tensor)
            op = ArrayOp((self.fresh(f"{ld.tensor}_view"),), "view", (raw,), types=(t,), index=ld.index)
            self.made[key] = self.emit(op, t)
        return self.made[key]

    def raw(self, tensor: str) -> str:
        key = ("raw", tensor)
        if key not in self.made:
            i = self.inputs[tensor]
            self.made[key] = self.param(tensor, Type(raw=True), Array((), i.dtype, i.shape))
        return self.made[key]

    # -- expressions ----------------------------------------------------------------------

    def value(self, e: Expr, dims: tuple[str, ...], name: str | None = None) -> str:
        """The array of an expression, with blocks oriented as `dims` (rows, then columns)."""
        order = tuple(d for d in dims if d in dims_used(e))
        key = ("value", e, self.item(order))
        if key in self.made:
            return self.made[key]
        if isinstance(e, Load):
            v = self.load(e, dims)
        else:
            v = self.structured(e, order, name) or self.elementwise(e, order, name)
        self.made[key] = v
        return v

    def structured(self, e: Expr, dims: tuple[str, ...], name: str | None = None) -> str | None:
        """A row or column operation, if the expression is one."""
        found = self.row_or_column(e, dims)
        if found is None:
            return None
        kind, x, c = found
        a, b = self.value(x, dims), self.value(c, dims)
        if not self.types[b].item or set(self.types[a].lists) != set(dims):
            return None
        return self.emit(ArrayOp((name or self.fresh("x"),), kind, (a, b)), self.types[a])

    def row_or_column(self, e: Expr, dims: tuple[str, ...]) -> tuple[str, Expr, Expr] | None:
        """(operator, matrix, vector) of an expression that scales or shifts by rows or columns."""
        pairs: tuple[tuple[Expr, Expr], ...]
        match e:
            case Call("mul", (a, b)):
                pairs, kind = ((a, b), (b, a)), "scale"
            case Call("div", (a, b)):
                pairs, kind = ((a, call("div", 1, b)),), "scale"
            case Call("add", (a, b)):
                pairs, kind = ((a, b), (b, a)), "shift"
            case Call("sub", (a, b)):
                pairs, kind = ((a, -b), (-a, b)), "shift"
            case _:
                return None
        item = self.item(dims)
        if len(item) != MOST_AXES:
            return None
        for x, c in pairs:
            if self.item(tuple(d for d in dims if d in dims_used(x))) != item or not loads(x):
                continue
            if set(dims_used(x)) < set(dims):
                continue
            axes = self.item(tuple(d for d in dims if d in dims_used(c)))
            if axes == item[:1]:
                return f"row_{kind}", x, c
            if axes == item[1:]:
                return f"col_{kind}", x, c
        return None

    def elementwise(self, e: Expr, dims: tuple[str, ...], name: str | None = None) -> str:
        """A scalar function of loads and of structured parts."""
        args: list[str] = []

        def operand(v: str) -> Expr:
            if v not in args:
                args.append(v)
            return arg(args.index(v))

        def scalar(n: Expr, top: bool) -> Expr:
            if isinstance(n, Load):
                return operand(self.value(n, dims))
            if not loads(n):
                return n
            if not top:
                order = tuple(d for d in dims if d in dims_used(n))
                if self.row_or_column(n, order) is not None:
                    return operand(self.value(n, dims))
            return rebuild(n, tuple(scalar(k, False) for k in children(n)))

        f = scalar(e, True)
        if not args:
            raise UnsupportedError(f"{name or 'a value'} is computed from indices alone")
        held = {d for a in args for d in self.types[a].lists}
        if missing := sorted(dims_used(f) - held):
            raise UnsupportedError(f"{name or 'a value'} varies along {missing[0]}, its operands do not")
        lists: list[str] = []
        for a in sorted(args, key=lambda v: -len(self.types[v].lists)):
            lists += [d for d in self.types[a].lists if d not in lists]
        t = self.type_of_dims(tuple(lists))
        whole = max(args, key=lambda v: len(self.types[v].item))
        item = (*self.types[whole].item, *(d for d in t.item if d not in self.types[whole].item))
        t = Type((*(d for d in t.lists if d not in item), *item), item)
        out = self.emit(ArrayOp((name or self.fresh("x"),), "elementwise", tuple(args), f), t)
        return self.oriented(out, dims)

    # -- statements -----------------------------------------------------------------------

    def compute(self, c: Compute) -> None:
        if c.index_name is not None or c.reducer in ("argmax", "argmin", "any", "all"):
            self.misc(c)
            return
        body = Cast(c.body, c.dtype) if c.dtype.rounds and c.dtype.is_float else c.body
        if c.reducer is None:
            v = self.value(body, c.dims, c.name)
            self.results[c.name] = (v, c.dims)
            return
        sides = as_contraction(c.body, c.dims, c.rdims) if c.reducer == "sum" else None
        v = self.product(c, sides.a, sides.b) if sides is not None else self.reduction(c)
        self.results[c.name] = (v, c.dims)

    def product(self, c: Compute, a: Expr, b: Expr) -> str:
        k = next((d for d in reversed(c.rdims) if d in self.blocked), None)
        if k is None:
            raise UnsupportedError(f"{c.name} contracts over {', '.join(c.rdims)}, which has no blocks")
        over = (*(d for d in c.rdims if d != k), k)
        in_order = [d for d in c.dims if d not in self.blocked] + [d for d in c.dims if d in self.blocked]
        sides = []
        for e in (a, b):
            dims = (*(d for d in over if d != k), *(d for d in in_order if d in dims_used(e)), k)
            sides.append(self.value(e, dims))
        rows = [d for d in self.types[sides[0]].item if d != k]
        cols = [d for d in self.types[sides[1]].item if d != k]
        if set(rows) & set(cols) or any(self.types[s].item[-1:] != (k,) for s in sides):
            raise UnsupportedError(f"{c.name} is no product of blocks")
        batch = {d for d in c.dims if d not in self.blocked}
        if {*batch, *rows, *cols} != set(c.dims):
            raise UnsupportedError(f"{c.name} repeats its operands along a dim")
        if rows + cols != [d for d in c.dims if d in self.blocked]:
            sides, rows, cols = sides[::-1], cols, rows
        item = (*rows, *cols)
        t = Type((*(d for d in c.dims if d not in item), *item), item)
        return self.emit(ArrayOp((c.name,), "matmul", tuple(sides), over=over), t)

    def reduction(self, c: Compute) -> str:
        if c.reducer not in REDUCTIONS:
            raise UnsupportedError(f"{c.reducer} has no block form")
        along = [d for d in c.rdims if d in self.blocked]
        if len(along) > 1:
            raise UnsupportedError(f"{c.name} reduces blocks along both axes")
        over = (*(d for d in c.rdims if d not in along), *along)
        x = self.value(c.body, (*c.dims, *over))
        if same := [d for d in over if d not in self.types[x].lists]:
            if c.reducer not in ("max", "min"):
                raise UnsupportedError(f"{c.name} reduces what does not vary along {same[0]}")
            over, along = tuple(d for d in over if d not in same), [d for d in along if d not in same]
            if not over:
                return x
        if along and self.types[x].item[-1] != along[0]:
            raise UnsupportedError(f"{c.name} reduces along the rows of its blocks")
        item = tuple(d for d in self.types[x].item if d not in along)
        kept = [d for d in c.dims if d in self.types[x].lists]
        t = Type((*(d for d in kept if d not in item), *item), item)
        return self.emit(ArrayOp((c.name,), "reduce", (x,), over=over, reducer=str(c.reducer)), t)

    def misc(self, c: Compute) -> None:
        """A statement on whole arrays; loads are reordered to the axes that the values have."""
        args: dict[str, str] = {}

        def one(n: Expr) -> Expr | None:
            if not isinstance(n, Load):
                return None
            if n.tensor in self.inputs:
                args[n.tensor] = self.raw(n.tensor)
                return None
            value, axes = self.results[n.tensor]
            args[n.tensor] = value
            t = self.types[value]
            order = (*(d for d in t.lists if d not in t.item), *t.item)
            return Load(n.tensor, tuple(n.index[axes.index(d)] for d in order))

        body = transform(c.body, one)
        types = tuple(self.type_of_dims(c.dims) for _ in c.results)
        compute = replace(c, body=body)
        op = ArrayOp(c.results, "misc", tuple(args.values()), compute=compute, names=tuple(args), types=types)
        self.ops.append(op)
        for r, t in zip(c.results, types, strict=True):
            self.types[r] = t
            self.results[r] = (r, c.dims)


def _parts(e: Expr) -> list[Expr]:
    return [e, *(n for k in children(e) for n in _parts(k))]


def _blocked(p: TensorProgram) -> frozenset[str]:
    """The dims that blocks have more than one element of: what products need, then rows where there is room."""
    needed: dict[str, None] = {}
    wished: dict[str, None] = {}
    values: list[frozenset[str]] = []
    for c in p.body:
        sides = as_contraction(c.body, c.dims, c.rdims) if c.reducer == "sum" else None
        values += [frozenset(c.dims)] if sides is not None else [frozenset((*c.dims, *c.rdims))]
        if sides is not None:
            a, b = dims_used(sides.a), dims_used(sides.b)
            values += [a, b]
            for own in (a - b, b - a):
                needed |= dict.fromkeys([d for d in c.dims if d in own][-1:])
            needed |= dict.fromkeys(c.rdims[-1:])
        elif c.reducer in REDUCTIONS:
            needed |= dict.fromkeys(c.rdims[-1:])
            wished |= dict.fromkeys(c.dims[-1:])
    if not needed:
        for c in p.body:
            wished |= dict.fromkeys(c.dims[-MOST_AXES:])
    small = {d for d, e in p.sizes.items() if isinstance(e, Const) and e.value == 1 and e.dtype is DType.I64}
    found = set(needed) - small
    for d in wished:
        if d not in small and all(len((found | {d}) & v) <= MOST_AXES for v in values if d in v):
            found.add(d)
    return frozenset(found)
