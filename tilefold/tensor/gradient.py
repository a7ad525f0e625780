"""The gradient of a tensor program is a tensor program.

    c[d] = sum over r of f(x[g(d, r)], ...)      adds to dx[a]:  sum over the rest of (d, r) with g(d, r) = a of
                                                 dc[d] * (d f / d x)

An axis that is read at a dim is that dim; one that is read at `dim + rest` or `rest - dim` is solved for the dim, and
counts where the solution is in range; one that other axes decide counts where it agrees. The maximum and minimum give
their gradient to the elements that reach them, in equal parts (as torch's `amax`). The forward definitions are part of
the program, as far as the gradient needs them: they are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilefold.algebra.derivative import pulled
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Expr,
    Index,
    Load,
    Size,
    call,
    dims_used,
    lit,
    substitute,
)
from tilefold.errors import UnsupportedError
from tilefold.names import fresh
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.rewrite import drop_dead


@dataclass(frozen=True, slots=True)
class Gradient:
    """`program` takes the inputs of the original and the gradients `given`, one for each floating output in order.

    It returns a gradient for each floating input in order, of the input's type.
    """

    program: Program
    given: tuple[str, ...]


def gradient(p: Program) -> Gradient:
    """The gradient of a program. UnsupportedError: one of its definitions has none (a gather, a product, topk)."""
    return _Reverse(p).done()


@dataclass(slots=True)
class _Reverse:
    """What has been collected; `parts`: for each tensor, the statements whose sum is its gradient."""

    p: Program
    taken: set[str] = field(init=False)
    sizes: dict[str, Expr] = field(init=False)
    body: list[Compute] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken, self.sizes = set(self.p.names), dict(self.p.sizes)

    def done(self) -> Gradient:
        p, given = self.p, list[Input]()
        for name in p.outputs:
            if p.dtype_of(name).is_float:
                one = Input(fresh(f"of_{name}", self.taken), p.dtype_of(name), p.shape_of(name))
                given.append(one)
                self.parts.setdefault(name, []).append(one.name)
        for c in reversed(p.body):
            if c.name in self.parts:
                self._statement(c)
        outputs = tuple(self._result(i) for i in p.inputs if i.dtype.is_float)
        names = tuple(i.name for i in given)
        made = Program(f"{p.name}_gradient", (*p.inputs, *given), self.sizes, (*p.body, *self.body), outputs, p.syms)
        return Gradient(drop_dead(made), names)

    def _add(self, name: str, dims: Sequence[str], body: Expr, over: Sequence[str], dtype: DType, of: Compute) -> str:
        name = fresh(name, self.taken)
        reducer = "sum" if over else None
        self.body.append(Compute(name, tuple(dims), dtype, body, reducer, tuple(over), None, of.loc))
        return name

    def _total(self, c: Compute) -> Load:
        """The gradient of a statement's result at its dims."""
        at = tuple(map(Index, c.dims))
        loads = [Load(n, at) for n in self.parts[c.name]]
        if len(loads) == 1:
            return loads[0]
        return Load(self._add(f"d_{c.name}", c.dims, _sum(loads), (), _wide(c.dtype), c), at)

    def _statement(self, c: Compute) -> None:
        total: Expr = self._total(c)
        if c.reducer in ("max", "min"):
            stored = Cast(c.body, c.dtype) if c.dtype.rounds else c.body
            reached = call("eq", stored, Load(c.name, tuple(map(Index, c.dims))))
            count = self._add(f"ties_{c.name}", c.dims, call("where", reached, 1.0, 0.0), c.rdims, DType.F32, c)
            share = total / Load(count, tuple(map(Index, c.dims)))
            total = call("where", reached, share, 0.0)
        elif c.reducer not in (None, "sum"):
            raise UnsupportedError(f"{c.name} has no gradient: it is a {c.reducer}", loc=c.loc)
        try:
            found = pulled(c.body, total, self.p.dtype_of)
        except UnsupportedError as why:
            raise UnsupportedError(f"{c.name} has no gradient: {why.message}", loc=c.loc) from None
        for load, part in found.items():
            self.parts.setdefault(load.tensor, []).append(self._transposed(c, load, part))

    def _transposed(self, c: Compute, load: Load, part: Expr) -> str:
        """The statement of what one load of a statement adds to the gradient of what it reads."""
        rest = [*c.dims, *c.rdims]
        axes: list[str | None] = []
        for e, n in zip(load.index, self.p.shape_of(load.tensor), strict=True):
            whole = isinstance(e, Index) and e.dim in rest and self.sizes[e.dim] == n
            axes.append(e.dim if isinstance(e, Index) and whole else None)
            if isinstance(e, Index) and whole:
                rest.remove(e.dim)
        known: dict[Expr, Expr] = {}
        conditions: list[Expr] = []
        dims: list[str] = []
        for e, n, axis in zip(load.index, self.p.shape_of(load.tensor), axes, strict=True):
            if axis is None:
                axis = fresh(f"at_{load.tensor}", self.taken)
                self.sizes[axis] = n
                e = substitute(e, known)
                free = [d for d in rest if d in dims_used(e)]
                if not free:
                    conditions.append(call("eq", Index(axis), e))
                else:
                    d, value = self._solved(c, load, e, free, Index(axis))
                    rest.remove(d)
                    conditions += [call("ge", value, 0), call("lt", value, Size(d))]
                    inside = call("maximum", call("minimum", value, Size(d) - 1), 0)
                    step: dict[Expr, Expr] = {Index(d): inside}
                    known = {k: substitute(v, step) for k, v in known.items()} | step
                    conditions = [substitute(x, step) for x in conditions]
            dims.append(axis)
        body = substitute(part, known)
        for x in conditions:
            body = call("where", x, body, 0.0)
        return self._add(f"d_{load.tensor}_of_{c.name}", dims, body, rest, _wide(self.p.dtype_of(load.tensor)), c)

    def _solved(self, c: Compute, load: Load, e: Expr, free: Sequence[str], at: Expr) -> tuple[str, Expr]:
        """A dim and its value where `e` is `at`."""
        for d in free:
            value = _inverse(e, d, at)
            if value is not None:
                return d, value
        raise UnsupportedError(
            f"{c.name} has no gradient: it reads {load.tensor} at places that no single value of a dim gives",
            loc=c.loc,
            hint="indices of the form dim + offset can be turned around",
        )

    def _result(self, i: Input) -> str:
        """The gradient of an input, of its type."""
        dims = [fresh(f"at_{i.name}", self.taken) for _ in i.shape]
        self.sizes |= zip(dims, i.shape, strict=True)
        body = _sum([Load(n, tuple(map(Index, dims))) for n in self.parts.get(i.name, [])])
        name = fresh(f"grad_{i.name}", self.taken)
        self.body.append(Compute(name, tuple(dims), i.dtype, body))
        return name


def _inverse(e: Expr, d: str, at: Expr) -> Expr | None:
    """The value of a dim for which `e` is `at`; None where the dim is not added or subtracted exactly once."""
    match e:
        case Index(dim) if dim == d:
            return at
        case Call("add", (a, b)) if d not in dims_used(b):
            return _inverse(a, d, at - b)
        case Call("add", (a, b)) if d not in dims_used(a):
            return _inverse(b, d, at - a)
        case Call("sub", (a, b)) if d not in dims_used(b):
            return _inverse(a, d, at + b)
        case Call("sub", (a, b)) if d not in dims_used(a):
            return _inverse(b, d, a - at)
    return None


def _sum(parts: Sequence[Expr]) -> Expr:
    total: Expr = parts[0] if parts else lit(0.0)
    for x in parts[1:]:
        total = total + x
    return total


def _wide(dtype: DType) -> DType:
    """What a gradient is kept in until it is whole."""
    return dtype.compute
