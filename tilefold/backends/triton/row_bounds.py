"""What the bounds of the stream's loop say for all blocks of rows (`row_roles`): whether each meets a tile, and how
many turns of a stretch there are at most (`row_folds`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, Sym, transform, walk
from tilefold.algebra.ops import TILE_BOUNDS, TILE_EXTREMES
from tilefold.backends.triton.parts import ROWS
from tilefold.tile import ir


def never_empty(kernel: ir.Kernel, loop: ir.For, row: str) -> bool:
    """Whether a loop has a tile for each block of rows, for certain."""
    sizes = [e.value for d in (row, loop.dim) if isinstance(e := kernel.sizes[d], Const)]
    if len(sizes) != 2 or not all(int(n) > 0 for n in sizes):
        return False
    if loop.start is not None:  # from the rows on: there is a streamed index at each
        return loop.stop is None and int(sizes[0]) <= int(sizes[1]) and _no_more(loop.start, row)
    return loop.stop is None or _at_least_one(loop.stop, row, loop.dim)


def _no_more(e: Expr, row: str) -> bool:
    """Whether a bound of the stream is the start of the rows, or less than that or than 1."""
    match e:
        case Call("maximum", (a, b)):
            return _no_more(a, row) and _no_more(b, row)
        case Call("add", (a, Const(c, DType.I64))):
            return int(c) <= 0 and _no_more(a, row)
        case Call("sub", (a, Const(c, DType.I64))):
            return int(c) >= 0 and _no_more(a, row)
        case Call("tile_start", (Index(d),)):
            return d == row
        case Const(c, DType.I64):
            return int(c) <= 0
    return False


def _at_least_one(e: Expr, row: str, stream: str) -> bool:
    """Whether a bound of the stream is at least 1: minimum(size(stream), tile_stop(row) + c), c not negative."""
    match e:
        case Call("minimum", (a, b)):
            return _at_least_one(a, row, stream) and _at_least_one(b, row, stream)
        case Call("add", (a, Const(c, DType.I64))):
            return int(c) >= 0 and _at_least_one(a, row, stream)
        case Call("tile_stop", (Index(d),)):
            return d == row
        case Size(d):
            return d == stream
    return False


def most_turns(
    kernel: ir.Kernel, loop: ir.For, row: str, groups: int, starts: Sequence[Expr], stops: Sequence[Expr], *, led: bool
) -> tuple[int, int, int] | None:
    """The most tiles that a group of any block has after, in and before what needs no mask, counted as kernels do; None
    where sizes, or bounds, are known no earlier than there. starts, stops: of what needs none. led: the last tile
    stands before the loops."""
    extents = {d: int(e.value) for d in (row, loop.dim) if isinstance(e := kernel.sizes[d], Const)}
    bounds = (loop.start or Const(0, DType.I64), loop.stop or Size(loop.dim))
    if len(extents) != len({row, loop.dim}) or not all(_of_places(e, row, extents) for e in (*bounds, *starts, *stops)):
        return None
    with _disable_current_modes():  # numbers are looked at: not under a fake mode
        return _counted(loop, groups, extents, row, (starts, stops), led=led)


def _counted(
    loop: ir.For,
    groups: int,
    extents: Mapping[str, int],
    row: str,
    clear: tuple[Sequence[Expr], Sequence[Expr]],
    *,
    led: bool,
) -> tuple[int, int, int]:
    """`most_turns` of known bounds. clear: starts and stops of what needs no mask."""
    starts, stops = clear
    bounds = (loop.start or Const(0, DType.I64), loop.stop or Size(loop.dim))
    block = torch.arange(0, extents[row], ROWS * groups).unsqueeze(1)
    own = block + ROWS * torch.arange(groups)

    def value(e: Expr, first: torch.Tensor, length: int) -> torch.Tensor:
        places = {"tile_start": first, "tile_stop": (first + length).clamp(max=extents[row])}
        at = transform(e, lambda x: Load(x.op, ()) if isinstance(x, Call) and x.op in places else None)
        env = Env(lambda name, _: places[name], extents, {})
        return evaluate(at, Grid({"block": (0, len(block)), "group": (0, groups)}), env)

    lo, hi = (value(e, block, ROWS * groups) for e in bounds)
    most = -(-(hi - lo).clamp(min=0) // loop.tile) - int(led)
    end, after = hi, torch.full_like(lo, 0)
    for e in stops:
        end = torch.minimum(end, value(e, own, ROWS))
    for e in starts:
        after = torch.maximum(after, -(-(value(e, own, ROWS) - lo).clamp(min=0) // loop.tile))
    first = torch.minimum(after, most) if starts else torch.zeros_like(most)
    last = torch.minimum((end - lo).clamp(min=0) // loop.tile, most)
    last = torch.maximum(last, first) if starts else last
    counts = torch.broadcast_tensors(most - last, last - first, first)
    return tuple(int(n.max()) for n in counts)  # type: ignore[return-value]


def _of_places(e: Expr, row: str, extents: Mapping[str, int]) -> bool:
    """Whether an expression is one of where a block of rows begins and ends, and of numbers."""
    leaves = [x for x in walk(e) if isinstance(x, Index | Load | Size | Sym)]
    calls = [x for x in walk(e) if isinstance(x, Call)]
    ends = [x for x in calls if x.op in TILE_BOUNDS and x.args == (Index(row),)]
    known = all(isinstance(x, Index) or (isinstance(x, Size) and x.dim in extents) for x in leaves)
    alone = sum(isinstance(x, Index) for x in leaves) == len(ends)
    return known and alone and not any(x.op in TILE_EXTREMES for x in calls)
