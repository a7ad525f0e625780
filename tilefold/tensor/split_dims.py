"""Split dims so that views become plain indices.

Law (mixed radix): for extents N = H D, n -> (n // D, n % D) is a bijection between [0, N) and
[0, H) x [0, D); so a dim, an axis of a result, or an axis of a program input may be cut in two,
every index e of it becoming the pair (e // D, e % D). A reduction over n equals one over (h, d),
and the flat position that argmax reports is unchanged.

A cut is made where it is asked for: an axis is read at h D + d with d of extent D; or a statement
uses both n // D and n % D, unless one of them only finds the place that the other is at
(`k[table[n // D], n % D]`: keys in pages are one stream). A constant offset (reading part t of a
fused projection at t D + d) asks only if every reader of the axis agrees, and nothing of a convolution's
gradient, which a library computes whole (that of a concatenation is read in parts). `h // 4` alone (a head
shared by 4) does not ask. What windows that overlap are read through, y + k, stays whole: in digits
they are no windows that anybody recognises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    Size,
    Sym,
    children,
    dims_used,
    loads,
    ops_used,
    substitute,
    walk,
)
from tilefold.names import free
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.convolution_gradients import ASKED
from tilefold.tensor.index_simplify import divide, poly, same, simplify, to_expr
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.rewrite import dims_of, prune_dims, rename_loads
from tilefold.tensor.unify import unify

#: Extents that the axes of each input were cut into, by input name: one tuple an original axis.
Layouts = Mapping[str, tuple[tuple[Expr, ...], ...]]
_Cuts = dict[str, Expr]


def split_dims(p: Program) -> tuple[Program, Layouts]:
    """Cut until nothing asks for it; also how the program's inputs have to be viewed."""
    layouts: dict[str, tuple[tuple[Expr, ...], ...]] = {i.name: tuple((s,) for s in i.shape) for i in p.inputs}
    p = unify(p)
    while True:
        cuts = _demands(p)
        if not cuts:
            return p, layouts
        for i in p.inputs:
            layouts[i.name] = _cut_layout(i, layouts[i.name], cuts)
        p = unify(cut(p, cuts))


def _cut_layout(i: Input, layout: tuple[tuple[Expr, ...], ...], cuts: _Cuts) -> tuple[tuple[Expr, ...], ...]:
    out, axis = [], 0
    for group in layout:
        new: list[Expr] = []
        for extent in group:
            by = cuts.get(f"{i.name}@{axis}")
            new += [extent] if by is None else [_quotient(extent, by), by]
            axis += 1
        out.append(tuple(new))
    return tuple(out)


def _quotient(n: Expr, by: Expr) -> Expr:
    return to_expr(divide(poly(n, {}), poly(by, {}))[0])


def _divides(by: Expr, n: Expr) -> bool:
    """Whether by is a proper divisor of n, for all values of the symbols."""
    d, m = poly(by, {}), poly(n, {})
    return bool(d) and d not in (m, {(): 1}) and not divide(m, d)[1]


# -- demands ----------------------------------------------------------------------------------


def _demands(p: Program) -> _Cuts:
    """Dim or `input@axis` -> extent of the inner part."""
    cuts: _Cuts = {}
    dims = {r: c.dims for c in p.body for r in c.results}
    shapes = {i.name: i.shape for i in p.inputs}
    fixed = {d for c in p.body if c.reducer == "topk" for d in (*c.rdims, c.dims[-1])}
    fixed |= {d for c in p.body if is_windowed(c) for d in _in_windows(c, p.sizes, dims, shapes)}
    offered: dict[str, list[Expr | None]] = {}
    # groups of a convolution's channels go before other digits of them
    for c in sorted(p.body, key=lambda c: c.reducer is None or "conv" not in c.origin):
        for d, by in _self_demands(c, p.sizes):
            if d not in fixed:
                cuts.setdefault(d, by)
        for axis, extent, i in _accesses(c, p.sizes, dims, shapes):
            if i == Index(axis):
                continue
            wish, firm = _radix(i, extent, p.sizes)
            if firm and wish is not None and axis not in fixed:
                cuts.setdefault(axis, wish)
            elif not firm:
                offered.setdefault(axis, []).append(wish)
    whole = _output_dims(p) | {d for c in p.body if ASKED in c.origin and is_windowed(c) for d in dims_of(c)}
    for axis, wishes in offered.items():
        first = wishes[0]
        if first is None or any(w != first for w in wishes):
            continue
        if axis not in fixed and axis not in cuts and axis not in whole:
            cuts[axis] = first
    return cuts


