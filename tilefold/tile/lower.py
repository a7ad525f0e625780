"""Block program to tile kernel: buffers for values, tiles for blocks, operations for statements.

One-to-one: Init -> Alloc + Fill; Let -> Alloc + Map, Reduce, Gemm or Select; Update -> Map;
Accumulate -> Reduce, Gemm or Select; Store -> Store; `forall` -> grid, `for` -> For. What is
decided here is memory: layouts and packs (`tile.layout`), tile sizes (`tile.sizes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Const, Expr, Size, lit, tensors_read
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk
from tilefold.block.text import show_nodes
from tilefold.tensor.analysis import is_static
from tilefold.tile import ir
from tilefold.tile.layout import UnitAxes, arrange, product_of
from tilefold.tile.sizes import choose_tiles


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """`unit`: tensor -> axis of stride 1 (absent: the last). `tiles` overrides chosen tile sizes.

    arranged: choose the memory order of values and pack operands (back ends that keep values in memory).
    """

    unit: Mapping[str, int | None] | None = None
    tiles: Mapping[str, int] | None = None
    arranged: bool = True


def lower(block: Block, options: LowerOptions | None = None, note: str = "") -> ir.Kernel:
    """The kernel of a block program that is one nest of `forall` loops."""
    options = options or LowerOptions()
    unit = _unit_axes(block, options.unit or {})
    arranged = arrange(block, unit) if options.arranged else block
    tiles = {**choose_tiles(arranged), **(options.tiles or {})}
    tiles |= {n.dim: 1 for n in walk(arranged.body) if isinstance(n, Loop) and n.single}
    grid: list[ir.Tiled] = []
    body = arranged.body
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind == "forall":
        grid.append(ir.Tiled(body[0].dim, tiles[body[0].dim]))
        body = body[0].body
    lowering = _Lowering(arranged, tiles)
    stmts = lowering.body(body, frozenset(t.dim for t in grid))
    used = {t for n in walk(arranged.body) for e in exprs_of(n) for t in tensors_read(e)}
    tensors = [ir.TensorParam(i.name, i.dtype, i.shape, "in", unit[i.name]) for i in block.inputs if i.name in used]
    for r in block.results:
        shape = tuple(block.sizes[d] for d in r.dims)
        tensors.append(ir.TensorParam(r.name, r.dtype, shape, "out", unit[r.name]))
    listing = "\n".join(show_nodes(block.body))
    return ir.Kernel(block.name, block.syms, block.sizes, tuple(tensors), tuple(grid), stmts, note, listing)


def _unit_axes(block: Block, given: Mapping[str, int | None]) -> UnitAxes:
    rank = {i.name: len(i.shape) for i in block.inputs} | {r.name: len(r.dims) for r in block.results}
    return {t: given.get(t, n - 1 if n else None) for t, n in rank.items()}


class _Lowering:
    def __init__(self, block: Block, tiles: Mapping[str, int]):
        self.block, self.tiles = block, tiles
        self.dims = {n.name: n.dims for n in walk(block.body) if isinstance(n, Let | Init)}
        self.index: dict[str, str] = {}

    def body(self, nodes: tuple[Node, ...], loops: frozenset[str]) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for n in nodes:
            self.node(n, loops, out)
        return tuple(out)

    def node(self, n: Node, loops: frozenset[str], out: list[ir.Stmt]) -> None:
        match n:
            case Loop(_, dim, body, start, stop):
                out.append(ir.For(dim, self.tiles[dim], self.body(body, loops | {dim}), start, stop))
            case Init(name, dims, dtype, value, index_name):
                out += [self.alloc(name, dims, dtype, loops), ir.Fill(name, value)]
                if index_name is not None:
                    self.index[name] = index_name
                    out += [self.alloc(index_name, dims, DType.I64, loops), ir.Fill(index_name, lit(-1))]
            case Let(name, dims, dtype, expr, None):
                out += [self.alloc(name, dims, dtype, loops), ir.Map(name, expr)]
            case Let(name, dims, dtype):
                out.append(self.alloc(name, dims, dtype, loops))
                if n.index_name is not None:
                    self.index[name] = n.index_name
                    out.append(self.alloc(n.index_name, dims, DType.I64, loops))
                    out.append(ir.Fill(name, Const(identity_of(str(n.reducer), dtype.torch_dtype), dtype)))
                    out.append(ir.Fill(n.index_name, lit(-1)))
                out.append(self.reduction(n, accumulate=n.index_name is not None))
            case Update(name, expr):
                out.append(ir.Map(name, expr))
            case Accumulate():
                out.append(self.reduction(n, accumulate=True))
            case Store(tensor, index, dims, expr, added):
                out.append(ir.Store(tensor, index, dims, expr, added))

    def reduction(self, n: Let | Accumulate, *, accumulate: bool) -> ir.Stmt:
        op = str(n.reducer)
        if n.payload is not None:
            return ir.Select(n.name, self.index[n.name], op, n.rdims, n.expr, n.payload, accumulate)
        p = product_of(n, self.dims[n.name])
        if p is not None and p.loads is not None and p.distinct:
            return ir.Gemm(n.name, *p.loads, p.rdims, accumulate, n.kept)
        return ir.Reduce(n.name, op, n.rdims, n.expr, accumulate, n.kept)

    def alloc(self, name: str, dims: tuple[str, ...], dtype: DType, loops: frozenset[str]) -> ir.Alloc:
        extents = tuple(self.extent(d, loops) for d in dims)
        small = all(isinstance(e, Const) for e in extents)
        return ir.Alloc(ir.Buffer(name, dims, extents, dtype, "tile" if small else "panel"))

    def extent(self, d: str, loops: frozenset[str]) -> Expr:
        if d in loops:
            return lit(self.tiles[d])
        return self.block.sizes[d] if is_static(self.block.sizes[d]) else Size(d)
