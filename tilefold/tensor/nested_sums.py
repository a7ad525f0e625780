"""Sums of sums as one sum.

Law: sum over l of (e * sum over k of f)  is  sum over (l, k) of (f * e)

so that both are one loop whose lanes add by themselves, and the threads of a kernel once, at its end; a sum a row asks
that of them for every tile of rows.

Side conditions: both are sums of float32 (or wider); the sum in front is no result, no product (a library's), and read
once, by whole rows; e is the same for all l; and nothing that is summed comes out of a reduction for each l (a softmax
under a loss, which is one fold of a row: all rows would be read again). `row_sums` is the other way round, where
products want rows.
Rounding: both are trees of sums of the same numbers.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Expr, Index, Load, call, dims_used, loads, rename_dims, tensors_read
from tilefold.names import fresh
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

WIDE = (DType.F32, DType.F64)


def nested_sums(p: Program) -> Program:
    """The program in which such sums are one."""
    joined: set[str] = set()
    for c in p.body:
        if c.reducer != "sum" or c.dtype not in WIDE:
            continue
        whole = c
        while (found := as_one(p, whole))[1] and _pays(p, whole, found[1]):
            whole, gone = found
            joined.add(c.name)
            p = replace(p, body=tuple(whole if x.name == c.name else x for x in p.body if x.name != gone))
    if not joined:
        return p
    taken = set(p.names)
    body = [_outside(c, taken) if c.name in joined else [c] for c in p.body]
    return replace(p, body=tuple(x for xs in body for x in xs))


def _outside(c: Compute, taken: set[str]) -> list[Compute]:
    """A sum, with what all that it sums is multiplied with or divided by outside."""
    outer: list[tuple[str, Expr]] = []
    body = c.body
    while isinstance(body, Call) and body.op in ("mul", "div"):
        of, by = body.args
        if dims_used(by) & {*c.rdims}:
            break
        outer.append((body.op, by))
        body = of
    if not outer:
        return [c]
    inner = replace(c, name=fresh(f"{c.name}_sum", taken), body=body)
    e: Expr = Load(inner.name, tuple(map(Index, c.dims)))
    for op, by in reversed(outer):
        e = call(op, e, by)
    return [inner, replace(c, body=e, reducer=None, rdims=())]


def as_one(p: Program, c: Compute) -> tuple[Compute, str]:
    """A sum of products or quotients with a sum that nothing else reads as one sum, and the name of the other; c and
    "" where it is none."""
    match c.body:
        case Load() as read:
            other: Expr | None = None
        case Call("mul" | "div", (Load() as read, other)) | Call("mul", (other, Load() as read)):
            pass
        case _:
            return c, ""
    s = next((x for x in p.body if x.name == read.tensor), None)
    if s is None or s.reducer != "sum" or s.dtype is not c.dtype or s.name in p.outputs:
        return c, ""
    if other is not None and s.name in tensors_read(other):  # its square
        return c, ""
    readers = [ld for x in p.body for ld in loads(x.body) if ld.tensor == read.tensor]
    plain = [i.dim for i in read.index if isinstance(i, Index)]
    clash = {*c.dims, *c.rdims} & {*s.rdims} or (other is not None and dims_used(other) & {*s.rdims})
    if len(readers) != 1 or len(plain) != len(s.dims) or len(set(plain)) != len(plain) or clash:
        return c, ""
    f = rename_dims(s.body, dict(zip(s.dims, plain, strict=True)))
    op = c.body.op if isinstance(c.body, Call) else "mul"
    return replace(c, body=f if other is None else call(op, f, other), rdims=(*c.rdims, *s.rdims)), s.name


def _pays(p: Program, c: Compute, name: str) -> bool:
    """Whether a sum of that sum is better one."""
    by_name = {r: x for x in p.body for r in x.results}
    s = by_name[name]
    product = product_of(s)
    if is_windowed(s) or (product is not None and product.is_matrix()):
        return False
    (read,) = (ld for ld in loads(c.body) if ld.tensor == name)
    factors = [a for a in c.body.args if a is not read] if isinstance(c.body, Call) else []
    summed = {d for d, i in zip(s.dims, read.index, strict=True) if not dims_used(i).isdisjoint(c.rdims)}
    if len(summed) != len(c.rdims) or any(dims_used(e) & {*c.rdims} for e in factors):
        return False
    todo, met = [s], {s.name}
    while todo:
        for t in tensors_read(todo.pop().body) - met:
            met.add(t)
            x = by_name.get(t)
            if x is None:
                continue
            if x.reducer is None:
                todo.append(x)
            elif not {*x.dims}.isdisjoint(summed | {*c.rdims}):
                return False
    return True
