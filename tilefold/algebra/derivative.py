"""Reverse derivatives of expressions: what each element that is read adds to a gradient.

One row an operation: d op / d argument, times the gradient that arrives (`s`), out of the arguments and the result. A
row that lacks an operation is a constant in pieces (floor, comparisons), or is refused. Ties of maximum and minimum
share, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, call, lit, type_of
from tilefold.algebra.gamma import digamma
from tilefold.errors import UnsupportedError

#: (gradient of the result, arguments, result) -> gradients of the arguments; None: none.
Rule = Callable[[Expr, tuple[Expr, ...], Expr], tuple[Expr | None, ...]]


def _share(s: Expr, a: Expr, b: Expr, above: str) -> tuple[Expr, Expr]:
    half = call("where", call("eq", a, b), s * 0.5, 0.0)
    return call("where", call(above, a, b), s, half), call("where", call(above, b, a), s, half)


def _power(s: Expr, args: tuple[Expr, ...], v: Expr) -> tuple[Expr | None, ...]:
    a, b = args
    if isinstance(b, Const):
        inner = a if b.value == 2 else call("pow", a, lit(float(b.value) - 1))
        return s * float(b.value) * inner, None
    return s * b * call("pow", a, b - 1.0), s * v * call("log", a)


_RULES: dict[str, Rule] = {
    "add": lambda s, x, v: (s, s),
    "sub": lambda s, x, v: (s, -s),
    "mul": lambda s, x, v: (s * x[1], s * x[0]),
    "div": lambda s, x, v: (s / x[1], -(s * v / x[1])),
    "pow": _power,
    "neg": lambda s, x, v: (-s,),
    "abs": lambda s, x, v: (s * call("sign", x[0]),),
    "maximum": lambda s, x, v: _share(s, x[0], x[1], "gt"),
    "minimum": lambda s, x, v: _share(s, x[0], x[1], "lt"),
    "exp": lambda s, x, v: (s * v,),
    "exp2": lambda s, x, v: (s * v * math.log(2),),
    "expm1": lambda s, x, v: (s * (v + 1.0),),
    "log": lambda s, x, v: (s / x[0],),
    "log2": lambda s, x, v: (s / (x[0] * math.log(2)),),
    "log1p": lambda s, x, v: (s / (x[0] + 1.0),),
    "sqrt": lambda s, x, v: (s * 0.5 / v,),
    "rsqrt": lambda s, x, v: (s * -0.5 * v * v * v,),
    "sin": lambda s, x, v: (s * call("cos", x[0]),),
    "cos": lambda s, x, v: (-(s * call("sin", x[0])),),
    "tanh": lambda s, x, v: (s * (1.0 - v * v),),
    "sigmoid": lambda s, x, v: (s * v * (1.0 - v),),
    "erf": lambda s, x, v: (s * (2 / math.sqrt(math.pi)) * call("exp", -(x[0] * x[0])),),
    "erfinv": lambda s, x, v: (s * (math.sqrt(math.pi) / 2) * call("exp", v * v),),
    "lgamma": lambda s, x, v: (s * digamma(x[0]),),
    "where": lambda s, x, v: (None, call("where", x[0], s, 0.0), call("where", x[0], 0.0, s)),
}
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "isnan", "isinf"))
#: Constant between jumps.
_FLAT = _COMPARISONS | {"sign", "floor", "ceil", "trunc", "round"}


def pulled(e: Expr, s: Expr, dtype_of: Callable[[str], DType]) -> dict[Load, Expr]:
    """The gradient of every load of a floating tensor in `e`, where that of `e` is `s`.

    UnsupportedError: an operation that has no derivative here.
    """
    found: dict[Load, Expr] = {}

    def pull(e: Expr, s: Expr) -> None:
        if not type_of(e, dtype_of).is_float:
            return
        match e:
            case Load():
                found[e] = found[e] + s if e in found else s
            case Cast(arg, _):
                pull(arg, s)  # rounding is taken for the identity, as everywhere
            case Call(op, args) if op in _RULES:
                for a, part in zip(args, _RULES[op](s, args, e), strict=True):
                    if part is not None:
                        pull(a, part)
            case Call(op, _) if op not in _FLAT:
                raise UnsupportedError(f"{op} has no derivative here")

    pull(e, s)
    return found
