"""Where numbers are in one sorted row of boundaries: `bucketize` and `searchsorted`.

    out[..] = how many boundaries b[k] there are with not b[k] >= x[..], or not b[k] > x[..] for `right`

Few are counted. Of more the place is found by halving: of those that are left from a place on, whether the last of the
lower half is counted says which half is left next. Steps are as many for every number, each a statement; a place is a
sum of one choice a step, which is never outside. NaN is behind all others, as in eager.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten
#: Boundaries that are all compared: none waits for another, and all are the same for neighbours.
FEW = 16


def _steps(count: int) -> Iterator[tuple[int, int]]:
    """Which boundary behind a place is looked at, and how far on the place is then, where count of them are left."""
    while count > 1:
        half = count // 2
        yield half - 1, half
        count -= half
    yield 0, 1


def searched(boundaries: str) -> Lowerer:
    """Where `self` is in the argument of that name."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a, (shape, dtype) = attrs(node), meta_of(node)
        b, x = ctx.value(a[boundaries]), ctx.value(a["self"])
        if len(b.shape) != 1 or a.get("sorter") is not None:
            raise UnsupportedError(f"{ctx.origin} in several rows, or in one that is not sorted itself")
        count = ctx.static_int(a[boundaries].meta["val"].shape[0], "the number of boundaries")  # type: ignore[attr-defined]
        behind = "gt" if a["right"] or a.get("side") == "right" else "ge"
        ct = ctx.compute_dtype([a[boundaries], a["self"]])

        def counted(i: Indices, k: Expr, far: int) -> Expr:
            """far where boundary k is counted, else 0."""
            found = call(behind, ctx.operand(b, (k,), ct), ctx.operand(x, i, ct))
            return call("where", found, const(0), const(far))

        def all_counted(i: Indices) -> Expr:
            total: Expr = const(0)
            for k in range(count):
                total = _plus(total, counted(i, const(k), 1))
            return total

        def further(place: Value, look: int, far: int) -> Value:
            def at(i: Indices) -> Expr:
                return _plus(place.at(i), counted(i, ctx.simplify(place.at(i) + look), far))

            return ctx.map(shape, DType.I64, at)

        if count <= FEW:
            return ctx.map(shape, dtype, all_counted)
        place = Value(shape, DType.I64, lambda _: const(0))
        for look, far in _steps(count):
            place = further(place, look, far)
        return ctx.map(shape, dtype, place.at)

    return lower


def _plus(a: Expr, b: Expr) -> Expr:
    return b if a == const(0) else a + b


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.bucketize.Tensor: searched("boundaries"),
    aten.bucketize.Scalar: searched("boundaries"),
    aten.searchsorted.Tensor: searched("sorted_sequence"),
    aten.searchsorted.Scalar: searched("sorted_sequence"),
}
