"""Sizes and scalars of FX metadata as expressions: sympy over shape symbols -> `Expr` over `Sym`."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.utils._sympy import functions as sf

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, Sym, call
from tilefold.errors import UnsupportedError
from tilefold.tensor.index_simplify import const, simplify

_BINARY: tuple[tuple[type, str], ...] = (
    (sf.FloorDiv, "floordiv"),
    (sf.CleanDiv, "floordiv"),
    (sf.PythonMod, "mod"),
    (sf.Mod, "mod"),
    (sympy.Mod, "mod"),
    (sf.IntTrueDiv, "div"),
    (sf.FloatTrueDiv, "div"),
    (sf.FloatPow, "pow"),
    (sf.PowByNatural, "pow"),
)
_FOLDED: tuple[tuple[type, str], ...] = (
    (sympy.Add, "add"),
    (sympy.Mul, "mul"),
    (sf.Max, "maximum"),
    (sf.Min, "minimum"),
    (sympy.Max, "maximum"),
    (sympy.Min, "minimum"),
)


def size(n: int | torch.SymInt) -> Expr:
    """An extent (or integer argument) as a canonical expression; UnsupportedError if it is data-dependent."""
    if isinstance(n, int):
        return const(n)
    return simplify(from_sympy(n.node.expr), {})


def shape(sizes: Sequence[int | torch.SymInt]) -> tuple[Expr, ...]:
    """Extents of a (fake) tensor."""
    return tuple(size(n) for n in sizes)


def scalar(x: bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool) -> Expr:
    """A Python or symbolic scalar; floats are f64, as Python's are."""
    if isinstance(x, torch.SymInt):
        return size(x)
    if isinstance(x, torch.SymFloat | torch.SymBool):
        return from_sympy(x.node.expr)
    if isinstance(x, bool):
        return Const(x, DType.BOOL)
    return const(x) if isinstance(x, int) else Const(float(x), DType.F64)


def from_sympy(e: sympy.Basic) -> Expr:
    """The expression of a shape-environment formula."""
    match e:
        case sympy.Integer():
            return const(int(e))
        case sympy.Float() | sympy.Rational():
            return Const(float(e), DType.F64)
        case sympy.Symbol():
            if str(e).startswith(("u", "zuf")):
                raise UnsupportedError(f"the size {e} depends on data")
            return Sym(str(e))
        case sf.ToFloat():
            return Cast(from_sympy(e.args[0]), DType.F64)
        case sympy.Pow():
            return _power(e)
    if e.func.__name__ == "OpaqueUnaryFn_sqrt":
        return call("sqrt", Cast(from_sympy(e.args[0]), DType.F64))
    parts: tuple[sympy.Basic, ...] = e.args
    for kind, op in _BINARY:
        if isinstance(e, kind):
            a, b = map(from_sympy, parts)
            if op == "div" and isinstance(e, sf.IntTrueDiv):
                a = Cast(a, DType.F64)
            return call(op, a, b)
    for kind, op in _FOLDED:
        if isinstance(e, kind):
            out, *rest = map(from_sympy, parts)
            for r in rest:
                out = call(op, out, r)
            return out
    raise UnsupportedError(f"the size formula {e} ({e.func.__name__}) is not covered")


def _power(e: sympy.Basic) -> Expr:
    base, power = e.args
    if not (isinstance(power, sympy.Integer) and int(power) > 0):
        raise UnsupportedError(f"the size formula {e} is not covered")
    b = from_sympy(base)
    out = b
    for _ in range(int(power) - 1):
        out = out * b
    return out
