"""What a maximum bounds: |x| / (max |x| / k) is at most k, so its way to e4m3 needs no test for overflow.

Law: what was brought into m by `m = max(m, |x|)` is no more than m, until something else writes m; where x is NaN, so
are m and the quotient by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilefold.algebra.expr import Call, Const, Expr, Load

#: Quotients are off by less than this factor.
SLACK = 1.0 + 1e-6


class Bounds:
    """Facts at a point of a kernel: buffer b -> {e: f}, b >= f e with f > 0."""

    def __init__(self) -> None:
        self.above: dict[str, dict[Expr, float]] = {}

    def reduced(self, buf: str, op: str, e: Expr, *, accumulate: bool) -> None:
        """A reduction of e has been written to the buffer, or brought into it."""
        known = self.above.get(buf, {}) if accumulate else {}
        self.above[buf] = {**known, e: 1.0} if op == "max" else {}

    def mapped(self, buf: str, e: Expr) -> None:
        """The buffer has been set to e."""
        self.above[buf] = self._below(e)

    def forget(self, buffers: Iterable[str]) -> None:
        """Statements that write these buffers come next, perhaps not for the first time."""
        for b in buffers:
            self.above.pop(b, None)

    def quotient(self, x: Expr, s: Expr) -> float | None:
        """What |x / s| is at most; None where nothing is known."""
        factor = self._below(s).get(Call("abs", (x,)))
        return None if factor is None else SLACK / factor

    def _below(self, s: Expr) -> dict[Expr, float]:
        match s:
            case Load(tensor=b):
                return self.above.get(b, {})
            case Call("maximum", (a, b)):
                return {**self._below(a), **self._below(b)}
            case Call("mul", (a, Const(k, d))) if d.is_float and float(k) > 0:
                return {e: f * float(k) for e, f in self._below(a).items()}
            case Call("div", (a, Const(k, d))) if d.is_float and float(k) > 0:
                return {e: f / float(k) for e, f in self._below(a).items()}
        return {}
