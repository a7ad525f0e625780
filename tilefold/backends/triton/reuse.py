"""What the second-level cache is asked to keep, and what not.

A tensor that a thread block reads twice, once to reduce a row that it cannot hold, again to write its results: the
second reading should find the row in the cache. So the first asks the cache to keep it, the second to let go of
it, as of what it writes; and the second starts where the first ended, at what was read last. A tensor that is read
once and is larger than the cache is let go of at once (`passing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilefold.algebra.expr import Const, Expr, Load, dims_used, loads
from tilefold.backends.triton.tiles import Shape
from tilefold.block.ir import Block, Loop, Node, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.hardware import H100, Gpu
from tilefold.tensor.ir import Input
from tilefold.tile import ir
from tilefold.tile.uses import allocated, expressions, written

#: What streams by is this many times what its kernel writes.
WRITTEN = 8


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of one loop: tensors to keep, tensors read for the last time, and whether its tiles may go backwards."""

    keep: frozenset[str] = frozenset()
    drop: frozenset[str] = frozenset()
    writes: bool = False


def reuse_of(stmts: Sequence[ir.Stmt], at: int, grid: frozenset[str]) -> Reuse:
    """What is read twice of what the loop `stmts[at]` and the loops beside it read; nothing that blocks share."""
    s = stmts[at]
    assert isinstance(s, ir.For)
    mine = _rows(s, grid)
    before = [x for x in stmts[:at] if isinstance(x, ir.For)]
    after = [x for x in stmts[at + 1 :] if isinstance(x, ir.For)]
    keep = mine & {t for x in after if _writes(x) for t in _rows(x, grid)}
    drop = mine & {t for x in before for t in _rows(x, grid)} - keep if _writes(s) else frozenset()
    return Reuse(keep, drop, bool(drop))


def _rows(s: ir.For, grid: frozenset[str]) -> frozenset[str]:
    """Tensors that each thread block reads elements of its own of."""
    read = {ld for e in expressions(s.body) for ld in loads(e)}
    return frozenset(ld.tensor for ld in read if dims_used(ld) & grid and dims_used(ld) - grid)


def _writes(s: ir.For) -> bool:
    """Whether the loop stores and carries nothing from one tile to the next: then any order of tiles will do."""
    stores = any(isinstance(x, ir.Store) for x in s.body)
    nested = any(isinstance(x, ir.For) for x in s.body)
    return stores and not nested and set(written(s.body)) <= allocated(s.body)


def passing(b: Block, machine: Gpu = H100) -> frozenset[str]:
    """Inputs that stream by: each element is read once, by one thread block, and there are more than a cache keeps.

    Nothing finds them in the second-level cache afterwards. Read as what is to leave it first, they do not push out
    what the kernel before left there. Not where much is written, in folds over products, nor where neighbours are
    read one by one: of those, an H200 was slower, or as fast.
    """
    s = Shape.of(b)
    if any((m and n) or k - frozenset(s.streamed) for m, n, k in s.products):
        return frozenset()
    reads = [(path, ld) for path, ld in _reads(b.body, ()) if ld.tensor in {i.name for i in b.inputs}]
    large = [i for i in b.inputs if machine.home(_elements(i) * i.dtype.nbytes) is machine.tiers[-1]]
    passes = all(_passes(b, i, [r for r in reads if r[1].tensor == i.name], machine) for i in large)
    return frozenset(i.name for i in large) if passes else frozenset()


def _passes(b: Block, i: Input, reads: Sequence[tuple[tuple[Loop, ...], Load]], machine: Gpu) -> bool:
    places = {(tuple(id(n) for n in path), ld.index) for path, ld in reads}
    if len(places) != 1 or not all(isinstance(e, Const) for e in (*i.shape, *b.sizes.values())):
        return False
    (path, load), elements = reads[0], _elements(i)
    dims = {d for e in load.index for d in dims_used(e)}
    # as many places as elements, or some (windows, heads that share keys) are read again
    computed = any(loads(e) for e in load.index) or math.prod(_extent(b, d) for d in dims) > elements
    cut = {d for n in path for e in (n.start, n.stop) if e is not None for d in dims_used(e)}
    parallel = {n.dim for n in nodes_of(b.body) if isinstance(n, Loop) and n.kind == "forall" and _extent(b, n.dim) > 1}
    if computed or not parallel <= dims | cut:
        return False
    read = elements * i.dtype.nbytes
    written = sum(math.prod(_extent(b, d) for d in r.dims) * r.dtype.nbytes for r in b.results)
    row = _extent_of(i.shape[-1]) * i.dtype.nbytes if i.shape else 0
    return row >= machine.sector and WRITTEN * written <= read


def _elements(i: Input) -> int:
    """Of the tensor; extents that only calls know count as none."""
    return math.prod(_extent_of(e) for e in i.shape)


def _extent(b: Block, d: str) -> int:
    return _extent_of(b.sizes[d])


def _extent_of(e: Expr) -> int:
    return int(e.value) if isinstance(e, Const) else 0


def _reads(nodes: Sequence[Node], path: tuple[Loop, ...]) -> Iterator[tuple[tuple[Loop, ...], Load]]:
    """Loads, each with the serial loops around it."""
    for n in nodes:
        if isinstance(n, Loop):
            yield from _reads(n.body, (*path, n) if n.kind == "for" else path)
        else:
            yield from ((path, ld) for e in exprs_of(n) for ld in loads(e))
