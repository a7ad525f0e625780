"""Convolutions with what follows them in one call of a library: relu(conv(x, w) + shift + z).

Law: a[o] conv(x, w)[n, o, y] + b[o] = conv(x, a w)[n, o, y] + b[o], with (a w)[o, c, k] = a[o] w[o, c, k]: what scales
a channel of the result (a batch norm with known statistics) scales the weights that make it. They are rounded once more
than the program says, the convolution's result once less. Side conditions: one map reads the result, and what it
multiplies and adds depends on the channel alone; a residual z may be added before the maximum with 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used, loads, transform
from tilefold.names import free
from tilefold.tensor.analysis import Graph
from tilefold.tensor.convolution import MOST_SPACE, Convolution, Space, axis_of, convolution
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product


@dataclass(frozen=True, slots=True)
class Tail:
    """The map behind a convolution: maximum(scale * result + shift + added, zero). scale (None: 1) and shift (None: 0)
    depend on the channel alone, which is `outs` (groups of channels, where a convolution of groups reads the map);
    added: an element of another tensor for each of the result."""

    conv: Compute
    form: Convolution
    map: Compute
    outs: tuple[str, ...]
    scale: Expr | None
    shift: Expr | None
    added: Load | None
    zero: Const


def tail_of(g: Graph, c: Compute) -> Tail | None:
    """What follows a convolution of one group, where a library's call can do it too."""
    form = convolution(c, g.program) or _pointwise(g, c)
    readers = g.consumers[c.name]
    if form is None or form.groups or form.spread != 1 or not form.outs or len(readers) != 1:
        return None
    m = g.by_name[readers[0]]
    if c.name in g.program.outputs or m.reducer is not None or m.dims != c.dims or m.dtype is not c.dtype:
        return None
    match m.body:
        case Call("maximum", (inner, Const() as zero)) if zero.value == 0:
            pass
        case _:
            return None
    added: Load | None = None
    match inner:
        case Call("add", (a, Load() as z)) if _every_element(z, c):
            inner, added = a, z
        case Call("add", (Load() as z, a)) if _every_element(z, c):
            inner, added = a, z
    if not _alone(inner, c):
        return None
    found = _affine(inner, c.name, frozenset(form.outs))
    if found is None or found[0] is None:
        return None
    scale, shift = found
    return Tail(c, form, m, form.outs, None if scale == _ONE else scale, shift, added, zero)


def _pointwise(g: Graph, c: Compute) -> Convolution | None:
    """A convolution of single taps with channels behind places, which elsewhere is a product of matrices."""
    p, sizes = library_product(c, g.program.sizes), g.program.sizes
    if p is None or p.loads is None or p.batch or "conv" not in c.origin or len(p.depth) != 1:
        return None
    of_rows = c.dims[0] in p.rows
    x, w = p.loads if of_rows else p.loads[::-1]
    outs, places = (p.cols, p.rows) if of_rows else (p.rows, p.cols)
    if not outs or not 1 < len(places) <= MOST_SPACE + 1 or c.dims != (*places, *outs):
        return None
    dtype = g.program.dtype_of(x.tensor)
    if any(not isinstance(i, Index) for i in x.index) or g.program.dtype_of(w.tensor) is not dtype:
        return None
    space = tuple(Space(axis_of(x, d), sizes[d], d, None, 1, 1, 0) for d in places[1:])
    return Convolution(x, w, dtype, places[:1], (), outs, p.depth, 1, space)


_ONE = Const(1.0, DType.F32)
_SUM: dict[str, Callable[[Expr], Expr]] = {"add": lambda e: e, "sub": lambda e: call("neg", e)}


def _every_element(ld: Load, c: Compute) -> bool:
    """Whether it reads one element of another tensor for each of the result, along plain axes."""
    dims = [i.dim for i in ld.index if isinstance(i, Index)]
    return ld.tensor != c.name and len(ld.index) == len(dims) and sorted(dims) == sorted(c.dims)


def _alone(e: Expr, c: Compute) -> bool:
    """Whether the convolution's result is read once, where it is made."""
    read = [ld for ld in loads(e) if ld.tensor == c.name]
    return read == [Load(c.name, tuple(map(Index, c.dims)))]


