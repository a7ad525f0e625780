"""C++ of a Gemm statement: its dims sorted into batch, row, column and contracted, strides derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used
from tilefold.backends.cpp.affine import split
from tilefold.backends.cpp.loops import NestWriter
from tilefold.backends.cpp.nests import Group, Step, groups
from tilefold.backends.cpp.scope import MEMORY, Facts, Scope, product
from tilefold.backends.cpp.values import Values
from tilefold.tile.ir import Gemm

GEMM_ENTRY = "tilefold_gemm"


@dataclass(frozen=True, slots=True)
class Chain:
    """Dims of the rows, the columns or what is contracted, which both accesses that have them have side by side and in
    this order: where memory has them so too, they are one dim."""

    dims: tuple[str, ...]
    accesses: tuple[Load, Load]


@dataclass(frozen=True, slots=True)
class Roles:
    """The dims of a contraction; each of m, n, k is one loop of `tf::gemm`, None where there is none. chains: by the
    one of m, n and k that is among their dims."""

    batch: tuple[str, ...]
    m: str | None
    n: str | None
    k: str | None
    outer_k: tuple[str, ...]
    chains: Mapping[str, Chain]


def roles(facts: Facts, s: Gemm) -> Roles:
    """n: the last dim of the result that only b has (else a, and the operands change places)."""
    dims = facts.tiles[s.buf].buffer.dims
    c = Load(s.buf, tuple(map(Index, dims)))
    in_a, in_b = _dims(s.a), _dims(s.b)
    plain = {d for d in (*dims, *s.rdims) if _linear(facts, s, d)}
    rows = [d for d in dims if d in plain and d in in_a and d not in in_b]
    cols = [d for d in dims if d in plain and d in in_b and d not in in_a]
    depth = [d for d in s.rdims if d in plain]
    m, n, k = (_main(facts, ds) for ds in (rows, cols, depth))
    batch = tuple(d for d in dims if d not in (m, n))
    chains = {}
    for main, ds, *accesses in ((m, rows, c, s.a), (n, cols, c, s.b), (k, depth, s.a, s.b)):
        chain = _chain(facts, ds, accesses[0], accesses[1])
        if main in chain.dims and len(chain.dims) > 1:
            chains[main] = chain
    return Roles(batch, m, n, k, tuple(d for d in s.rdims if d != k), chains)


def _chain(facts: Facts, dims: Sequence[str], x: Load, y: Load) -> Chain:
    """The last of the dims in the order of the axes of two accesses, as many as are whole; none where orders differ, or
    others stand between them."""
    orders = []
    for access in (x, y):
        at = [n for n, e in enumerate(access.index) if e in [Index(d) for d in dims]]
        uses = sum(d in dims for e in access.index for d in dims_used(e))
        if not at or uses != len(at) or at != list(range(at[0], at[0] + len(dims))):
            return Chain((), (x, y))
        orders.append(tuple(d for n in at for d in dims_used(access.index[n])))
    order = orders[0] if orders[0] == orders[1] else ()
    parts = [n for n, d in enumerate(order) if facts.ranges[d][0] != "0"]
    return Chain(order[parts[-1] :] if parts else order, (x, y))


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
        _write(facts, scope, Step(s.buf, tuple(map(Index, dims)), dims, s.a * s.b, s.rdims, "sum", s.accumulate))
        return
    facts.gemms.setdefault(gemm_types(facts, s))
    accumulate = "true" if s.accumulate else "false"
    writer = NestWriter(facts, Scope(frozenset(), scope.lines), Group((), (), None))
    v = writer.values
    clears = bool(r.outer_k) and not s.accumulate and not all(_filled(facts, d) for d in r.outer_k)
    if clears:
        _write(facts, scope, Step(s.buf, tuple(map(Index, tile.buffer.dims)), tile.buffer.dims, Const(0.0, DType.F32)))
    joined = {d: _joined(facts, v, chain) for d, chain in r.chains.items()}
    once = {d: joined[main] for main, chain in r.chains.items() for d in chain.dims if d != main}
    for d in (*r.batch, *r.outer_k):
        lo, hi = facts.ranges[d]
        writer.loop(d, stop=f"({once[d]} ? {lo} + 1 : {hi})" if d in once else None)
    a = _operand(v, facts, s.a, r.m, r.k, joined, r)
    b = _operand(v, facts, s.b, r.k, r.n, joined, r)
    c = _operand(v, facts, Load(s.buf, tuple(map(Index, tile.buffer.dims))), r.m, r.n, joined, r)
    extents = ", ".join(_extent(facts, d, joined, r) for d in (r.m, r.n, r.k))
    later = " || ".join(f"{d} > {facts.ranges[d][0]}" for d in r.outer_k) or "false"
    accumulate = "true" if s.accumulate or clears else later
    v.line(f"{gemm_name(gemm_types(facts, s))}({extents}, {a}, {b}, {c}, {accumulate});")
    for _ in (*r.batch, *r.outer_k):
        writer.close()


def _write(facts: Facts, scope: Scope, step: Step) -> None:
    """A statement that is no product of matrices, as loops."""
    for group in groups((step,), facts):
        NestWriter(facts, Scope(frozenset(), scope.lines), group).write()


def _filled(facts: Facts, dim: str) -> bool:
    """Whether a dim certainly has an index."""
    size = facts.kernel.sizes[dim]
    return isinstance(size, Const) and int(size.value) > 0


def _joined(facts: Facts, v: Values, chain: Chain) -> str:
    """The name of whether memory has the dims of a chain as one."""
    tests = []
    for x in chain.accesses:
        strides = [_axis_stride(facts, x, d) for d in chain.dims]
        lengths = [_length(facts, d) for d in chain.dims[1:]]
        tests += [f"{s} == {product(n, t)}" for s, t, n in zip(strides, strides[1:], lengths, strict=False)]
    name = facts.name("joined")
    v.line(f"const bool {name} = {' && '.join(tests)};")
    return name


def _axis_stride(facts: Facts, x: Load, dim: str) -> str:
    return facts.stride(x.tensor, x.index.index(Index(dim)))


def _extent(facts: Facts, dim: str | None, joined: Mapping[str, str], r: Roles) -> str:
    """Length of a dim of a product, or of what it is one with."""
    own = _length(facts, dim)
    if dim is None or dim not in joined:
        return own
    return f"({joined[dim]} ? {product(*(f'({_length(facts, d)})' for d in r.chains[dim].dims))} : {own})"


def _length(facts: Facts, dim: str | None) -> str:
    if dim is None:
        return "1"
    lo, hi = facts.ranges[dim]
    return hi if lo == "0" else f"{hi} - {lo}"


def _operand(
    v: Values, facts: Facts, x: Load, first: str | None, second: str | None, joined: Mapping[str, str], r: Roles
) -> str:
    """`pointer, stride of first, stride of second`, or of what these are one with, the pointer at the start of both
    ranges."""
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
        if dim is not None and dim in joined:
            strides[dim] = f"({joined[dim]} ? {_axis_stride(facts, x, r.chains[dim].dims[-1])} : {strides[dim]})"
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
