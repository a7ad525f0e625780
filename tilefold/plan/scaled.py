"""Products of 8-bit floats with row and column scales: what matrix libraries compute with scales in the epilogue.

Rounding to 8 bits is not separable (no Fold looks through it), so exact quantisation has to be complete before
the product begins: the product is a step of its own, and its scales, being rank one, ride along.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """out[i, j] = a[i, :] b[:, j] * rows[i] * columns[j], by tensor names; the computes that it stands for."""

    product: str
    out: str
    a: str
    b: str
    rows: str
    columns: str
    dtype: DType


def scaled_products(p: Program) -> tuple[ScaledProduct, ...]:
    """All in `p`: e4m3 operands with plain indices [i, k] and [k, j], read by one scaling map alone."""
    g = Graph.of(p)
    found = []
    for c in p.body:
        alone = len(g.consumers[c.name]) == 1 and c.name not in p.outputs
        if alone and len(c.dims) == 2 and library_product(c, p.sizes) is not None:
            scaled = _match(p, c, g.by_name[g.consumers[c.name][0]])
            if scaled is not None:
                found.append(scaled)
    return tuple(found)


def _match(p: Program, c: Compute, epilogue: Compute) -> ScaledProduct | None:
    loads = [x for x in getattr(c.body, "args", ()) if isinstance(x, Load)]
    i, j = c.dims
    (k,) = c.rdims if len(c.rdims) == 1 else ("",)
    if any(p.dtype_of(x.tensor) is not DType.E4M3 for x in loads) or epilogue.reducer is not None:
        return None
    sides = {x.index: x.tensor for x in loads}
    a, b = sides.get((Index(i), Index(k))), sides.get((Index(k), Index(j)))
    if a is None or b is None or epilogue.dims != c.dims:
        return None
    rows, columns, product = None, None, False
    for f in _factors(epilogue.body):
        match f:
            case Load(name, (Index(x), Index(y))) if name == c.name and (x, y) == (i, j):
                product = True
            case Load(name, index) if _only(index, i) and rows is None and p.dtype_of(name) is DType.F32:
                rows = name
            case Load(name, index) if _only(index, j) and columns is None and p.dtype_of(name) is DType.F32:
                columns = name
            case _:
                return None
    if rows is None or columns is None or not product or epilogue.dtype not in (DType.BF16, DType.F16):
        return None
    return ScaledProduct(c.name, epilogue.name, a, b, rows, columns, epilogue.dtype)


def _factors(e: Expr) -> list[Expr]:
    match e:
        case Call("mul", (x, y)):
            return _factors(x) + _factors(y)
        case Cast(x, dtype) if not dtype.rounds:
            return _factors(x)
    return [e]


def _only(index: tuple[Expr, ...], d: str) -> bool:
    """Whether an access runs over d alone: other axes are at 0."""
    rest = [x for x in index if x != Index(d)]
    return Index(d) in index and all(isinstance(x, Const) and x.value == 0 for x in rest)
