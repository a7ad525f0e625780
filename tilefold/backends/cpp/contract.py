"""C++ of a Gemm statement: its dims sorted into batch, row, column and contracted, strides derived."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used
from tilefold.backends.cpp.affine import split
from tilefold.backends.cpp.loops import NestWriter
from tilefold.backends.cpp.nests import Group, Step
from tilefold.backends.cpp.scope import MEMORY, Facts, Scope, product
from tilefold.backends.cpp.values import Values
from tilefold.tile.ir import Gemm

GEMM_ENTRY = "tilefold_gemm"


@dataclass(frozen=True, slots=True)
class Roles:
    """The dims of a contraction; each of m, n, k is one loop of `tf::gemm`, None where there is none."""

    batch: tuple[str, ...]
    m: str | None
    n: str | None
    k: str | None
    outer_k: tuple[str, ...]


def roles(facts: Facts, s: Gemm) -> Roles:
    """n: the last dim of the result that only b has (else a, and the operands change places)."""
    dims = facts.tiles[s.buf].buffer.dims
    in_a, in_b = _dims(s.a), _dims(s.b)
    plain = {d for d in (*dims, *s.rdims) if _linear(facts, s, d)}
    rows = [d for d in dims if d in plain and d in in_a and d not in in_b]
    cols = [d for d in dims if d in plain and d in in_b and d not in in_a]
    m, n = _main(facts, rows), _main(facts, cols)
    k = _main(facts, [d for d in s.rdims if d in plain])
    batch = tuple(d for d in dims if d not in (m, n))
    return Roles(batch, m, n, k, tuple(d for d in s.rdims if d != k))


def _dims(x: Load) -> frozenset[str]:
    return frozenset(d for e in x.index for d in dims_used(e))


def _linear(facts: Facts, s: Gemm, dim: str) -> bool:
    """Whether the operands' addresses move by a constant stride with `dim`."""
    return all(split(e, dim, facts.kernel.sizes) is not None for x in (s.a, s.b) for e in x.index)


def _main(facts: Facts, dims: list[str]) -> str | None:
    """The longest dim (the last of equals; dims of run-time length count as long)."""
    if not dims:
        return None
    return max(reversed(dims), key=lambda d: facts.static.get(d) or 1 << 30)


GemmTypes = tuple[DType, DType, DType]


def gemm_name(types: GemmTypes) -> str:
    """Name of the compiled multiplication of elements a, b into c."""
    return "gemm_" + "_".join(t.value for t in types)


def gemm_source(types: GemmTypes) -> str:
    """The multiplication for one combination of element types, as a source of its own."""
    a, b, c = (MEMORY[t] for t in types)
    return f"""// Tile matrix multiplication: {types[0].value} x {types[1].value} -> {types[2].value}
#include <tilefold_gemm.h>

extern "C" TF_EXPORT void {GEMM_ENTRY}(int64_t M, int64_t N, int64_t K, const void* a, int64_t sam, int64_t sak,
                                       const void* b, int64_t sbk, int64_t sbn, void* c, int64_t scm, int64_t scn,
                                       bool accumulate) {{
  tf::gemm(M, N, K, (const {a}*)a, sam, sak, (const {b}*)b, sbk, sbn, ({c}*)c, scm, scn, accumulate);
}}
"""


def gemm_types(facts: Facts, s: Gemm) -> GemmTypes:
    return facts.dtype(s.a.tensor), facts.dtype(s.b.tensor), facts.dtype(s.buf)


def write_gemm(facts: Facts, scope: Scope, s: Gemm) -> None:
    """Write `s` as calls of `tf::gemm`, or as a plain reduction where one operand is integer and one is not."""
    r = roles(facts, s)
    tile = facts.tiles[s.buf]
    mixed = any(facts.dtype(x.tensor) is DType.BOOL for x in (s.a, s.b)) or (
        facts.dtype(s.a.tensor).is_float != facts.dtype(s.b.tensor).is_float
    )
    if mixed:
        dims = tile.buffer.dims
        step = Step(s.buf, tuple(map(Index, dims)), dims, s.a * s.b, s.rdims, "sum", s.accumulate)
        NestWriter(facts, Scope(frozenset(), scope.lines), Group((step,), dims, None)).write()
        return
    facts.gemms.setdefault(gemm_types(facts, s))
    accumulate = "true" if s.accumulate else "false"
    writer = NestWriter(facts, Scope(frozenset(), scope.lines), Group((), (), None))
    v = writer.values
    if r.outer_k and not s.accumulate:
        zero = Step(s.buf, tuple(map(Index, tile.buffer.dims)), tile.buffer.dims, Const(0.0, DType.F32))
        NestWriter(facts, Scope(frozenset(), scope.lines), Group((zero,), zero.dims, None)).write()
        accumulate = "true"
    for d in (*r.batch, *r.outer_k):
        writer.loop(d)
    a = _operand(v, facts, s.a, r.m, r.k)
    b = _operand(v, facts, s.b, r.k, r.n)
    c = _operand(v, facts, Load(s.buf, tuple(map(Index, tile.buffer.dims))), r.m, r.n)
    extents = ", ".join(_length(facts, d) for d in (r.m, r.n, r.k))
    v.line(f"{gemm_name(gemm_types(facts, s))}({extents}, {a}, {b}, {c}, {accumulate});")
    for _ in (*r.batch, *r.outer_k):
        writer.close()


def _length(facts: Facts, dim: str | None) -> str:
    if dim is None:
        return "1"
    lo, hi = facts.ranges[dim]
    return hi if lo == "0" else f"{hi} - {lo}"


def _operand(v: Values, facts: Facts, x: Load, first: str | None, second: str | None) -> str:
    """`pointer, stride of first, stride of second`, the pointer at the start of both ranges."""
    strides = {d: "1" if d is None else "0" for d in (first, second)}
    starts: list[str] = []
    for dim in (first, second):
        steps = []
        for axis, e in enumerate(x.index):
            parts = split(e, dim, facts.kernel.sizes) if dim is not None else None
            if parts is not None and parts[0] != 0:
                steps.append(product(str(parts[0]), facts.stride(x.tensor, axis)))
        if steps:
            strides[dim] = " + ".join(steps)
    for axis, e in enumerate(x.index):
        at = _place(v, facts, x.tensor, axis, e, tuple(d for d in (first, second) if d is not None))
        starts.append(product(at, facts.stride(x.tensor, axis)))
    offset = " + ".join(t for t in starts if t != "0")
    base = facts.names[x.tensor]
    return f"{base + ' + ' + offset if offset else base}, {strides[first]}, {strides[second]}"


def _place(v: Values, facts: Facts, tensor: str, axis: int, e: Expr, moving: tuple[str, ...]) -> str:
    """Position along an axis at the start of the ranges of the moving dims."""
    terms: list[str] = []
    for dim in moving:
        parts = split(e, dim, facts.kernel.sizes)
        assert parts is not None
        c, e = parts
        if c and facts.ranges[dim][0] != "0":
            terms.append(product(str(c), facts.ranges[dim][0]))
    tile = facts.tiles.get(tensor)
    if e != Const(0, DType.I64):
        plain = not terms and tile is None
        terms.append(v.place(tensor, axis, e) if plain else v.address(e))
    origin = tile.origin[axis] if tile is not None else "0"
    if origin != "0":
        if terms == [origin]:
            return "0"
        terms.append(f"-{origin}")
    if not terms:
        return "0"
    return terms[0] if len(terms) == 1 and " " not in terms[0] else f"({' + '.join(terms)})"
