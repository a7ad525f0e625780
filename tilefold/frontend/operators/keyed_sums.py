"""`rows_of_sums` as index notation: y[r, j] = sum over k of where(at[k] == r, rows[k, j], 0) (`tensor.keyed`)."""

from __future__ import annotations

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.added_rows import rows_of_sums_op
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.index import checker, wrapped


def in_a_region(node: torch.fx.Node) -> bool:
    """Whether a node's sums are a statement of a region: those in float32, which additions in any order may have."""
    return node.target is rows_of_sums_op and node.meta["val"].dtype is torch.float32


def rows_of_sums(ctx: Context, node: torch.fx.Node) -> Value:
    """Indices may count from the end; an error where one does not exist. Nothing is added to row `skipped`."""
    a = attrs(node)
    at, rows = ctx.value(a["at"]), ctx.value(a["rows"])
    skipped = ctx.static_int(a["skipped"], "skipped")
    shape, dtype = meta_of(node)
    if dtype is not DType.F32:
        raise UnsupportedError(f"{ctx.origin} in {dtype.value}")
    check, rank = checker(), len(at.shape)

    def one(i: Indices, k: Indices) -> Expr:
        key = at.at(k)
        key = check(wrapped(key if ctx.type_of(key) is DType.I64 else Cast(key, DType.I64), shape[0]), shape[0])
        if skipped >= 0:
            key = call("where", call("eq", key, skipped), -1, key)
        value = rows.at((*k, *i[1:]))
        value = value if ctx.type_of(value) is DType.F32 else Cast(value, DType.F32)
        return call("where", call("eq", i[0], key), value, 0.0)

    assert len(rows.shape) == rank + len(shape) - 1
    return ctx.reduce("sum", shape, at.shape, dtype, one)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {rows_of_sums_op: rows_of_sums}
