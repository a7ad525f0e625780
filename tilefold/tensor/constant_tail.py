"""A softmax over a row and a constant behind it, of which the row alone is read (attention sinks).

Law, for x[l] where l < n and b, constant along l, in c places after it, with m = max over l < n of x[l]:

  softmax(x, b, .., b)[l]  =  exp(x[l] - m) / (sum over l < n of exp(x[l] - m) + c exp(b - m))

for a softmax is the same whatever constant is subtracted from all of its arguments. Where b - m is more than an
exponential holds, the result is 0, to which it also rounds where max(m, b) is subtracted. Where all x are -inf, 0
stands in for m in the row, and b in its place beside it: the result is 0, or nan where b is -inf too. b = +inf gives
nan. Both are eager's. So a row and a number beside it are one fold over the row, and no copy of the row is one
longer. A maximum that was subtracted before is subtracted for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used, loads, substitute
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program


@dataclass(frozen=True, slots=True)
class Tail:
    """A softmax over `dim`, of which the first `kept` arguments are `row`, and all others `beside`: its statements, and
    those that subtract a maximum before."""

    whole: Compute
    before: tuple[Compute, ...]
    maximum: Compute
    exponential: Compute
    total: Compute
    result: Compute
    dim: str
    kept: int
    count: int
    row: Expr
    beside: Expr


def shorten_softmax(p: Program) -> Program:
    """The program in which no softmax takes constants behind a row, where these are not read."""
    for t in list(_tails(Graph.of(p))):
        p = _without(p, t)
    return p


def _tails(g: Graph) -> Iterator[Tail]:
    for c in g.program.body:
        match c.body:
            case Call("where", (Call("lt", (Index(d), Const(n, _))), row, beside)) if c.reducer is None:
                size = g.program.sizes[d]
                if d in dims_used(beside) or d not in c.dims or not isinstance(size, Const):
                    continue
                before = _lowered(g, c, d)
                found = _softmax(g, before[-1] if before else c, d)
                saved = found is not None and not {found[0].name, found[2].name}.isdisjoint(g.program.outputs)
                if (
                    found is not None
                    and not (before and saved)
                    and 0 < int(n) < int(size.value)
                    and _short(g, found[-1], d, int(n))
                ):
                    yield Tail(c, before, *found, d, int(n), int(size.value) - int(n), row, beside)


def _lowered(g: Graph, c: Compute, d: str) -> tuple[Compute, ...]:
    """The maximum of c along d, and c less that, if nothing else reads c or the maximum."""
    at, rest = _places(c, d)
    readers = [g.by_name[n] for n in g.consumers[c.name]]
    for top, less in zip(readers, reversed(readers), strict=True):
        shifted = less.reducer is None and less.body == call("sub", at, Load(top.name, rest)) and less.dims == c.dims
        alone = len(readers) == 2 and g.consumers[top.name] == (less.name,)
        if _is_max(top, at, rest, d) and shifted and alone and not {c.name, top.name} & {*g.program.outputs}:
            return top, less
    return ()


def _places(c: Compute, d: str) -> tuple[Load, tuple[Expr, ...]]:
    """An element of c, and where it is beside its place along d."""
    return Load(c.name, tuple(Index(x) for x in c.dims)), tuple(Index(x) for x in c.dims if x != d)


def _is_max(c: Compute, at: Load, rest: tuple[Expr, ...], d: str) -> bool:
    return c.reducer == "max" and c.rdims == (d,) and c.body == at and tuple(Index(x) for x in c.dims) == rest


def _softmax(g: Graph, c: Compute, d: str) -> tuple[Compute, Compute, Compute, Compute] | None:
    """Maximum, exponential, total and quotient of a softmax over `d` of c alone; None: something else reads c."""
    at, rest = _places(c, d)
    readers = [g.by_name[n] for n in g.consumers[c.name]]
    top = next((r for r in readers if _is_max(r, at, rest, d)), None)
    if top is None or len(readers) != 2:
        return None
    e = next(r for r in readers if r is not top)
    if e.reducer is not None or e.dims != c.dims or e.body != call("exp", call("sub", at, Load(top.name, rest))):
        return None
    here = Load(e.name, at.index)
    users = [g.by_name[n] for n in g.consumers[e.name]]
    total = next((r for r in users if r.reducer == "sum" and r.rdims == (d,) and r.body == here), None)
    if total is None or tuple(Index(x) for x in total.dims) != rest or len(users) != 2:
        return None
    y = next(r for r in users if r is not total)
    if y.reducer is not None or y.dims != c.dims or _bare(y.body) != call("div", here, Load(total.name, rest)):
        return None
    alone = g.consumers[top.name] == (e.name,) and g.consumers[total.name] == (y.name,)
    inside = {c.name, e.name, y.name}
    return (top, e, total, y) if alone and inside.isdisjoint(g.program.outputs) else None


def _bare(e: Expr) -> Expr:
    return e.arg if isinstance(e, Cast) else e


def _short(g: Graph, y: Compute, d: str, n: int) -> bool:
    """Whether no reader of y goes beyond the first n along d."""
    axis, sizes = y.dims.index(d), g.program.sizes
    read = [ld.index[axis] for u in g.consumers[y.name] for ld in loads(g.by_name[u].body) if ld.tensor == y.name]
    return all(isinstance(i, Index) and _at_most(sizes, i.dim, n) for i in read)


def _at_most(sizes: Mapping[str, Expr], d: str, n: int) -> bool:
    size = sizes[d]
    return isinstance(size, Const) and int(size.value) <= n


def _without(p: Program, t: Tail) -> Program:
    taken = {*p.names, *p.sizes, *p.syms, *(i.name for i in p.inputs)}
    d = fresh(t.dim, taken)
    rest = tuple(x for x in t.whole.dims if x != t.dim)
    per_row = tuple(Index(x) for x in rest)

    def along(c: Compute, body: Expr, *, reduced: bool = False) -> Compute:
        short = substitute(body, {Index(t.dim): Index(d)})
        dims = tuple(d if x == t.dim else x for x in c.dims)
        return replace(c, dims=dims, body=short, rdims=(d,) if reduced else ())

    top, total = (fresh(f"{c.name}_row", taken) if c.name in p.outputs else c.name for c in (t.maximum, t.total))
    m = Load(top, per_row)
    least = Compute(fresh(f"{t.maximum.name}_finite", taken), rest, t.maximum.dtype,
                    call("where", call("eq", m, -math.inf), 0.0, m), loc=t.maximum.loc)  # fmt: skip
    shift = Load(least.name, per_row)
    own = isinstance(t.beside, Load) and p.dtype_of(t.beside.tensor) is t.whole.dtype
    beside = t.beside if own else Cast(t.beside, t.whole.dtype)  # as it was rounded where it stood in the row
    mass = call("exp", call("sub", beside, call("where", call("eq", m, -math.inf), beside, m)))
    mass = call("where", call("eq", beside, math.inf), math.nan, mass)
    if t.count > 1:
        mass = call("mul", float(t.count), mass)
    one = Load(t.exponential.name, tuple(Index(x) for x in t.whole.dims))
    quotient = call("div", one, call("add", Load(total, per_row), mass))
    result = quotient if not isinstance(t.result.body, Cast) else replace(t.result.body, arg=quotient)
    highest = call("maximum", m, beside)
    parts = [call("mul", Load(total, per_row), call("exp", call("sub", m, highest))),
             call("mul", float(t.count), call("exp", call("sub", beside, highest)))]  # fmt: skip
    made = {
        t.whole.name: (along(t.whole, t.row),),
        **{c.name: () for c in t.before},
        t.maximum.name: (
            replace(along(t.maximum, Load(t.whole.name, one.index), reduced=True), name=top),
            least,
            *_saved(t.maximum, top, highest),
        ),
        t.exponential.name: (
            along(t.exponential, call("exp", call("sub", Load(t.whole.name, one.index), shift))),
        ),
        t.total.name: (
            replace(along(t.total, t.total.body, reduced=True), name=total),
            *_saved(t.total, total, call("add", *parts)),
        ),
        t.result.name: (along(t.result, result),),
    }  # fmt: skip
    body = [x for c in p.body for x in made.get(c.name, (c,))]
    return replace(p, body=tuple(body), sizes={**p.sizes, d: Const(t.kept, DType.I64)})


def _saved(c: Compute, row: str, body: Expr) -> tuple[Compute, ...]:
    """The map that gives a result of the program what it is, if the row's stands for it under another name."""
    return () if row == c.name else (replace(c, reducer=None, rdims=(), body=body),)
