"""Loops, in up to three parts: tiles on which some mask is undecided, tiles on which all are certain and
nothing is ragged, the rest (`facts`). A loop whose tile covers its extent is no loop, and what it loads is
loaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, Size, tensors_read, transform
from tilefold.backends.triton.context import EMPTY, Context
from tilefold.backends.triton.extremes import MOST, in_bound
from tilefold.backends.triton.facts import Turns, certain
from tilefold.backends.triton.reuse import Reuse
from tilefold.backends.triton.scope import Dim, Known
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two
from tilefold.tile.settle import settle
from tilefold.tile.uses import allocated, expressions, written


class Loops:
    """Renders `For` statements; `body` renders what is in them."""

    def __init__(self, c: Context, body: Callable[[Sequence[ir.Stmt]], None]):
        self.c, self.body = c, body

    def loop(self, s: ir.For, reuse: Reuse | None = None) -> None:
        """One loop, in parts or as no loop. reuse: what it reads that other loops read."""
        size = self.c.size(s.dim).code
        lo, hi = self.bounds(s)
        if s.start is None and s.tile == 1 and s.stop is not None:
            self._whole_tiles(s.dim, s.stop)
        outer = self.c.dims.get(s.dim)
        bin_ = int(size) if size.isdigit() else self.c.bins.get(s.dim)
        keeps = self._keeps(s)
        perhaps = s.tile == 1 and s.stop is not None  # one round or none, of statements that do not reduce over lanes
        if bin_ is not None and lo == "0" and ((s.tile >= bin_ and not perhaps) or keeps):
            # what is held whole has the lanes of its bin
            self._single(replace(s, tile=bin_ if keeps else max(s.tile, bin_)), hi, None if size.isdigit() else bin_)
        else:
            before, self.c.reuse = self.c.reuse, reuse or self.c.reuse
            self._segments(s, lo, hi)
            self.c.reuse = before
        if outer is not None:
            self.c.dims[s.dim] = outer
        else:
            self.c.dims.pop(s.dim, None)

    def _whole_tiles(self, d: str, stop: Expr) -> None:
        """Note what a loop runs over, if that is the whole tiles of a stretch."""
        single = {t.dim for t in self.c.kernel.grid if t.tile == 1}

        def own(e: Expr) -> Expr | None:
            at = e.args[0] if isinstance(e, Call) and e.op == "tile_start" else None
            return at if isinstance(at, Index) and at.dim in single else None

        turns = Turns.of(transform(stop, own))
        if turns is not None:
            self.c.turns[d] = turns

    def bounds(self, s: ir.For) -> tuple[str, str]:
        """First index and one past the last."""
        lo = "0" if s.start is None else self.bound(s.start, f"{s.dim}_lo")
        return lo, self.c.size(s.dim).code if s.stop is None else self.bound(s.stop, f"{s.dim}_hi")

    def _keeps(self, s: ir.For) -> bool:
        """Whether the loop goes over values that the block holds whole: registers cannot be sliced."""
        read = {t for e in expressions(s.body) for t in tensors_read(e)} | set(written(s.body))
        return any(s.dim in b.dims for n, b in self.c.buffers.items() if n in read and n not in allocated(s.body))

    def bound(self, e: Expr, stem: str) -> str:
        """Code of a bound, as a variable here."""
        v = self.c.expressions.value(self.c.settled(e), ())
        if in_bound(e) and not self.c.wide:
            return self.c.scopes.once(
                f"tl.minimum(tl.maximum({v.code}, 0), {MOST}).to(tl.int32)", stem, self.c.scopes.here
            )
        return v.code if v.code.isdigit() else self.c.scopes.once(v.code, stem, self.c.scopes.here)

    def _single(self, s: ir.For, hi: str, covered: int | None) -> None:
        """The tile covers the extent: no loop."""
        lanes = power_of_two(s.tile)
        if lanes == 1 and hi != "1":
            lanes = EMPTY
        if covered is not None:
            self.c.covers[s.dim] = min(s.tile, self.c.covers.get(s.dim, s.tile))
        self.c.dims[s.dim] = Dim(s.dim, "0", lanes, s.tile, self.c.scopes.here, None if hi == str(lanes) else hi)
        self.body(s.body)

    def _segments(self, s: ir.For, lo: str, hi: str) -> None:
        """Before, in and after the stretch of tiles on which masks are settled and nothing is ragged."""
        outer = frozenset(self.c.dims) | {s.dim}
        found = certain(expressions(s.body), s.dim, outer - {s.dim}, self.c.data)
        starts = [self.bound(e, f"{s.dim}_from") for e in found.starts]
        stops = [self.bound(e, f"{s.dim}_to") for e in found.stops]
        lanes = max(power_of_two(s.tile), self.c.config.lanes.get(s.dim, 1))
        whole = lo == "0" or (s.start is not None and self.divisible(s.start, s.tile))
        exact = whole and lanes == s.tile and self.divisible(s.stop or Size(s.dim), s.tile)
        if exact and not found.conditions:
            self._part(s, lo, hi, None, {})
            return
        if lanes != s.tile or self.c.config.specialize:
            # one loop: the pass that specialises warps takes no second one
            self._part(s, lo, hi, None if exact else hi, {})
            return
        here = self.c.scopes.here
        if self.c.kernel.cut and hi.isdigit():
            # a bound that the compiler does not know keeps the tail a loop (see `prepare.steady`)
            hi = self.c.scopes.once(f"{hi} + tl.num_programs(1) - 1", f"{s.dim}_hi", here)
        first = lo
        if starts:
            after = nested("tl.maximum", starts)
            first = self.c.scopes.once(
                f"{lo} + tl.cdiv(tl.maximum({after} - {lo}, 0), {s.tile}) * {s.tile}", f"{s.dim}_a", here
            )
            first = self.c.scopes.once(f"tl.minimum({first}, {hi})", f"{s.dim}_a", here)
        end = nested("tl.minimum", [hi, *stops]) if stops else hi
        last = self.c.scopes.once(
            f"{first} + tl.maximum({end} - {first}, 0) // {s.tile} * {s.tile}", f"{s.dim}_b", here
        )
        parts: list[tuple[str, str, str | None, Mapping[Expr, bool]]] = [
            (first, last, None, dict(found.conditions)),
            (last, hi, None if exact else hi, {}),
        ]
        if exact and not stops:
            parts.pop()  # nothing is behind the stretch
        if starts:
            parts.insert(0, (lo, first, None if exact else hi, {}))
        for part in reversed(parts) if self.c.reuse.writes else parts:
            self._part(s, *part)

    def divisible(self, e: Expr, n: int) -> bool:
        """Whether a loop bound is a multiple of n for certain."""
        if n == 1:
            return True
        match settle(e, {}, self.c.kernel.sizes, {}):
            case Const(v, _):
                return int(v) % n == 0
            case Call(("minimum" | "maximum"), (a, b)):
                return self.divisible(a, n) and self.divisible(b, n)
            case Call("mul", (a, b)):
                return self.divisible(a, n) or self.divisible(b, n)
            case Call("tile_start", (Index(d),)) if any(g.dim == d for g in self.c.kernel.grid):
                return self.c.hold(d).tile % n == 0
            case Call("tile_stop", (Index(d),)):
                return self.c.hold(d).tile % n == 0 and self.divisible(Size(d), n)
        return False

    def _part(self, s: ir.For, lo: str, hi: str, stop: str | None, facts: Mapping[Expr, bool]) -> None:
        known = Known(dict(self.c.known.scales), {**self.c.known.facts, **facts})
        before, self.c.known = self.c.known, known
        self.c.scopes.open()
        at = f"{s.dim}0"
        lanes = max(power_of_two(s.tile), self.c.config.lanes.get(s.dim, 1))
        if lanes == 1:
            stop = None
        bound = (
            stop
            if stop is None or lanes == s.tile
            else self.c.scopes.once(f"tl.minimum({at} + {s.tile}, {stop})", f"{s.dim}_stop", self.c.scopes.here)
        )
        even = s.start is None or self.divisible(s.start, s.tile)
        self.c.dims[s.dim] = Dim(s.dim, at, lanes, s.tile, self.c.scopes.here, bound, even)
        step = at
        if self.c.reuse.writes:
            step = f"{s.dim}_back"
            self.c.scopes.stack[-1].lines.insert(0, f"{at} = {self._last(s.tile, lo, hi)} - {step}")
        self.body(s.body)
        self.c.scopes.close(self._header(s, step, lo, hi, stop), loop=not self.c.gluon)
        for n in dict.fromkeys(written(s.body)):
            self.c.scopes.forget(self.c.buffer_names[n])
        self.c.known = before

    def _last(self, tile: int, lo: str, hi: str) -> str:
        """The sum of the first and the last tile's start."""
        if lo.isdigit() and hi.isdigit():
            return str(2 * int(lo) + max(0, -(-(int(hi) - int(lo)) // tile) - 1) * tile)
        return f"2 * {lo} + (tl.cdiv({hi} - {lo}, {tile}) - 1) * {tile}"

    def _header(self, s: ir.For, at: str, lo: str, hi: str, stop: str | None) -> str:
        if self.c.matrix:
            return f"for {at} in range({lo}, {hi}, {s.tile}):"
        extra = f", num_stages={self.c.config.stages}"
        if self.c.config.specialize:
            extra += ", warp_specialize=True"
        if self.c.interpreted:
            return f"for {at} in tf_range({lo}, {hi}, {s.tile}):"
        return f"for {at} in tl.range({lo}, {hi}, {s.tile}{extra}):"


def nested(op: str, items: Sequence[str]) -> str:
    """A function of two applied to all."""
    out = items[0]
    for i in items[1:]:
        out = f"{op}({out}, {i})"
    return out
