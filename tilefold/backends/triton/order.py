"""In which order thread blocks start.

Under a causal mask later rows have longer loops. Thread blocks start in order, so the longest go first; and among
the heads as well as within one, or those of the last heads would run on when all others have ended. But heads side
by side share no keys, and together they should not read more than the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, walk
from tilefold.block.ir import Block, Loop, exprs_of
from tilefold.block.ir import walk as nodes_of

#: Bytes that thread blocks which run side by side may read again and again: half of a large GPU's last cache.
CACHE = 24 << 20


def interleaved(b: Block, sizes: Mapping[str, int], rows: str) -> int:
    """Blocks of the other parallel dims to start side by side, tiles of `rows` after one another.

    As many as leave what the loops stream in the cache, one at least. sizes: extents of the dims.
    """
    loops = [n for n in nodes_of(b.body) if isinstance(n, Loop)]
    others = math.prod(sizes[n.dim] for n in loops if n.kind == "forall" and n.dim != rows)
    streamed = frozenset(n.dim for n in loops if n.kind == "for")
    kinds = {i.name: i.dtype for i in b.inputs}
    nbytes: dict[tuple[str, tuple[Expr, ...]], float] = {}
    for n in nodes_of(b.body):
        for e in () if isinstance(n, Loop) else exprs_of(n):
            for x in walk(e):
                if isinstance(x, Load) and x.tensor in kinds and streamed & frozenset(dims_used(x)):
                    count = math.prod(_values(ix, sizes) for ix in x.index)
                    nbytes[x.tensor, x.index] = count * kinds[x.tensor].nbytes
    each = sum(nbytes.values()) / max(1, others)
    return max(1, min(others, int(CACHE / max(each, 1.0))))


def _values(ix: Expr, sizes: Mapping[str, int]) -> int:
    """About how many values an index takes."""
    match ix:
        case Call("floordiv", (x, Const(c))):
            return -(-_values(x, sizes) // int(c))
        case Index(d):
            return sizes[d]
    return math.prod(sizes[d] for d in dims_used(ix))
