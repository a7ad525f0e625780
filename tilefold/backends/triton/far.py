"""Scores of which products with log2(e) are too coarse: masks by the least number of a type, by -1e9.

`exponents` says what is done about them. Products are taken to be near, as scores are, where each of them would cost
something; where it is only the maximum of a row that is looked at, nothing is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load
from tilefold.tile import ir

LOG2E = math.log2(math.e)
#: Exponents in base 2 up to which a rounded one is off by 8 at most: exp2 of that is a number of 16 bits.
COARSE = 2.0**28
#: Numbers whose products with log2(e) are.
NEAR = COARSE / LOG2E
#: Types whose numbers may be larger.
_WIDE = (DType.F32, DType.BF16, DType.F64)
#: What is as far as one of its arguments is.
_KEEPING = frozenset({"add", "sub", "neg", "abs", "maximum", "minimum", "within"})


def may_be_far(e: Expr, of_load: Callable[[Load], bool]) -> bool:
    """Whether `e` has finite values beyond `NEAR` by its constants or by what is added as it was given.

    Products are taken to be near.
    """
    match e:
        case Const(v, dtype):
            return dtype.is_float and math.isfinite(float(v)) and abs(float(v)) > NEAR
        case Load():
            return of_load(e)
        case Cast(arg, dtype):
            return dtype in _WIDE and may_be_far(arg, of_load)
        case Call("where", (_, a, b)):
            return may_be_far(a, of_load) or may_be_far(b, of_load)
        case Call("mul", (a, Const())) | Call("mul", (Const(), a)) | Call("div", (a, Const())):
            return may_be_far(a, of_load)
        case Call(op, args) if op in _KEEPING:
            return any(may_be_far(a, of_load) for a in args)
    return False


def far_tensors(kernel: ir.Kernel) -> frozenset[str]:
    """Arguments and buffers of the kernel that may hold such numbers."""
    far = {t.name for t in kernel.tensors if t.dtype in _WIDE}
    pairs = list(_written(kernel.body))

    def known(ld: Load) -> bool:
        return ld.tensor in far

    while more := {b for b, e in pairs if b not in far and may_be_far(e, known)}:
        far |= more
    return frozenset(far)


def _written(stmts: Iterable[ir.Stmt]) -> Iterator[tuple[str, Expr]]:
    """Buffers with what is written to them, sums excepted: products are taken to be near."""
    for s in stmts:
        match s:
            case ir.Map(buf, e) | ir.Fill(buf, e):
                yield buf, e
            case ir.Reduce(buf, "max" | "min", _, e):
                yield buf, e
            case ir.For(body=body):
                yield from _written(body)