def _output_dims(p: Program) -> set[str]:
    return {d for c in p.body if set(c.results) & set(p.outputs) for d in c.dims}


def _accesses(
    c: Compute, sizes: Mapping[str, Expr], dims: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[Expr, ...]]
) -> Iterator[tuple[str, Expr, Expr]]:
    """(axis, its extent, index) of every axis that the statement reads."""
    for ld in loads(c.body):
        for n, i in enumerate(ld.index):
            if ld.tensor in dims:
                d = dims[ld.tensor][n]
                yield d, sizes[d], i
            else:
                yield f"{ld.tensor}@{n}", shapes[ld.tensor][n], i


def _in_windows(
    c: Compute, sizes: Mapping[str, Expr], dims: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[Expr, ...]]
) -> Iterator[str]:
    """Axes that a convolution reads through windows that overlap, and the dims of those windows."""
    for axis, extent, i in _accesses(c, sizes, dims, shapes):
        used = dims_used(i)
        plain = all(all(isinstance(n, Index) for n in mono) for mono in poly(i, {}))
        if plain and used & set(c.dims) and used & set(c.rdims) and _radix(i, extent, sizes)[0] is None:
            yield axis
            yield from used


def _self_demands(c: Compute, sizes: Mapping[str, Expr]) -> Iterator[tuple[str, Expr]]:
    """Dims used through both `n // D` and `n % D`; the largest D first."""
    own = dims_of(c)
    both = [(d, by) for d, by in _digits(c.body) if d in own and _divides(by, sizes[d])]
    yield from sorted(both, key=lambda pair: (not isinstance(pair[1], Const), -_value(pair[1]), pair[0], repr(pair[1])))


@lru_cache(maxsize=1 << 14)
def _digits(e: Expr) -> frozenset[tuple[str, Expr]]:
    """(d, by) for each d that is used through both `d // by` and `d % by`. Most statements stay as they are from one
    round of cuts to the next."""
    if not {"floordiv", "mod"} <= ops_used(e):
        return frozenset()
    found: dict[tuple[str, bool], set[tuple[str, Expr]]] = {}
    for n, place in _with_places(e):
        match n:
            case Call("floordiv" | "mod" as op, (Index(d), by)):
                found.setdefault((op, place), set()).add((d, by))
    both = (found.get(("floordiv", x), set()) & found.get(("mod", x), set()) for x in (False, True))
    return frozenset[tuple[str, Expr]]().union(*both)


def _with_places(e: Expr) -> Iterator[tuple[Expr, bool]]:
    """Every node, once, and whether it is of a load in an index of another load: what gives a place."""
    todo, met = [(e, False, False)], set[tuple[int, bool, bool]]()
    while todo:
        n, indexed, place = todo.pop()
        if (id(n), indexed, place) in met:
            continue
        met.add((id(n), indexed, place))
        read = isinstance(n, Load)
        place = place or (indexed and read)
        yield n, place
        todo += [(k, indexed or read, place) for k in children(n)]


def _value(e: Expr) -> int:
    return int(e.value) if isinstance(e, Const) else 0


def _radix(i: Expr, extent: Expr, sizes: Mapping[str, Expr]) -> tuple[Expr | None, bool]:
    """(D, firm) if the index is hi D + lo with lo a dim of extent D; firm where hi varies.

    (None, False): an index that fits no cut; (None, True): a plain index of the whole axis, or a
    constant, which fits every cut.
    """
    if isinstance(i, Const) or (isinstance(i, Index) and same(sizes[i.dim], extent)):
        return None, not isinstance(i, Index)
    p = poly(i, sizes)
    for mono, coef in p.items():
        if coef != 1 or len(mono) != 1 or not isinstance(mono[0], Index):
            continue
        by = simplify(sizes[mono[0].dim], {})
        if not _divides(by, extent) or simplify(Call("mod", (i, by)), sizes) != mono[0]:
            continue
        hi = simplify(Call("floordiv", (i, by)), sizes)
        if any(isinstance(n, Call) and n.op in ("floordiv", "mod") and not _shared_head(n) for n in walk(hi)):
            continue
        return by, not isinstance(hi, Const)
    return None, False


