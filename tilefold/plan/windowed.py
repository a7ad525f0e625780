"""How much of a streamed axis a thread block looks at, where a mask bounds the loop: a window.

    for n in maximum(0, tile_start(l) - 383) .. minimum(size(n), tile_stop(l))      of 64 rows: 447 of all n

Segments of the axis cut the window only where they are shorter than it; of others most have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilefold.algebra.evaluate import Env, Grid, evaluate, reader
from tilefold.algebra.expr import Call, Const, Expr, Index, Size, Sym, lit, loads, transform, walk
from tilefold.block.fuse import FusedKernel
from tilefold.block.ir import Loop
from tilefold.block.ir import walk as walk_block


def window(kernels: Sequence[FusedKernel], axis: str, rows: int) -> int | None:
    """Indices of an axis that a tile of so many rows looks at, at most in any loop: the first tile of all dims, those
    in the middle, or the last. None where no mask bounds a loop, or what bounds it is not known."""
    spans: list[int] = []
    for k in kernels:
        sizes = {d: int(e.value) for d, e in k.block.sizes.items() if isinstance(e, Const)}
        for n in walk_block(k.block.body):
            if not isinstance(n, Loop) or n.kind != "for" or n.dim != axis:
                continue
            for at in (0.0, 0.5, 1.0):
                start, stop = (_value(e, sizes, rows, at) for e in (n.start or lit(0), n.stop or Size(axis)))
                if (n.start is None and n.stop is None) or start is None or stop is None:
                    return None
                spans.append(max(1, stop - start))
    return max(spans, default=None)


def _value(e: Expr, sizes: Mapping[str, int], rows: int, at: float) -> int | None:
    """A bound of a loop for the tile of rows there: 0 the first, 1 the last."""

    def one(x: Expr) -> Expr | None:
        match x:
            case Call("tile_start" | "tile_stop" as end, (Index(d),)) if d in sizes:
                start = int(at * (-(-sizes[d] // rows) - 1)) * rows
                return lit(start if end == "tile_start" else min(sizes[d], start + rows))
            case Size(d) if d in sizes:
                return lit(sizes[d])
        return None

    e = transform(e, one)
    if any(True for _ in loads(e)) or any(isinstance(x, Index | Size | Sym) for x in walk(e)):
        return None
    return int(evaluate(e, Grid({}), Env(reader({}), {}, {})).flatten()[0])