def _affine(e: Expr, name: str, kept: frozenset[str]) -> tuple[Expr | None, Expr | None] | None:
    """(a, b) with e = a x + b for the tensor x of this name; a, b depend on `kept` alone, None: 0."""
    if all(ld.tensor != name for ld in loads(e)):
        return (None, e) if dims_used(e) <= kept else None
    match e:
        case Load():
            return _ONE, None
        case Cast(arg, dtype) if dtype.is_float:
            return _affine(arg, name, kept)
        case Call(("add" | "sub") as op, (x, y)):
            first, second = _affine(x, name, kept), _affine(y, name, kept)
            if first is None or second is None or (op == "sub" and second[0] is not None):
                return None
            (a, b), (c, d) = first, second
            if a is not None and c is not None:
                return None
            turned = None if d is None else _SUM[op](d)
            return a if a is not None else c, b if turned is None else turned if b is None else call("add", b, turned)
        case Call(("mul" | "div") as op, (x, y)):
            first, second = _affine(x, name, kept), _affine(y, name, kept)
            if first is None or second is None or (op == "div" and second[0] is not None):
                return None
            (a, b), by = (first, second[1]) if second[0] is None else (second, first[1])
            if by is None or (first[0] is not None and second[0] is not None):
                return None
            grown = tuple(None if t is None else by if (t, op) == (_ONE, "mul") else call(op, t, by) for t in (a, b))
            return grown[0], grown[1]
    return None


def tails_in_calls(p: Program, wanted: Callable[[Graph, Tail], bool]) -> tuple[Program, frozenset[str]]:
    """The program with scales in weights and tails in the form that a library's call has, where `wanted` says so, and
    the names of those convolutions."""
    g = Graph.of(p)
    tails = [t for t in (tail_of(g, c) for c in p.body) if t is not None and wanted(g, t)]
    for t in tails:
        p = _rewritten(p, t)
    return p, frozenset(t.conv.name for t in tails)


def of_call(g: Graph, c: Compute) -> tuple[Tail, Load | None] | None:
    """The tail of a convolution that already has the library's form, and its shift, a tensor; None where it has not."""
    t = tail_of(g, c)
    if t is None or t.scale is not None or (t.added is not None and g.program.dtype_of(t.added.tensor) is not c.dtype):
        return None
    match t.shift:
        case None:
            return t, None
        case Load(tensor, index) if index == tuple(map(Index, t.outs)) and g.program.dtype_of(tensor) is c.dtype:
            return t, t.shift
    return None


def _rewritten(p: Program, t: Tail) -> Program:
    taken = {i.name for i in p.inputs} | {r for m in p.body for r in m.results} | set(p.sizes) | set(p.syms)
    made: list[Compute] = []

    def store(what: str, dims: tuple[str, ...], dtype: DType, body: Expr) -> str:
        name = free(f"{t.conv.name}_{what}", taken | {m.name for m in made})
        made.append(Compute(name, dims, dtype, body, loc=t.map.loc, origin=t.map.origin))
        return name

    c, w, at = t.conv, t.form.w, tuple(map(Index, t.outs))
    if t.scale is not None:
        scale = store("scale", t.outs, DType.F32, t.scale)
        dims = tuple(i.dim for i in w.index if isinstance(i, Index))
        weight = store("weight", dims, p.dtype_of(w.tensor), call("mul", w, Load(scale, at)))
        scaled = Load(weight, tuple(map(Index, dims)))
        c = replace(c, body=transform(c.body, lambda e: scaled if e == w else None))
    body: Expr = Load(c.name, tuple(map(Index, c.dims)))
    if t.shift is not None:
        body = call("add", body, Load(store("shift", t.outs, c.dtype, t.shift), at))
    if t.added is not None:
        body = call("add", body, t.added)
    tail = replace(t.map, body=Call("maximum", (body, t.zero)))
    out: list[Compute] = []
    for m in p.body:
        if m.name == t.map.name:
            out += [*made, c, tail]
        elif m.name != c.name:
            out.append(m)
    return replace(p, body=tuple(out))
