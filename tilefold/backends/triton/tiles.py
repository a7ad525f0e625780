"""Default configurations: what a kernel runs with before, or without, tuning.

Rules, from what its statements do. Rows of matrix products: 128 a thread block where there are
enough to fill the machine, else fewer. Streamed dims of products: 64. Heads that share keys and
have too few rows each are packed into one tile. Everything else is sized by elements a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Index, Load, dims_used, walk
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Accumulate, Block, Let, Loop, Node, exprs_of
from tilefold.block.ir import walk as nodes_of

#: Elements of the largest value of a kernel without products, a thread block.
AREA = 8192
#: Longest axis that a thread block holds at once (elements).
HELD = 1 << 15
#: A contraction of more elements than this is streamed.
CONTRACTED = 256
#: Thread blocks that fill a large GPU once.
FULL = 132


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at: loops, products with the dims of their sides, heads that share operands."""

    parallel: tuple[str, ...]
    streamed: tuple[str, ...]
    products: tuple[tuple[frozenset[str], frozenset[str], frozenset[str]], ...]
    shared: Mapping[str, int]
    reduced: frozenset[str]
    used: frozenset[str]
    bits: int

    @staticmethod
    def of(b: Block) -> Shape:
        """Read a block program."""
        loops = [n for n in nodes_of(b.body) if isinstance(n, Loop)]
        products = [p for n in nodes_of(b.body) if (p := product_sides(n)) is not None]
        shared: dict[str, int] = {}
        reduced: set[str] = set()
        used: set[str] = set()
        for n in nodes_of(b.body):
            if isinstance(n, Let | Accumulate):
                reduced |= set(n.rdims)
            for e in exprs_of(n):
                used |= dims_used(e)
                for x in walk(e):
                    match x:
                        case Call("floordiv", (Index(d), Const(c, DType.I64))):
                            shared[d] = min(int(c), shared.get(d, int(c)))
        bits = min([i.dtype.nbytes * 8 for i in b.inputs if i.dtype.is_float] or [32])
        singles = {n.dim for n in loops if n.single}
        return Shape(
            tuple(n.dim for n in loops if n.kind == "forall" and n.dim not in singles),
            tuple(dict.fromkeys(n.dim for n in loops if n.kind == "for")),
            tuple(products), shared, frozenset(reduced), frozenset(used), bits,
        )  # fmt: skip


def product_sides(n: Node) -> tuple[frozenset[str], frozenset[str], frozenset[str]] | None:
    """Dims of the left operand only, of the right only, and reduced, if the statement sums products of loads."""
    if not isinstance(n, Let | Accumulate) or n.reducer != "sum":
        return None
    match n.expr:
        case Call("mul", (Load() as a, Load() as b)):
            da, db = dims_used(a), dims_used(b)
            if set(n.rdims) <= da & db and da != db:
                return frozenset(da - db), frozenset(db - da), frozenset(n.rdims)
    return None


def default_config(b: Block, sizes: Mapping[str, int]) -> TritonConfig:
    """A configuration for extents about as `sizes` (all dims; dynamic ones as at this call)."""
    s = Shape.of(b)
    if any(m and n for m, n, _ in s.products):
        return _with_products(s, sizes)
    return _without(b, s, sizes)


def _bin(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _with_products(s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    tiles: dict[str, int] = {}
    lanes: dict[str, int] = {}
    sides = frozenset(d for m, n, _ in s.products for d in m | n)
    rows = [d for d in s.parallel if d in sides and d not in s.shared]
    others = [d for d in s.parallel if d not in rows]
    tiles |= dict.fromkeys(others, 1)
    blocks = 1
    for d in others:
        blocks *= sizes[d]
    wide = max([sizes[d] for m, n, k in s.products for d in m | n | k if d not in s.parallel + s.streamed] or [1])
    for at, d in enumerate(rows):
        most = 128 if wide <= 256 else 64
        if at == 0 and len(rows) == 1:
            while most > 64 and blocks * -(-sizes[d] // most) < FULL:
                most //= 2
        tiles[d] = max(16, min(most, _bin(sizes[d])))
    few = all(tiles[d] <= 16 and sizes[d] < 16 for d in rows)
    for d, c in s.shared.items():
        if d in tiles and few and c & (c - 1) == 0 and c > 1:
            tiles[d] = min(c, 64)
            if not rows and tiles[d] < 16:
                lanes[d] = 16
    for d in rows:
        if sizes[d] < 16:
            lanes[d] = 16
            tiles[d] = min(tiles[d], _bin(sizes[d]))
    for d in s.streamed:
        product = d in sides or any(d in k for _, _, k in s.products)
        tiles[d] = (32 if wide > 256 else 64) if product else 1024
    for _, _, k in s.products:
        for d in k:
            if d not in tiles and sizes[d] > CONTRACTED and wide > 1 and not _held_whole(s, d):
                tiles[d] = 64
    big = max([tiles[d] for d in rows] or [16])
    warps = 8 if (big >= 128 and wide >= 128) or wide > 256 else 4
    return TritonConfig(tiles, lanes, warps=warps, stages=3 if wide <= 128 else 2)


def _held_whole(s: Shape, d: str) -> bool:
    """Whether the streamed loop's products contract d: then its operand stays in the block."""
    return any(d in k and (set(s.streamed) & (m | n)) for m, n, k in s.products)


def _without(b: Block, s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    tiles: dict[str, int] = {}
    local = 1
    for d in s.used:
        if d not in s.parallel and d not in s.streamed and sizes[d] > 1:
            local *= _bin(sizes[d])
    for d in s.streamed:
        room = max(1, HELD // min(local, HELD))
        whole = _bin(sizes[d])
        tiles[d] = whole if whole <= room else max(1, min(AREA // min(local, AREA), whole))
        local *= tiles[d]
    room = max(1, (AREA // 4 if s.reduced else AREA // 8) // local)
    for d in reversed(s.parallel):
        tiles[d] = max(1, min(room, _bin(sizes[d])))
        room //= tiles[d]
    area = local
    for d in s.parallel:
        area *= tiles[d]
    warps = 4 if area <= 2048 else 8 if area <= 8192 else 16 if area <= 16384 else 32
    return TritonConfig(tiles, {}, warps=warps, stages=2)
