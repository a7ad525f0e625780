"""What is read across is laid down along the strip first.

Element by element such a read costs an instruction and a cache line each. Where both dims are loops of a nest, some
rows at a time are read along the dim that is contiguous, transposed in registers and kept in a tile that fits the first
cache; the nest then reads that tile.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.expr import Expr, Index, Load, dims_used, lit, loads, substitute
from tilefold.backends.cpp.across import Across, across, pitch, rows_at_once
from tilefold.backends.cpp.nests import Group
from tilefold.backends.cpp.scope import MEMORY, Facts, Scope, Tile, product
from tilefold.backends.cpp.values import Values
from tilefold.tile.ir import Buffer


def reads_across(g: Group, facts: Facts) -> tuple[str, tuple[Across, ...]] | None:
    """The shared dim along which most reads are contiguous that the strip goes across, and those reads, if any."""
    if g.strip is None:
        return None
    written = {s.target for s in g.steps}
    inner = {d for s in g.steps for d in s.all_dims} - set(g.common)
    reads = dict.fromkeys(
        x for s in g.steps for x in loads(s.expr) if x.tensor not in written and not _needs(x, inner, written)
    )
    found = {d: tuple(t for x in reads if (t := across(x, d, g.strip, facts)) is not None) for d in g.common}
    best = max(found, key=lambda d: len(found[d]))
    return (best, found[best]) if found[best] else None


def _needs(x: Load, dims: set[str], tensors: set[str]) -> bool:
    """Whether its place depends on one of `dims`, or on what is in one of `tensors`."""
    return any(not dims.isdisjoint(dims_used(e)) or any(y.tensor in tensors for y in loads(e)) for e in x.index)


def lay_down(v: Values, g: Group, dim: str, reads: tuple[Across, ...]) -> Group:
    """Open the loop over `dim`, in blocks of rows (two scopes), with the tiles of `reads`; the nest that reads them."""
    f = v.facts
    assert g.strip is not None
    (lo, hi), (start, stop), columns = f.ranges[dim], f.ranges[g.strip], f.static[g.strip]
    assert columns is not None
    first, end, step, rows = f.name(f"{dim}_row"), f.name(f"{dim}_rows"), pitch(columns), rows_at_once(reads, f)
    table: dict[Expr, Expr] = {}
    copies = []
    block = Scope(v.scopes[-1].dims, [f"for (int64_t {first} = {lo}; {first} < {hi}; {first} += {rows}) {{"])
    for t in reads:
        x, dtype, stride = t.load, f.dtype(t.load.tensor), f.stride(t.load.tensor, t.strip)
        name = f.name(f"{x.tensor}_turned")
        f.names[name] = name
        buffer = Buffer(name, (dim, g.strip), (lit(rows), lit(columns)), dtype)
        f.tiles[name] = Tile(buffer, (first, start), (str(step), "1"))
        table[x] = Load(name, (Index(dim), Index(g.strip)))
        v.line(f"alignas(64) {MEMORY[dtype]} {name}[{rows * step}];")
        base = v.pointer(x.tensor, x.index, frozenset({t.contiguous, t.strip}))
        row, column = (f"({at} + {v.address(e)})" for at, e in zip((first, start), t.offsets, strict=True))
        place = f"{base} + {row} + {product(column, stride)}"
        copies.append(f"tf::turn({name}, {step}, {place}, {stride}, {end} - {first}, {stop} - {start});")
    v.scopes.append(block)
    block.lines += [f"const int64_t {end} = tf::min64({first} + {rows}, {hi});", *copies]
    v.scopes.append(Scope(block.dims | {dim}, [f"for (int64_t {dim} = {first}; {dim} < {end}; ++{dim}) {{"]))
    return replace(g, steps=tuple(replace(s, expr=substitute(s.expr, table)) for s in g.steps))