def _shared_head(e: Expr) -> bool:
    """h // 4: the head that 4 read."""
    match e:
        case Call("floordiv", (Index(), Const())):
            return True
    return False


# -- applying ---------------------------------------------------------------------------------


def cut(p: Program, cuts: Mapping[str, Expr]) -> Program:
    """Dims (and axes `input@n`) replaced by pairs, the inner of the given extent; extents must divide.

    A dim d becomes dh, dl. Inputs whose axes are not cut are read at dh D + dl.
    """
    sizes = dict(p.sizes)
    pair: dict[str, tuple[str, str]] = {}
    for d, by in cuts.items():
        if d in sizes:
            pair[d] = (free(f"{d}h", sizes), free(f"{d}l", sizes))
            sizes[pair[d][0]], sizes[pair[d][1]] = _quotient(sizes[d], by), by
    inputs = tuple(replace(i, shape=_cut_shape(i, cuts)) for i in p.inputs)
    axes = {r: c.dims for c in p.body for r in c.results}
    axes |= {i.name: tuple(f"{i.name}@{n}" for n in range(len(i.shape))) for i in p.inputs}
    table: dict[Expr, Expr] = {}
    for d, (hi, lo) in pair.items():
        table[Index(d)] = Index(hi) * cuts[d] + Index(lo)
        table[Size(d)] = Call("mul", (Size(hi), Size(lo)))
    body = tuple(_cut_compute(c, cuts, pair, table, axes, sizes) for c in p.body)
    return prune_dims(replace(p, sizes=sizes, inputs=inputs, body=body))


def _cut_shape(i: Input, cuts: Mapping[str, Expr]) -> tuple[Expr, ...]:
    out: list[Expr] = []
    for n, extent in enumerate(i.shape):
        by = cuts.get(f"{i.name}@{n}")
        out += [extent] if by is None else [_quotient(extent, by), by]
    return tuple(out)


def _cut_compute(
    c: Compute,
    cuts: Mapping[str, Expr],
    pair: Mapping[str, tuple[str, str]],
    table: Mapping[Expr, Expr],
    axes: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, Expr],
) -> Compute:
    """One statement with its dims and the axes that it reads cut. table: what stands for the dims."""

    def reindex(ld: Load) -> Expr | None:
        out: list[Expr] = []
        for axis, i in zip(axes[ld.tensor], ld.index, strict=True):
            by = cuts.get(axis)
            parts = (i,) if by is None else (Call("floordiv", (i, by)), Call("mod", (i, by)))
            out += [simplify(e, sizes) for e in parts]
        return Load(ld.tensor, tuple(out))

    touched = any(d in pair for d in dims_of(c)) or any(isinstance(n, Size) and n.dim in pair for n in walk(c.body))
    if not touched and not any(a in cuts for ld in loads(c.body) for a in axes[ld.tensor]):
        return c
    cut = substitute(c.body, table)
    e = _tidy(rename_loads(cut, reindex), sizes)
    return replace(c, dims=_cut_names(c.dims, pair), rdims=_cut_names(c.rdims, pair), body=e)


def _cut_names(dims: tuple[str, ...], pair: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(n for d in dims for n in (pair.get(d) or (d,)))


def _tidy(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """Simplify index arithmetic that stands outside of loads (masks over indices)."""
    match e:
        case Call("floordiv" | "mod" | "add" | "sub" | "mul", args) if all(map(_index_only, args)):
            return e if any(isinstance(n, Size) for n in walk(e)) else simplify(e, sizes)
        case Call(op, args):
            return Call(op, tuple(_tidy(a, sizes) for a in args))
        case _:
            kids = getattr(e, "arg", None)
            return replace(e, arg=_tidy(kids, sizes)) if isinstance(kids, Expr) else e  # type: ignore[type-var]


def _index_only(e: Expr) -> bool:
    match e:
        case Call("floordiv" | "mod" | "add" | "sub" | "mul" | "neg", args):
            return all(map(_index_only, args))
        case Const(_, dtype):
            return dtype is DType.I64
    return isinstance(e, Index | Size | Sym)
